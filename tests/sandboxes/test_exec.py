"""How a program's end is told: every way to fail is data, and only the sandbox's own failure is an error."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from helpers.sandbox_modes import Mode
from palestra.errors import SandboxError
from palestra.sandboxes.base import ExecStatus, SandboxSpec
from palestra.sandboxes.bubblewrap import BubblewrapHost


async def test_stdin_arguments_streams_and_exit_code_arrive(mode: Mode) -> None:
    result = await mode.python(
        "import sys\nprint(sys.stdin.read().upper())\nprint('e', file=sys.stderr)\nsys.exit(7)", stdin=b"abc"
    )
    assert (result.status, result.exit_code, result.signal) == (ExecStatus.EXITED, 7, None)
    assert (result.stdout, result.stderr) == (b"ABC\n", b"e\n")
    assert not result.ok
    assert result.cpu_seconds > 0


async def test_a_missing_program_is_exit_code_127(mode: Mode) -> None:
    result = await mode.exec(["no-such-program"])
    assert (result.status, result.exit_code) == (ExecStatus.EXITED, 127)


async def test_a_file_that_is_no_program_is_exit_code_126(mode: Mode) -> None:
    assert (await mode.exec(["/usr"])).exit_code == 126


async def test_a_signal_is_told_by_its_number(mode: Mode) -> None:
    result = await mode.python("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    assert (result.status, result.exit_code, result.signal) == (ExecStatus.SIGNALED, None, 11)


@pytest.mark.parametrize(
    "text", ["bwrap: execvp /usr/bin/python3.11: No such file or directory", "bwrap: Can't mount"]
)
@pytest.mark.parametrize("code", [0, 1, 70, 127])
async def test_a_program_cannot_pose_as_a_failed_sandbox(mode: Mode, text: str, code: int) -> None:
    """Were it believed, a candidate could turn its 0 into an abstention (attack G7)."""
    result = await mode.python(f"import os\nos.write(2, {text.encode()!r} + bytes([10]))\nos._exit({code})")
    assert (result.status, result.exit_code) == (ExecStatus.EXITED, code)


async def test_output_is_cut_at_the_limit_and_the_program_killed(mode: Mode) -> None:
    """Attack 5."""
    result = await mode.python("import os\nwhile True: os.write(1, b'x' * 4096)", output_kb=8, time_s=20.0)
    assert (result.status, result.truncated) == (ExecStatus.OUTPUT_LIMIT, True)
    assert result.exit_code is None
    assert result.stdout == b"x" * 8192
    assert result.seconds < 20


async def test_both_streams_share_the_limit(mode: Mode) -> None:
    result = await mode.python(
        "import os, time\nos.write(1, b'o' * 700)\ntime.sleep(0.2)\nos.write(2, b'e' * 700)", output_kb=1
    )
    assert result.truncated
    assert (len(result.stdout), len(result.stderr)) == (700, 324)


async def test_output_of_exactly_the_limit_is_whole(mode: Mode) -> None:
    result = await mode.python("import os\nos.write(1, b'x' * 2048)", output_kb=2)
    assert (result.status, len(result.stdout), result.truncated) == (ExecStatus.EXITED, 2048, False)


async def test_more_output_than_allowed_is_told_even_if_the_program_ended_first(mode: Mode) -> None:
    result = await mode.python("import os\nos.write(1, b'x' * 2049)", output_kb=2)
    assert (result.status, len(result.stdout), result.truncated) == (ExecStatus.OUTPUT_LIMIT, 2048, True)


async def test_bytes_that_are_no_text_arrive_unchanged(mode: Mode) -> None:
    """Attack 27."""
    everything = bytes(range(256))
    result = await mode.python("import os\nos.write(1, os.read(0, 999))", stdin=everything)
    assert result.stdout == everything


async def test_a_large_stdin_that_nobody_reads_is_no_deadlock(mode: Mode) -> None:
    """Attack 35; SWE-ReX #261 froze its event loop on a pipe."""
    assert (await mode.python("print('done')", stdin=b"x" * 3_000_000)).stdout == b"done\n"


async def test_a_large_stdin_is_read_whole(mode: Mode) -> None:
    result = await mode.python("import sys\nprint(len(sys.stdin.buffer.read()))", stdin=b"x" * 3_000_000)
    assert result.stdout == b"3000000\n"


async def test_stdin_cannot_be_used_as_memory(mode: Mode) -> None:
    result = await mode.python("import os\ntry: os.write(0, b'x')\nexcept OSError as e: print(e.errno)")
    assert result.stdout in (b"1\n", b"9\n")


async def test_a_program_that_closes_its_streams_ends_normally(mode: Mode) -> None:
    result = await mode.python(
        "import os, time\nfor n in range(3): os.close(n)\ntime.sleep(0.1)\nos._exit(5)"
    )
    assert (result.status, result.exit_code) == (ExecStatus.EXITED, 5)


async def test_text_that_is_no_unicode_is_the_programs_own_error(mode: Mode) -> None:
    result = await mode.python("print('\udcff')")
    assert result.exit_code == 1
    assert b"SyntaxError" in result.stderr


async def test_daemons_end_with_their_program(mode: Mode) -> None:
    """Attack 7: a double fork in a session of its own, holding stdout open."""
    marker = f"{os.getpid()}.5"
    result = await mode.python(
        "import os, time, sys\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        f"        os.execv('/bin/sleep', ['sleep', '{marker}'])\n"
        "    os._exit(0)\n"
        "time.sleep(0.3)\n"
        "print('parent')\n",
        processes=4,
    )
    assert result.stdout == b"parent\n"
    assert not running(marker), "nothing is left when exec has returned"


def running(text: str) -> list[str]:
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line:
            found.append(line)
    return found


async def test_environment_of_the_caller_is_given_and_nothing_else(host: BubblewrapHost) -> None:
    async with host.open(SandboxSpec()) as box:
        result = await box.exec(["/usr/bin/env"], env={"ANSWER": "a b=c", "PATH": "/bin"})
    names = dict(line.split("=", 1) for line in result.stdout.decode().splitlines())
    assert names["ANSWER"] == "a b=c"
    assert names["PATH"] == "/bin"
    assert set(names) == {"ANSWER", "PATH", "LANG", "HOME", "TMPDIR", "PWD"}


@pytest.mark.parametrize(
    ("argv", "env", "reason"),
    [([], {}, "empty argv"), (["a"], {"x": "\0"}, "NUL"), (["a"], {"x=y": ""}, "'='")],
)
async def test_what_no_program_can_be_given_is_refused(
    host: BubblewrapHost, argv: list[str], env: dict[str, str], reason: str
) -> None:
    async with host.open(SandboxSpec()) as box:
        with pytest.raises(ValueError, match=reason):
            await box.exec(argv, env=env)


async def test_a_program_with_a_nul_in_an_argument_is_the_programs_failure(host: BubblewrapHost) -> None:
    """NeMo-Gym PR#2552 (case 14), the other way round: what the model wrote is scored."""
    async with host.open(SandboxSpec()) as box:
        result = await box.exec(["/usr/bin/python3", "-c", "print(1)\0"])
    assert result.exit_code == 126
    assert b"NUL" in result.stderr


async def test_arguments_that_look_like_bubblewraps_are_the_programs(host: BubblewrapHost) -> None:
    async with host.open(SandboxSpec()) as box:
        result = await box.exec(["/bin/echo", "--bind", "/", "/host"])
        assert result.stdout == b"--bind / /host\n"
        assert (await box.exec(["--share-net"])).exit_code == 127


async def test_more_arguments_than_the_kernel_takes_is_an_error_of_the_sandbox(host: BubblewrapHost) -> None:
    async with host.open(SandboxSpec()) as box:
        with pytest.raises(SandboxError, match="Argument list too long"):
            await box.exec(["/bin/echo", "x" * 200_000])


async def test_a_cancelled_exec_kills_its_program(host: BubblewrapHost) -> None:
    marker = f"{os.getpid()}.75"
    async with host.open(SandboxSpec(time_s=50)) as box:
        task = asyncio.create_task(box.exec(["/bin/sleep", marker]))
        await until(lambda: bool(running(f"sleep {marker}")))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not running(marker)


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.004])
async def test_a_cancellation_while_it_starts_leaves_nothing(host: BubblewrapHost, delay_s: float) -> None:
    """Before its init is known, killing bubblewrap would orphan it: the kill waits for it."""
    marker = f"{os.getpid()}.{int(delay_s * 1e4) + 800}"
    async with host.open(SandboxSpec(time_s=50)) as box:
        for _ in range(4):
            task = asyncio.create_task(box.exec(["/bin/sleep", marker]))
            await asyncio.sleep(delay_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert not running(marker)
        assert (await box.exec(["/bin/true"])).ok


async def until(condition: object, limit_s: float = 20.0) -> None:
    assert callable(condition)
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.02)
