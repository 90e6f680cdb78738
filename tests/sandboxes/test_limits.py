"""Each limit is tried for real, with and without root, by a program that wants to exceed it."""

from __future__ import annotations

import json

import pytest

from helpers.sandbox_modes import Mode
from palestra.sandboxes.base import ExecStatus, SandboxSpec
from palestra.sandboxes.limits import BWRAP_PROCESSES, MIB, cpu_seconds, resource_limits, scratch_inodes


def test_a_spec_becomes_hard_limits() -> None:
    limits = resource_limits(SandboxSpec(memory_mb=100, scratch_mb=3, time_s=1.2, processes=5))
    assert limits["AS"] == (100 * MIB, 100 * MIB)
    assert limits["CPU"] == (2, 3)
    assert limits["FSIZE"] == (3 * MIB, 3 * MIB)
    assert limits["NPROC"] == (5 + BWRAP_PROCESSES, 5 + BWRAP_PROCESSES)
    assert limits["CORE"] == (0, 0)


def test_a_long_program_text_still_fits_the_file_size_limit() -> None:
    limits = resource_limits(SandboxSpec(scratch_mb=1), source_bytes=5 * MIB)
    assert limits["FSIZE"][0] > 5 * MIB


@pytest.mark.parametrize(("time_s", "expected"), [(0.1, 1), (1.0, 1), (1.01, 2), (5.0, 5)])
def test_cpu_seconds_are_the_wall_clock_rounded_up(time_s: float, expected: int) -> None:
    assert cpu_seconds(SandboxSpec(time_s=time_s)) == expected


@pytest.mark.parametrize("name", ["memory_mb", "scratch_mb", "time_s", "processes", "output_kb"])
def test_a_spec_without_a_limit_cannot_be_built(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SandboxSpec(**{name: 0})


FORK_BOMB = r"""
import errno, os, time
children = 0
for _ in range(500):
    try:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        children += 1
    except OSError as error:
        print(children, errno.errorcode[error.errno], flush=True)
        break
else:
    print(children, "unbounded")
os._exit(0)
"""


@pytest.mark.parametrize("processes", [1, 4])
async def test_a_fork_bomb_stops_at_the_process_limit(mode: Mode, processes: int) -> None:
    """Attack 1. Root is no exception, although RLIMIT_NPROC never stops uid 0."""
    result = await mode.python(FORK_BOMB, processes=processes)
    assert result.stdout.split() == [str(processes - 1).encode(), b"EAGAIN"]


async def test_a_recursive_fork_bomb_leaves_nothing_and_harms_nobody(mode: Mode) -> None:
    result = await mode.python(
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        processes=6,
        time_s=0.5,
    )
    assert result.status is ExecStatus.TIMEOUT
    assert (await mode.exec(["/bin/true"])).ok


async def test_threads_count_as_processes(mode: Mode) -> None:
    result = await mode.python(
        "import threading, time, os\n"
        "n = 0\n"
        "try:\n"
        "    for _ in range(100):\n"
        "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); n += 1\n"
        "except RuntimeError:\n"
        "    print(n, flush=True)\n"
        "os._exit(0)\n",
        processes=3,
    )
    assert result.stdout == b"2\n"


async def test_concurrent_sandboxes_do_not_share_the_process_limit(mode: Mode) -> None:
    """Every sandbox has a user namespace of its own, so one user's sandboxes do not starve each other."""
    hold = "import os, time\npid = os.fork()\ntime.sleep(0.3)\npid and print('both ran')"
    results = await mode.pair(hold, processes=2)
    assert [result.stdout for result in results] == [b"both ran\n", b"both ran\n"]


async def test_a_memory_bomb_gets_memory_error(mode: Mode) -> None:
    """Attack 2."""
    result = await mode.python("x = []\nwhile True: x.append(bytearray(1 << 20))", memory_mb=64)
    assert result.exit_code == 1
    assert b"MemoryError" in result.stderr


async def test_shared_memory_is_bounded_too(mode: Mode) -> None:
    result = await mode.python(
        "import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 1 << 22))", memory_mb=64
    )
    assert result.exit_code == 1
    assert b"Cannot allocate memory" in result.stderr


async def test_scratch_is_bounded_in_bytes_and_in_files(mode: Mode) -> None:
    """Attack 3: bytes by the size of /tmp, empty files by its number of inodes."""
    result = await mode.python(
        r"""
import errno, json, os
written, number = 0, 0
try:
    while True:
        with open(f"/tmp/big{number}", "wb", buffering=0) as file:
            for _ in range(8):
                written += file.write(bytes(1 << 17))
        number += 1
except OSError as error:
    full = errno.errorcode[error.errno]
for name in os.listdir("/tmp"):
    os.unlink(f"/tmp/{name}")
files = 0
try:
    for files in range(10**6):
        open(f"/tmp/{files}", "x").close()
except OSError as error:
    print(json.dumps([written, full, files, errno.errorcode[error.errno]]))
""",
        scratch_mb=2,
    )
    written, full, files, many = json.loads(result.stdout)
    assert (full, many) == ("ENOSPC", "ENOSPC")
    assert written <= 2 * MIB
    assert files <= scratch_inodes(SandboxSpec(scratch_mb=2))


async def test_one_file_is_bounded_and_no_core_is_written(mode: Mode) -> None:
    result = await mode.python(
        "import resource as r\n"
        "for n in ('FSIZE', 'CORE', 'NOFILE', 'MEMLOCK', 'MSGQUEUE'):\n"
        "    print(n, *r.getrlimit(getattr(r, 'RLIMIT_' + n)))\n",
        scratch_mb=4,
    )
    limits = {line.split()[0]: line.split()[1:] for line in result.stdout.decode().splitlines()}
    assert limits["FSIZE"] == [str(4 * MIB)] * 2
    assert limits["CORE"] == limits["MEMLOCK"] == limits["MSGQUEUE"] == ["0", "0"]
    assert limits["NOFILE"] == ["64", "64"]


async def test_no_limit_can_be_raised_by_the_program(mode: Mode) -> None:
    """Attack 25."""
    result = await mode.python(r"""
import errno, os, resource
for name in ("AS", "CPU", "FSIZE", "NOFILE", "NPROC", "CORE"):
    which = getattr(resource, "RLIMIT_" + name)
    soft, hard = resource.getrlimit(which)
    try:
        resource.setrlimit(which, (hard + 1, hard + 1))
        print(name, "was raised")
    except (ValueError, OSError):
        pass
try:
    os.nice(-5)
    print("nice was lowered")
except OSError:
    pass
print("tried")
""")
    assert result.stdout == b"tried\n"


async def test_open_files_are_bounded(mode: Mode) -> None:
    """Attack 4."""
    result = await mode.python(
        "x = []\ntry:\n    while True: x.append(open('/dev/null'))\n"
        "except OSError as e: n = len(x); x.clear(); print(n, e.errno)"
    )
    count, code = map(int, result.stdout.split())
    assert count < 64
    assert code == 24


async def test_an_infinite_loop_ends_at_the_wall_clock(mode: Mode) -> None:
    """Attack 6."""
    result = await mode.python("while True: pass", time_s=0.4)
    assert result.status is ExecStatus.TIMEOUT
    assert result.exit_code is None
    assert result.seconds >= 0.4


async def test_a_program_that_ignores_signals_ends_too(mode: Mode) -> None:
    result = await mode.python(
        "import signal, time\n"
        "for n in range(1, 65):\n"
        "    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "time.sleep(60)",
        time_s=0.5,
    )
    assert result.status is ExecStatus.TIMEOUT


async def test_a_cpu_limit_that_the_program_lowered_is_its_own_signal(mode: Mode) -> None:
    result = await mode.python(
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 6))\nwhile True: pass", time_s=5.0
    )
    assert (result.status, result.signal) == (ExecStatus.SIGNALED, 24)
    assert 0.5 <= result.cpu_seconds < 4.5, "counted in ticks, so less than a second on a busy machine"
