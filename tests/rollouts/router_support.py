"""A scripted replica, and routers over several of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from palestra.errors import WeightsError
from palestra.rollouts.base import (
    EngineDead,
    EngineStats,
    GenerateRequest,
    OnToken,
    PauseMode,
)
from palestra.rollouts.router import Proof, Router
from palestra.types import Completion, Manifest, SamplingParams, StopReason, TensorEntry, Version


def manifest(number: int, digest: str = "ab" * 16) -> Manifest:
    return Manifest(Version("r", number), "full", None, (TensorEntry("w", "F32", (1,), 4, digest),))


class Replica:
    """Answers token by token when told to, and dies when told to."""

    def __init__(self, name: str = "", offset: float = 0.0) -> None:
        self.name = name
        self.offset = offset
        self.asked: list[GenerateRequest] = []
        self.dead = ""
        self.gate = asyncio.Event()
        self.gate.set()
        self.die_after: int | None = None
        self.tokens = [1, 2, 3]
        self.fail_stage: Exception | None = None
        self.wrong_digest = False
        self.paused: list[str] = []
        self.closed = False
        self.scores = 0
        self.commit_gate: asyncio.Event | None = None
        self.commit_error: Exception | None = None
        self.score_gate: asyncio.Event | None = None
        self.loaded: dict[str, list[str]] = {}
        self._version: Version | None = None
        self._staged: Version | None = None
        self._death = asyncio.Event()

    def kill(self) -> None:
        self.dead = "killed"
        self._death.set()

    async def start(self, manifest: Manifest, tensors: Iterable[tuple[str, Any]]) -> str:
        digest = await self.stage(manifest, tensors)
        self._version = manifest.version
        return digest

    async def generate(self, request: GenerateRequest, on_token: OnToken | None = None) -> Completion:
        self.asked.append(request)
        self._check()
        waiter, death = asyncio.ensure_future(self.gate.wait()), asyncio.ensure_future(self._death.wait())
        await asyncio.wait([waiter, death], return_when=asyncio.FIRST_COMPLETED)
        self._check()
        assert self._version is not None
        for at, token in enumerate(self.tokens):
            if at == self.die_after:
                self.kill()
            self._check()
            if on_token:
                on_token(token, -0.5, self._version.number)
        n = len(self.tokens)
        return Completion(tuple(self.tokens), (-0.5,) * n, (self._version.number,) * n, StopReason.EOS)

    async def score(self, token_ids: Sequence[int], sampling: SamplingParams) -> tuple[float, ...]:
        self._check()
        self.scores += 1
        if self.score_gate is not None:
            await self.score_gate.wait()
        return (-0.5 - self.offset,) * (len(token_ids) - 1)

    async def stage(self, manifest: Manifest, tensors: Iterable[tuple[str, Any]]) -> str:
        self._check()
        self.received = [name for name, _ in tensors]
        if self.fail_stage:
            raise self.fail_stage
        self._staged = manifest.version
        return "wrong" if self.wrong_digest else manifest.digest

    async def commit(self, version: Version) -> None:
        self._check()
        if self._staged != version:
            raise WeightsError(f"{version} is not staged")
        if self.commit_gate is not None:
            await self.commit_gate.wait()
        if self.commit_error is not None:
            raise self.commit_error
        self._version = version

    @property
    def version(self) -> Version | None:
        return self._version

    def stats(self) -> EngineStats:
        return EngineStats(1, 2, 3, 4, 0.5, 6)

    async def pause(self, mode: PauseMode = "keep") -> None:
        self.paused.append(mode)

    async def resume(self) -> None:
        self.paused.append("resume")

    async def sleep(self) -> None:
        self._version = None

    async def load_adapter(self, name: str, config: Any, tensors: Iterable[tuple[str, Any]]) -> None:
        self._check()
        self.loaded[name] = [tensor for tensor, _ in tensors]

    async def drop_adapter(self, name: str) -> None:
        del self.loaded[name]

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(sorted(self.loaded))

    async def close(self) -> None:
        self.closed = True

    def _check(self) -> None:
        if self.dead:
            raise EngineDead(f"{self.name} {self.dead}")


def request(prompt: Sequence[int] = (5, 6), *, most: int = 10, **fields: Any) -> GenerateRequest:
    return GenerateRequest(tuple(prompt), SamplingParams(max_new_tokens=most), **fields)


async def routed(*replicas: Replica, prove: bool = True, **settings: Any) -> Router:
    for index, replica in enumerate(replicas):
        replica.name = replica.name or "abc"[index]
    router = Router({replica.name: replica for replica in replicas}, **settings)
    await router.start(manifest(1), [("w", None)])  # type: ignore[list-item]
    if prove:
        await router.score((1, 2), SamplingParams())
    return router


PROOF = Proof(manifest(1), (1, 2, 3), (-0.5, -0.5), 1e-3)
