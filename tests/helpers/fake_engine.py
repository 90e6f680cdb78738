"""A scripted engine: the whole port, no model, no torch, the same answers every time.

``FakeEngine(script, tokenizer)``: the script is a function of the prompt's ids or a
list used one entry per call. An entry is a text (ended by the end-of-sequence
token), a `Say` (another ending), a list of ids, or a failure: `Fail`, `HANG`,
`Abort`. What the engine was asked and what it answered stays in ``requests`` and
``seen``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from palestra.errors import EngineError, WeightsError
from palestra.rollouts.base import EngineStats, GenerateRequest, OnToken, RequestRefused
from palestra.types import Completion, Manifest, SamplingParams, StopReason, Version


class Encodes(Protocol):
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class Say:
    """Answer ``text``, ended for ``stop``; only EOS samples the end-of-sequence token."""

    text: str
    stop: StopReason = StopReason.EOS


@dataclass(frozen=True)
class Fail:
    """Raise this; a string becomes an EngineError."""

    error: str | Exception = "the fake engine broke"


@dataclass(frozen=True)
class Abort:
    """Return ``text`` as an aborted completion."""

    text: str = ""


@dataclass(frozen=True)
class Hang:
    """Never answer."""


HANG = Hang()
Answer = str | Sequence[int] | Say | Fail | Abort | Hang
Script = Callable[[tuple[int, ...]], Answer] | Sequence[Answer]


class FakeEngine:
    """Implements `palestra.rollouts.base.Engine`. Each token has logprob -0.5 and the serving version."""

    def __init__(
        self, script: Script, tokenizer: Encodes, *, context_tokens: int = 4096, delay_s: float = 0.0
    ) -> None:
        self.requests: list[GenerateRequest] = []
        self.seen: list[tuple[int, ...]] = []
        """Prompt and completion of every call that was answered."""
        self.running = 0
        self.most_running = 0
        self.cancelled = 0
        self._script = script if callable(script) else list(script)
        self._tokenizer = tokenizer
        self._context_tokens = context_tokens
        self._delay_s = delay_s
        self._version: Version | None = Version("fake", 0)
        self._staged: Manifest | None = None
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._closed = False

    async def start(self, manifest: Manifest, tensors: Iterable[tuple[str, Any]]) -> str:
        for _ in tensors:
            pass
        self._version = manifest.version
        return manifest.digest

    async def generate(self, request: GenerateRequest, on_token: OnToken | None = None) -> Completion:
        self.requests.append(request)
        if self._closed:
            raise EngineError("the fake engine is closed")
        if not request.prompt_ids:
            raise RequestRefused("the prompt is empty")
        room = self._context_tokens - len(request.prompt_ids)
        if room < 1:
            raise RequestRefused(
                f"the prompt has {len(request.prompt_ids)} tokens and the context is {self._context_tokens}"
            )
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self._delay_s)
            completion = await self._answer(request, room)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if on_token is not None:
            for token, logprob, version in zip(
                completion.token_ids, completion.logprobs, completion.versions, strict=True
            ):
                on_token(token, logprob, version)
        self.seen.append((*request.prompt_ids, *completion.token_ids))
        self._prompt_tokens += len(request.prompt_ids)
        self._generated_tokens += len(completion.token_ids)
        return completion

    async def _answer(self, request: GenerateRequest, room: int) -> Completion:
        entry = self._script(request.prompt_ids) if callable(self._script) else self._script.pop(0)
        if isinstance(entry, Fail):
            raise EngineError(entry.error) if isinstance(entry.error, str) else entry.error
        if isinstance(entry, Hang):
            await asyncio.Event().wait()
        if isinstance(entry, Abort):
            return self._completion(self._tokenizer.encode(entry.text), StopReason.ABORTED)
        if isinstance(entry, str):
            entry = Say(entry)
        if isinstance(entry, Say):
            ids, stop = self._tokenizer.encode(entry.text), entry.stop
            if stop is StopReason.EOS:
                ids.append(self._tokenizer.eos_token_ids[0])
        else:
            ids = list(entry)
            stop = (
                StopReason.EOS if ids[-1:] and ids[-1] in self._tokenizer.eos_token_ids else StopReason.LENGTH
            )
        limit = min(room, request.sampling.max_new_tokens)
        if len(ids) > limit:
            stop = StopReason.CONTEXT if room < request.sampling.max_new_tokens else StopReason.LENGTH
        return self._completion(ids[:limit], stop)

    def _completion(self, ids: Sequence[int], stop: StopReason) -> Completion:
        number = self._version.number if self._version else 0
        return Completion(tuple(ids), (-0.5,) * len(ids), (number,) * len(ids), stop)

    async def score(self, token_ids: Sequence[int], sampling: SamplingParams) -> tuple[float, ...]:
        return (-0.5,) * (len(token_ids) - 1)

    async def stage(self, manifest: Manifest, tensors: Iterable[tuple[str, Any]]) -> str:
        for _ in tensors:
            pass
        self._staged = manifest
        return manifest.digest

    async def commit(self, version: Version) -> None:
        if self._staged is None or self._staged.version != version:
            raise WeightsError(f"{version} is not staged")
        self._version, self._staged = version, None

    @property
    def version(self) -> Version | None:
        return self._version

    def stats(self) -> EngineStats:
        return EngineStats(self._prompt_tokens, self._generated_tokens, self.running, 0, 0.0)

    async def close(self) -> None:
        self._closed = True
