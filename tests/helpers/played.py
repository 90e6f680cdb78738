"""One episode played from a function: a scripted engine, scripted sandboxes, the real runner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from helpers.fake_engine import FakeEngine
from palestra.environments.base import Environment
from palestra.environments.chat import Chat
from palestra.environments.episode import Episode
from palestra.environments.runner import run_episode
from palestra.errors import SandboxError
from palestra.sandboxes.base import ExecResult, ExecStatus, SandboxSpec
from palestra.types import Abstain, SamplingParams, Task, Trajectory

TASK = Task(prompt="Guess my number.", secret={"n": 7})
Play = Callable[[Task, Episode], Any]
ALWAYS = 1 << 30


class Played(Environment):
    """An environment whose episode is the function it was given."""

    def __init__(self, play: Play, **attributes: Any) -> None:
        self.play = play
        for name, value in attributes.items():
            setattr(self, name, value)

    async def episode(self, task: Task, ep: Episode) -> Any:
        return await self.play(task, ep)


class Box:
    """Every program takes ``exec_s`` in one of the host's slots and exits with code 1."""

    def __init__(self, host: FakeHost) -> None:
        self.host = host

    async def exec(self, argv: Any, *, stdin: bytes = b"", env: Any = None) -> ExecResult:
        if self.host.breaks > 0:
            self.host.breaks -= 1
            raise SandboxError("the sandbox broke")
        async with self.host.slots:
            await asyncio.sleep(self.host.exec_s)
        return ExecResult(ExecStatus.EXITED, 1, None, b"", b"it failed", False, 0.0)

    async def python(self, source: str, *, stdin: bytes = b"") -> ExecResult:
        return await self.exec([source])

    async def close(self) -> None:
        pass


class FakeHost:
    """``refuses`` openings fail before the first one succeeds, then ``breaks`` programs."""

    def __init__(
        self,
        *,
        refuses: int = 0,
        breaks: int = 0,
        close_error: Exception | None = None,
        exec_s: float = 0.0,
        slots: int = 64,
    ) -> None:
        self.specs: list[SandboxSpec] = []
        self.open_now = 0
        self.refuses, self.breaks, self.close_error, self.exec_s = refuses, breaks, close_error, exec_s
        self.slots = asyncio.Semaphore(slots)

    def probe(self) -> None:
        pass

    @asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[Box]:
        if self.refuses > 0:
            self.refuses -= 1
            raise SandboxError("no isolation on this machine")
        self.specs.append(spec)
        self.open_now += 1
        try:
            yield Box(self)
        finally:
            self.open_now -= 1
            if self.close_error is not None:
                raise self.close_error

    async def close(self) -> None:
        pass


async def run(
    play: Play, script: Any, chat: Chat, *, environment: Environment | None = None, **options: Any
) -> Trajectory:
    engine = options.pop("engine", None) or FakeEngine(
        script,
        chat.tokenizer,  # type: ignore[arg-type]
        context_tokens=options.pop("context", 4096),
        delay_s=options.pop("delay_s", 0.0),
    )
    return await run_episode(
        environment or Played(play),
        TASK,
        id="g3.0",
        engine=engine,
        chat=chat,
        sampling=SamplingParams(max_new_tokens=64),
        deadline_s=options.pop("deadline_s", 60.0),
        reward_deadline_s=options.pop("reward_deadline_s", 60.0),
        cleanup_s=options.pop("cleanup_s", 5.0),
        **options,
    )


def abstained(trajectory: Trajectory) -> Abstain:
    assert isinstance(trajectory.outcome, Abstain)
    return trajectory.outcome
