"""What a spec means in kernel resource limits; pure, and the only place that decides it.

Limits are set before bubblewrap starts and lowered hard, so neither it nor the
program can raise them. Memory is bounded per process (address space): all of a
sandbox is bounded by processes x memory_mb + scratch_mb, plus at most a few MiB
that the kernel holds for open files. Processes are counted inside the sandbox's
own user namespace, with threads, and two beyond the program's are bubblewrap's.
"""

from __future__ import annotations

import math

from palestra.sandboxes.base import SandboxSpec

MIB = 1 << 20
OPEN_FILES = 64
BWRAP_PROCESSES = 2
"""bubblewrap's monitor and the sandbox's init: they are counted in the same namespace."""
LEAST_MEMORY_MB = 16
"""Below this bubblewrap itself cannot start."""


def resource_limits(spec: SandboxSpec, *, source_bytes: int = 0) -> dict[str, tuple[int, int]]:
    """(soft, hard) by the name after ``RLIMIT_``. ``source_bytes`` is the program file bwrap writes."""
    cpu_s = cpu_seconds(spec)
    memory = spec.memory_mb * MIB
    file_size = max(spec.scratch_mb * MIB, source_bytes + 1)
    processes = spec.processes + BWRAP_PROCESSES
    return {
        "AS": (memory, memory),
        # At the soft limit SIGXCPU ends the program; the hard one is for programs that ignore it.
        "CPU": (cpu_s, cpu_s + 1),
        "FSIZE": (file_size, file_size),
        "NOFILE": (OPEN_FILES, OPEN_FILES),
        "NPROC": (processes, processes),
        "STACK": (8 * MIB, 8 * MIB),
        "CORE": (0, 0),
        "MEMLOCK": (0, 0),
        "MSGQUEUE": (0, 0),
        "SIGPENDING": (128, 128),
        "NICE": (0, 0),
        "RTPRIO": (0, 0),
    }


def cpu_seconds(spec: SandboxSpec) -> int:
    """CPU seconds a process may use: the wall clock of one exec, rounded up."""
    return max(1, math.ceil(spec.time_s))


def scratch_inodes(spec: SandboxSpec) -> int:
    """How many files the private /tmp may hold: an empty file costs kernel memory, too."""
    return 256 + 64 * spec.scratch_mb
