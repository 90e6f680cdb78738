"""One play of one task: tokens in, tokens out, every turn kept exactly as the engine saw it.

Joining ``turns`` gives the engine's last prompt and its answer, token for token;
sampled tokens are never decoded and encoded again, and nothing else is ever
marked as sampled. A call that fails changes no turn. A failure of the engine, a
sandbox or a reward that user code catches and does not mend by a later success
stays in ``unresolved``: whatever that code then returns is no verdict.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import replace
from inspect import isawaitable, iscoroutinefunction
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from palestra.environments.rewards import name_of, place_of
from palestra.errors import (
    ChatError,
    EngineError,
    PalestraError,
    RewardError,
    SandboxError,
    TaskError,
    boundary,
    traceback_of,
)
from palestra.rollouts.base import Engine, GenerateRequest
from palestra.sandboxes.base import ExecResult, Sandbox, SandboxHost, SandboxSpec
from palestra.types import (
    Boundary,
    Completion,
    Message,
    Role,
    SamplingParams,
    Span,
    StopReason,
    Task,
    Turn,
)

if TYPE_CHECKING:
    from palestra.environments.chat import Chat
    from palestra.environments.worker import RewardWorkers

_T = TypeVar("_T")


def turn_seed(seed: int, turn: int) -> int:
    """The sampling seed of an episode's turn ``turn`` (from 0): 63 bits, a pure function of both."""
    digest = hashlib.blake2b(f"turn/{seed}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Episode:
    """What an environment plays through. Made by `palestra.environments.runner`, one per sample."""

    def __init__(
        self,
        task: Task,
        id: str,
        *,
        engine: Engine,
        chat: Chat,
        sampling: SamplingParams,
        sandbox_host: SandboxHost | None = None,
        sandbox_spec: SandboxSpec | None = None,
        workers: RewardWorkers | None = None,
        reward_deadline_s: float = 30.0,
        context_tokens: int | None = None,
    ) -> None:
        self.task = task
        self.id = id
        self.unresolved: dict[Boundary, PalestraError] = {}
        """Failures that no later success of the same kind mended."""
        self._engine = engine
        self._chat = chat
        self._sampling = sampling
        self._host = sandbox_host
        self._spec = sandbox_spec
        self._workers = workers
        self._reward_deadline_s = reward_deadline_s
        self._context_tokens = context_tokens
        self._messages: list[Message] = []
        self._turns: list[Turn] = []
        self._spans: list[Span] = []
        self._doing: list[Boundary] = []
        self._ended_by: int | None = None
        self._leases: list[_Lease] = []
        self._over = False

    @property
    def messages(self) -> tuple[Message, ...]:
        """The transcript so far: what was said and what the model answered, as text."""
        return tuple(self._messages)

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(self._turns)

    @property
    def spans(self) -> tuple[Span, ...]:
        """``generate``, ``sandbox`` and ``reward`` intervals that ended, by their start."""
        return tuple(sorted(self._spans, key=lambda span: span.start_s))

    @property
    def stop_reason(self) -> StopReason | None:
        """Why the last turn ended; CONTEXT means that nothing more can be said."""
        return next((t.stop_reason for t in reversed(self._turns) if t.stop_reason is not None), None)

    @property
    def doing(self) -> Boundary | None:
        """The room that works for this episode now; None while the environment's own code runs."""
        return self._doing[-1] if self._doing else None

    async def say(self, text: str | Sequence[Message] | None = None, *, role: Role = "user") -> str:
        """Say something and return the model's next answer, without its end-of-turn token.

        A string is one message of ``role``; None, only at the beginning, is the task's
        own chat. Where the context is full the answer is '' and ``stop_reason`` CONTEXT:
        that is the policy's doing, not a failure. Raises ChatError or EngineError.
        """
        self._require_open("say")
        if Boundary.ENGINE in self._doing:
            raise TaskError(
                f"episode {self.id}: two ep.say at once: a chat has one order", expected="await each"
            )
        new = self._new_messages(text, role)
        with self._doing_for(Boundary.CHAT, "say"):
            prompt = self._prompt(new)
        if self._turns and self._is_full(len(prompt)):
            return self._end_full()
        seen = tuple(token for turn in self._turns for token in turn.token_ids)
        completion = await self._generate(seen + prompt)
        self._turns += [Turn.given(prompt, new[-1].role), Turn.sampled(completion)]
        self._messages += new
        answer = self._read(completion)
        self._messages.append(Message("assistant", answer))
        if completion.stop_reason is StopReason.ABORTED:
            raise self._noted(EngineError(f"the engine aborted turn {self._sampled_turns()} of {self.id}"))
        return answer

    def sandbox(self, spec: SandboxSpec | None = None) -> AbstractAsyncContextManager[Sandbox]:
        """``async with ep.sandbox() as box``: a private place to run programs in.

        Its limits are those of ``spec``, else the environment's, else the job's.
        Raises SandboxError where there is no isolation; a failing program is not an error.
        """
        self._require_open("sandbox")
        return _Lease(self, self._host, spec or self._spec or SandboxSpec())

    async def grade(self, reward: Callable[..., object], *arguments: object) -> object:
        """What ``reward(*arguments)`` returns, under the reward deadline. RewardError if it fails.

        A plain function runs in a worker process that can be killed: it gets copies of its
        arguments, and may block or crash. A coroutine function runs here and must not block.
        """
        self._require_open("grade")
        with self._doing_for(Boundary.REWARD, name_of(reward), span="reward"):
            if is_async(reward):
                return await self._grade_here(reward, arguments)
            if self._workers is None:
                raise RewardError(f"there are no workers here to run {name_of(reward)} in")
            return await self._workers.call(reward, *arguments, deadline_s=self._reward_deadline_s)

    async def close(self) -> list[str]:
        """End the episode: close the sandboxes it left open. Tracebacks of what went wrong in that."""
        self._over = True
        left = [lease for lease in self._leases if lease.held]
        for lease in left:
            await lease.__aexit__(None, None, None)
        return [failure for lease in self._leases for failure in lease.cleanup_failures]

    def _require_open(self, what: str) -> None:
        if self._over:
            raise TaskError(f"ep.{what} was called after episode {self.id} had ended")

    def _sampled_turns(self) -> int:
        return sum(turn.role == "assistant" for turn in self._turns)

    def _new_messages(self, text: str | Sequence[Message] | None, role: Role) -> list[Message]:
        if text is None:
            if self._turns:
                raise TaskError(
                    "ep.say() without a text repeats the task's chat, which was already said",
                    expected="ep.say(text) for every turn but the first",
                )
            return list(self.task.chat)
        if isinstance(text, str):
            return [Message(role, text)]
        messages: list[object] = list(text)
        wrong = [m for m in messages if not isinstance(m, Message)]
        if wrong or not messages:
            kind = f"a {type(wrong[0]).__name__}: {wrong[0]!r}" if wrong else "no message at all"
            raise TaskError(f"ep.say got {kind}", expected="a string, or a sequence of palestra.Message")
        return list(text)

    def _prompt(self, new: Sequence[Message]) -> tuple[int, ...]:
        if not self._turns:
            return self._chat.first(new)
        return self._chat.follow(self._messages, new, ended_by=self._ended_by)

    def _is_full(self, more: int) -> bool:
        if self.stop_reason is StopReason.CONTEXT:
            return True
        length = more + sum(len(turn.token_ids) for turn in self._turns)
        return self._context_tokens is not None and length >= self._context_tokens

    def _end_full(self) -> str:
        """Note that the context is full. The turn is empty: the engine saw nothing of what was said."""
        if self.stop_reason is not StopReason.CONTEXT:
            self._turns.append(Turn((), (), (), (), StopReason.CONTEXT, "assistant"))
        return ""

    async def _generate(self, prompt: tuple[int, ...]) -> Completion:
        turn = self._sampled_turns()
        sampling = replace(self._sampling, seed=turn_seed(self._sampling.seed, turn))
        with self._doing_for(Boundary.ENGINE, f"turn {turn} of {self.id}", span="generate"):
            completion = await self._engine.generate(GenerateRequest(prompt, sampling, f"{self.id}/{turn}"))
            empty = not completion.token_ids
            if empty and completion.stop_reason not in (StopReason.CONTEXT, StopReason.ABORTED):
                raise EngineError(f"the engine sampled nothing for turn {turn} of {self.id}")
        return completion

    def _read(self, completion: Completion) -> str:
        """The text of a completion; remembers the token that ended it, which is not part of it."""
        ids, reason = completion.token_ids, completion.stop_reason
        by_token = reason is StopReason.EOS or (
            reason is StopReason.STOP and ids[-1:] and ids[-1] in self._sampling.stop_token_ids
        )
        self._ended_by = ids[-1] if by_token else None
        return self._chat.tokenizer.decode(ids[:-1] if by_token else ids)

    async def _grade_here(self, reward: Callable[..., object], arguments: tuple[object, ...]) -> object:
        limit = asyncio.timeout(self._reward_deadline_s)
        try:
            async with limit:
                value = reward(*arguments)
                return await value if isawaitable(value) else value
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise RewardError(
                f"{name_of(reward)} did not return within {self._reward_deadline_s:g} s",
                where=place_of(reward),
                expected="a reward that ends in time; deadlines.reward_s sets the limit",
                detail=traceback_of(error),
            ) from error

    @contextmanager
    def _doing_for(self, name: Boundary, doing: str, span: str = "") -> Iterator[None]:
        """Attribute what happens inside to ``name``: its failures, its time, its being cancelled."""
        started = time.monotonic()
        self._doing.append(name)
        try:
            with boundary(name, doing):
                yield
        except PalestraError as error:
            self._noted(error, name)
            raise
        except asyncio.CancelledError:
            self._noted(_CANCELLED[name](f"{doing} was cancelled before it ended"))
            raise
        else:
            self.unresolved.pop(name, None)
        finally:
            self._doing.remove(name)
            if span:
                self._spans.append(Span(span, started, time.monotonic()))

    def _noted(self, error: PalestraError, name: Boundary | None = None) -> PalestraError:
        self.unresolved[name or error.boundary or Boundary.TASK] = error
        return error


_CANCELLED: Mapping[Boundary, type[PalestraError]] = {
    Boundary.CHAT: ChatError,
    Boundary.ENGINE: EngineError,
    Boundary.REWARD: RewardError,
    Boundary.SANDBOX: SandboxError,
}


def is_async(function: object) -> bool:
    """Whether calling it gives a coroutine: an async def, a partial of one, an object whose call is one."""
    return iscoroutinefunction(function) or iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


class _Lease:
    """One sandbox of an episode, from opening to closing; closing failures are kept, not raised."""

    def __init__(self, episode: Episode, host: SandboxHost | None, spec: SandboxSpec) -> None:
        self._episode = episode
        self._host = host
        self._spec = spec
        self._inner: AbstractAsyncContextManager[Sandbox] | None = None
        self._started = 0.0
        self.held = False
        self.cleanup_failures: list[str] = []

    async def __aenter__(self) -> Sandbox:
        episode = self._episode
        episode._leases.append(self)
        self._started = time.monotonic()
        with episode._doing_for(Boundary.SANDBOX, "opening a sandbox"):
            if self._host is None:
                raise SandboxError(
                    "this run has no sandboxes", expected="an environment with sandbox = SandboxSpec()"
                )
            self._inner = self._host.open(self._spec)
            box = await self._inner.__aenter__()
            self.held = True
        return _Watched(episode, box)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.held or self._inner is None:
            return
        self.held = False
        try:
            with _Kept(self.cleanup_failures, "closing a sandbox failed", error):
                await self._inner.__aexit__(kind, error, trace)
        finally:
            self._episode._spans.append(Span("sandbox", self._started, time.monotonic()))


class _Kept:
    """Context manager that writes an exception down instead of raising it: for cleaning up.

    ``known`` is what is already on its way to the caller. Cancellation passes through.
    """

    def __init__(self, failures: list[str], doing: str, known: BaseException | None) -> None:
        self._failures = failures
        self._doing = doing
        self._known = known

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        if error is not self._known:
            self._failures.append(f"{self._doing}:\n{traceback_of(error)}")
        return True


class _Watched:
    """A sandbox whose own failures (never its programs') the episode takes note of."""

    def __init__(self, episode: Episode, box: Sandbox) -> None:
        self._episode = episode
        self._box = box

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> ExecResult:
        return await self._watch(self._box.exec(argv, stdin=stdin, env=env))

    async def python(self, source: str, *, stdin: bytes = b"") -> ExecResult:
        return await self._watch(self._box.python(source, stdin=stdin))

    async def close(self) -> None:
        await self._watch(self._box.close())

    async def _watch(self, work: Awaitable[_T]) -> _T:
        with self._episode._doing_for(Boundary.SANDBOX, "the sandbox"):
            return await work
