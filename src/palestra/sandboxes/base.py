"""The sandbox port: a program's failure is data, a sandbox's failure is an error.

Whatever happens to the program (exit code, signal, its time or memory limit,
too much output) is an `ExecResult`. Whatever happens to the isolation raises
SandboxError, and the episode abstains. Sandboxes fail closed: a limit that this
machine cannot enforce raises IsolationUnavailable before anything runs.
Every sandbox that was created is destroyed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class ExecStatus(StrEnum):
    """How a program in a sandbox ended. Closed."""

    EXITED = "exited"
    SIGNALED = "signaled"
    TIMEOUT = "timeout"
    """Its wall-clock or CPU limit ended it."""
    OUTPUT_LIMIT = "output_limit"
    """It wrote more than allowed and was killed."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox may use. There is no network and the system is read-only, always."""

    memory_mb: int = 256
    """Address space of each process, MiB."""
    scratch_mb: int = 16
    """Size of the private /tmp, MiB; it counts as memory."""
    time_s: float = 5.0
    """Wall-clock seconds of one exec; CPU seconds are limited to the same, rounded up."""
    processes: int = 1
    """Processes and threads at once, the program's first one included."""
    output_kb: int = 64
    """KiB of standard output and error together."""

    def __post_init__(self) -> None:
        for name in ("memory_mb", "scratch_mb", "time_s", "processes", "output_kb"):
            if not getattr(self, name) > 0:
                raise ValueError(f"sandbox {name} must be above 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class ExecResult:
    status: ExecStatus
    exit_code: int | None
    """Set when status is exited."""
    signal: int | None
    stdout: bytes
    stderr: bytes
    truncated: bool
    """Output was cut at the limit."""
    seconds: float
    cpu_seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status is ExecStatus.EXITED and self.exit_code == 0


class Sandbox(Protocol):
    """One isolated place. Every exec starts from an empty /tmp: no file outlives its program."""

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> ExecResult:
        """Run a program to its end under the spec's limits; leaves no process behind.

        Raises SandboxError if the program could not be started in isolation (a missing
        program inside the sandbox is exit code 127, not an error).
        """
        ...

    async def python(self, source: str, *, stdin: bytes = b"") -> ExecResult:
        """Run ``source`` as a Python program (isolated mode, no site packages)."""
        ...

    async def close(self) -> None:
        """Kill what runs and remove what was written. May be called twice."""
        ...


class SandboxHost(Protocol):
    """Makes sandboxes on one machine."""

    def probe(self) -> None:
        """Raise IsolationUnavailable, saying what to enable, unless a real sandbox ran here."""
        ...

    def open(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        """``async with host.open(spec) as box``; raises IsolationUnavailable if the spec cannot be kept."""
        ...

    async def close(self) -> None:
        """Destroy every sandbox. May be called twice."""
        ...
