"""One play of one task: tokens in, tokens out, every turn kept exactly as the engine saw it.

Joining ``turns`` gives the engine's last prompt and its answer, token for token;
sampled tokens are never decoded and encoded again, and nothing else is ever
marked as sampled. A call that fails changes no turn. A failure that user code
catches stays in ``unresolved`` until the very same call succeeds: while one is
there, whatever that code returns is no verdict. A reward's deadline counts the
reward's own time: its clock stops while another room works for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    contextmanager,
    nullcontext,
    suppress,
)
from contextvars import ContextVar
from dataclasses import replace
from inspect import isawaitable, iscoroutinefunction
from types import MethodType, TracebackType
from typing import TYPE_CHECKING, TypeVar, cast

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
        session: str = "",
    ) -> None:
        """``session`` names this episode to the engine, which may then compute its beginning once."""
        self.task = task
        self.id = id
        self.unresolved: dict[Hashable, PalestraError] = {}
        """Failures by what was asked, where asking the same again has not succeeded since."""
        self._engine = engine
        self._chat = chat
        self._sampling = sampling
        self._host = sandbox_host
        self._spec = sandbox_spec
        self._workers = workers
        self._reward_deadline_s = reward_deadline_s
        self._context_tokens = context_tokens
        self._session = session
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
        with self._doing_for(Boundary.CHAT, "say", key=(len(self._turns), *new)):
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
            error = EngineError(f"the engine aborted turn {self._sampled_turns()} of {self.id}")
            self.unresolved[object()] = error
            raise error
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
        arguments, and may block or crash. A coroutine function runs here and must not block;
        its time in other rooms (a sandbox, a further turn, an inner grade) is not counted.
        """
        self._require_open("grade")
        with self._doing_for(
            Boundary.REWARD, name_of(reward), key=_asked((reward, arguments)), span="reward"
        ):
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
        doing = f"turn {turn} of {self.id}"
        with self._doing_for(Boundary.ENGINE, doing, key=prompt, span="generate"):
            request = GenerateRequest(prompt, sampling, f"{self.id}/{turn}", self._session)
            completion = await self._engine.generate(request)
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
        clock = _Clock(self._reward_deadline_s)
        token = _CLOCK.set(clock)
        try:
            async with clock.limit:
                value = reward(*arguments)
                return await value if isawaitable(value) else value
        except TimeoutError as error:
            if not clock.limit.expired():
                raise
            raise RewardError(
                f"{name_of(reward)} did not return within {self._reward_deadline_s:g} s",
                where=place_of(reward),
                expected="a reward that ends in time; deadlines.reward_s sets the limit",
                detail=traceback_of(error),
            ) from error
        finally:
            _CLOCK.reset(token)

    @contextmanager
    def _doing_for(
        self, name: Boundary, doing: str, *, key: Hashable = None, span: str = ""
    ) -> Iterator[None]:
        """Attribute what happens inside to ``name``: its failures, its time, its being cancelled.

        Success mends an earlier failure of the same ``key``, which says all that is asked;
        without one it mends nothing: no answer came of it that the failed call owed.
        """
        started = time.monotonic()
        asked: Hashable = object() if key is None else (name, key)
        self._doing.append(name)
        try:
            with _others_time(), boundary(name, doing):
                yield
        except PalestraError as error:
            self.unresolved[asked] = error
            raise
        except asyncio.CancelledError:
            self.unresolved[asked] = _CANCELLED[name](f"{doing} was cancelled before it ended")
            raise
        else:
            self.unresolved.pop(asked, None)
        finally:
            self._doing.remove(name)
            if span:
                self._spans.append(Span(span, started, time.monotonic()))


_CANCELLED: Mapping[Boundary, type[PalestraError]] = {
    Boundary.CHAT: ChatError,
    Boundary.ENGINE: EngineError,
    Boundary.REWARD: RewardError,
    Boundary.SANDBOX: SandboxError,
}


def is_async(function: object) -> bool:
    """Whether calling it gives a coroutine: an async def, a partial of one, an object whose call is one."""
    return iscoroutinefunction(function) or iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


class _Clock:
    """A deadline that stands still while another room works for whoever is under it."""

    def __init__(self, seconds: float) -> None:
        self.limit = asyncio.timeout(seconds)
        self._loop = asyncio.get_running_loop()
        self._end_s = self._loop.time() + seconds
        self._stopped_s = 0.0
        self._stops = 0

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self._stops += 1
        if self._stops == 1:
            self._stopped_s = self._loop.time()
            self._move(None)
        try:
            yield
        finally:
            self._stops -= 1
            if self._stops == 0:
                self._end_s += self._loop.time() - self._stopped_s
                self._move(self._end_s)

    def _move(self, end_s: float | None) -> None:
        with suppress(RuntimeError):  # it has passed, or what it bounded is over
            self.limit.reschedule(end_s)


_CLOCK: ContextVar[_Clock | None] = ContextVar("reward_clock", default=None)
"""The clock of the reward that runs in this context, tasks that it starts included."""


def _others_time() -> AbstractContextManager[None]:
    clock = _CLOCK.get()
    return nullcontext() if clock is None else clock.stopped()


def _asked(value: object) -> Hashable:
    """A key equal to another only if both ask for the same: by value where a value cannot change,
    by what it holds for lists, tuples and mappings, by identity for everything else."""
    if value is None or isinstance(value, (str, bytes, int, float, MethodType)):
        return type(value), value
    if isinstance(value, (list, tuple)):
        return type(value), *map(_asked, cast("Sequence[object]", value))
    if isinstance(value, Mapping):
        return type(value), *map(_asked, cast("Mapping[object, object]", value).items())
    return _Itself(value)


class _Itself:
    """Equal to nothing but the same object, which it keeps alive: its id belongs to no other."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


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
            with _others_time(), _Kept(self.cleanup_failures, "closing a sandbox failed", error):
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
        key = ("exec", _asked((argv, stdin, env or {})))
        return await self._watch(self._box.exec(argv, stdin=stdin, env=env), key)

    async def python(self, source: str, *, stdin: bytes = b"") -> ExecResult:
        key = ("python", _asked((source, stdin)))
        return await self._watch(self._box.python(source, stdin=stdin), key)

    async def close(self) -> None:
        await self._watch(self._box.close(), None)

    async def _watch(self, work: Awaitable[_T], key: Hashable) -> _T:
        with self._episode._doing_for(Boundary.SANDBOX, "the sandbox", key=key):
            return await work
