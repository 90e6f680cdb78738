"""The host: created = destroyed, whatever dies; and no sandbox rather than a weaker one."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.sandbox_modes import here_or_skip
from palestra.errors import IsolationUnavailable, SandboxError
from palestra.sandboxes import bubblewrap
from palestra.sandboxes.base import ExecStatus, SandboxSpec
from palestra.sandboxes.bubblewrap import BubblewrapHost
from palestra.sandboxes.system import Bwrap, SandboxPython


def children(pid: int) -> list[int]:
    """Every process below ``pid``, however deep."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, queue = [], [pid]
    while queue:
        below = parents.get(queue.pop(), [])
        found += below
        queue += below
    return found


def alive(pids: list[int]) -> list[int]:
    living: list[int] = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            living.append(pid)
    return living


async def until_dead(pids: list[int], limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while alive(pids):
        assert time.monotonic() < end, f"still alive: {alive(pids)}"
        await asyncio.sleep(0.02)


async def test_at_most_so_many_programs_run_at_once(host: BubblewrapHost) -> None:
    """Case 24 and 25: a start storm waits its turn, and all of it is served."""
    most, running = 0, True

    async def watch() -> None:
        nonlocal most
        while running:
            launcher = host._launcher
            most = max(most, len(launcher._runs) if launcher is not None else 0)
            await asyncio.sleep(0.002)

    watcher = asyncio.create_task(watch())
    async with host.open(SandboxSpec()) as box:
        results = await asyncio.gather(*[box.exec(["/bin/echo", str(n)]) for n in range(20)])
    running = False
    await watcher
    assert [result.stdout for result in results] == [b"%d\n" % n for n in range(20)]
    assert most == 2


async def test_closing_the_host_kills_what_runs_and_its_launcher(host: BubblewrapHost) -> None:
    async with host.open(SandboxSpec(time_s=50)) as box:
        task = asyncio.create_task(box.exec(["/bin/sleep", "50"]))
        await started(host)
        below = children(host._launcher.pid) if host._launcher else []
        assert below
        await host.close()
        with pytest.raises(SandboxError, match="closed"):
            await task
        assert not alive(below)
    await host.close()
    with pytest.raises(SandboxError, match="closed"):
        async with host.open(SandboxSpec()) as box:
            await box.exec(["/bin/true"])


async def started(host: BubblewrapHost) -> None:
    end = time.monotonic() + 20
    while not (host._launcher and len(children(host._launcher.pid)) >= 3):
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


async def test_leaving_a_sandbox_kills_what_runs_in_it(host: BubblewrapHost) -> None:
    async with host.open(SandboxSpec(time_s=50)) as box:
        task = asyncio.create_task(box.exec(["/bin/sleep", "50"]))
        await started(host)
    with pytest.raises(SandboxError, match="closed while a program ran"):
        await task
    assert host._launcher is not None
    assert not alive(children(host._launcher.pid))
    await box.close()
    with pytest.raises(SandboxError, match="closed"):
        await box.python("pass")


async def test_a_dead_launcher_is_an_error_of_the_sandbox_and_replaced(host: BubblewrapHost) -> None:
    """Case 14: the machinery's death is never a verdict about the program."""
    async with host.open(SandboxSpec(time_s=50)) as box:
        task = asyncio.create_task(box.exec(["/bin/sleep", "50"]))
        await started(host)
        assert host._launcher is not None
        below = children(host._launcher.pid)
        os.kill(host._launcher.pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match="launcher died"):
            await task
        await until_dead(below)
        assert (await box.exec(["/bin/true"])).ok


PARENT = r"""
import asyncio, os, sys
from palestra.sandboxes.base import SandboxSpec
from palestra.sandboxes.bubblewrap import BubblewrapHost
async def main():
    host = BubblewrapHost()
    host._probed = True
    if os.fork() == 0:
        import time
        os.close(0); os.close(1); os.close(2)
        time.sleep(1000)
    async with host.open(SandboxSpec(time_s=500)) as box:
        task = asyncio.create_task(box.exec(["/bin/sleep", "500"]))
        await asyncio.sleep(0.05)
        print(host._launcher.pid, flush=True)
        if os.fork() == 0:
            import time
            time.sleep(1000)
        await task
asyncio.run(main())
"""


async def test_a_killed_palestra_leaves_no_sandbox(isolation: None) -> None:
    """kill -9, and even a surviving fork of palestra that holds the control socket changes nothing."""
    process = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    launcher = int(process.stdout.readline())
    end = time.monotonic() + 20
    while len(children(launcher)) < 3:
        assert time.monotonic() < end
        await asyncio.sleep(0.02)
    forks = [pid for pid in children(process.pid) if pid != launcher and pid not in children(launcher)]
    below = [launcher, *children(launcher)]
    process.kill()
    process.wait()
    try:
        await until_dead(below)
        assert len(alive(forks)) == 2
    finally:
        for pid in forks:
            os.kill(pid, signal.SIGKILL)
        process.stdout.close()


async def test_a_host_serves_a_second_event_loop(isolation: None) -> None:
    host = BubblewrapHost(concurrency=1)
    host._probed = True

    async def once() -> bool:
        async with host.open(SandboxSpec()) as box:
            return (await box.exec(["/bin/true"])).ok

    assert await asyncio.to_thread(lambda: asyncio.run(once()))
    first = host._launcher
    assert await once()
    assert host._launcher is not first
    assert first is not None
    assert not first.alive
    await host.close()


def test_the_probe_runs_a_real_sandbox_once(monkeypatch: pytest.MonkeyPatch) -> None:
    here = here_or_skip()
    calls: list[object] = []
    monkeypatch.setattr(bubblewrap, "_in_thread", calls.append)
    here.host.probe()
    assert calls == []


async def test_the_probe_can_be_asked_inside_an_event_loop(isolation: None) -> None:
    BubblewrapHost().probe()


def broken_host(tmp_path: Path, script: str) -> BubblewrapHost:
    """A host whose bubblewrap is a shell script."""
    fake = tmp_path / "bwrap"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    host = BubblewrapHost()
    host._parts = (Bwrap(fake, None), SandboxPython("/usr/bin/python3", None), [])
    return host


async def test_a_machine_that_cannot_isolate_is_refused_before_anything_runs(tmp_path: Path) -> None:
    host = broken_host(tmp_path, "echo 'bwrap: No permissions to create a new namespace' >&2; exit 1")
    for _ in range(2):
        with pytest.raises(IsolationUnavailable) as caught:
            async with host.open(SandboxSpec()):
                pytest.fail("it opened")
        assert "next:" in str(caught.value)
    assert caught.value.exit_code == 3


async def test_a_failed_bubblewrap_is_never_a_verdict(tmp_path: Path, isolation: None) -> None:
    """Case 14: 91.6 % of rollouts were failed resets entered as reward 0. Here it raises; nothing scores."""
    tmp_path.chmod(0o755)
    host = BubblewrapHost()
    host._probed = True
    _bwrap, python, system = host.parts()
    host._parts = (_bwrap, python, [*system, "--ro-bind", "/does-not-exist", "/x"])
    async with host.open(SandboxSpec()) as box:
        with pytest.raises(SandboxError) as caught:
            await box.python("print('never')")
    assert "does-not-exist" in caught.value.detail
    await host.close()


async def test_too_little_memory_for_a_sandbox_is_refused(host: BubblewrapHost) -> None:
    with pytest.raises(IsolationUnavailable, match="8 MiB"):
        async with host.open(SandboxSpec(memory_mb=8)):
            pytest.fail("it opened")


def test_concurrency_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BubblewrapHost(concurrency=0)


async def test_a_slow_start_is_not_counted_against_the_program(
    host: BubblewrapHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sandboxes under load: verl#3478 and others read a slow start as a slow program."""
    async with host.open(SandboxSpec(time_s=0.3)) as box:
        await box.exec(["/bin/true"])
        assert host._launcher is not None
        os.kill(host._launcher.pid, signal.SIGSTOP)
        task = asyncio.create_task(box.exec(["/bin/true"]))
        await asyncio.sleep(0.6)
        os.kill(host._launcher.pid, signal.SIGCONT)
        assert (await task).status is ExecStatus.EXITED


async def test_a_start_that_never_comes_is_an_error(
    host: BubblewrapHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 20: every await has a deadline."""
    async with host.open(SandboxSpec()) as box:
        await box.exec(["/bin/true"])
        monkeypatch.setattr(bubblewrap, "START_S", 0.2)
        monkeypatch.setattr(bubblewrap, "KILL_S", 0.2)
        assert host._launcher is not None
        os.kill(host._launcher.pid, signal.SIGSTOP)
        try:
            with pytest.raises(SandboxError, match="no namespaces within"):
                await box.exec(["/bin/true"])
        finally:
            os.kill(host._launcher.pid, signal.SIGCONT)


async def test_descriptors_do_not_leak(host: BubblewrapHost) -> None:
    async with host.open(SandboxSpec()) as box:
        await box.exec(["/bin/true"])
        before = len(list(Path("/proc/self/fd").iterdir()))
        await asyncio.gather(*[box.python("print(1)") for _ in range(6)], box.exec(["nope"]))
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        assert host._launcher is not None
        assert len(list(Path(f"/proc/{host._launcher.pid}/fd").iterdir())) < 12


async def test_nothing_is_written_to_the_hosts_temporary_folder(host: BubblewrapHost, tmp_path: Path) -> None:
    async with host.open(SandboxSpec()) as box:
        await box.python("open('/tmp/palestra-inside', 'w').write('x')")
    assert not Path("/tmp/palestra-inside").exists()


def test_importing_the_room_brings_in_no_framework() -> None:
    code = (
        "import sys, palestra.sandboxes.bubblewrap, palestra.recipes.python_functions, json\n"
        "print(json.dumps(sorted({'torch', 'numpy', 'pydantic'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert json.loads(done.stdout) == []


async def test_a_palestra_without_free_descriptors_is_an_error_of_the_sandbox(host: BubblewrapHost) -> None:
    """Case 14, and NeMo-Gym#1513: a resource refused by the machine looked like a failed answer."""
    async with host.open(SandboxSpec()) as box:
        await box.exec(["/bin/true"])
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = len(list(Path("/proc/self/fd").iterdir()))
        highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
        fillers = [os.dup(0) for _ in range(highest + 1 - used)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 3, hard))
        try:
            with pytest.raises(SandboxError, match="Too many open files"):
                await box.python("print(1)")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in fillers:
                os.close(fd)
        assert (await box.exec(["/bin/true"])).ok


@pytest.mark.parametrize("free", [1, 4, 6])
async def test_a_launcher_without_free_descriptors_reports_it_and_lives(
    host: BubblewrapHost, free: int
) -> None:
    async with host.open(SandboxSpec()) as box:
        await box.exec(["/bin/true"])
        assert host._launcher is not None
        pid = host._launcher.pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + free, before[1]))
        with pytest.raises(SandboxError, match="could not"):
            await box.python("print(1)")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        assert (await box.exec(["/bin/true"])).ok
        assert host._launcher.pid == pid


async def test_concurrent_openings_probe_once(monkeypatch: pytest.MonkeyPatch, isolation: None) -> None:
    probes: list[object] = []

    async def counting(parts: object) -> None:
        probes.append(parts)

    monkeypatch.setattr(bubblewrap, "_probe", counting)
    host = BubblewrapHost()

    async def opened() -> None:
        async with host.open(SandboxSpec()):
            pass

    await asyncio.gather(*[opened() for _ in range(8)])
    assert len(probes) == 1
    await host.close()
