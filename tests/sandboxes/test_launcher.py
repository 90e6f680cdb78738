"""The launcher's own rules: which user a sandbox gets, what enters it, and what it does when spoken to."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from palestra.sandboxes import launcher
from palestra.sandboxes.base import SandboxSpec
from palestra.sandboxes.bubblewrap import BubblewrapHost
from palestra.sandboxes.client import sealed_memory
from palestra.sandboxes.launcher import DROPPED_ID_BASE, DROPPED_IDS_EACH, INSIDE_ID, mapped_id

WHOLE = "         0          0 4294967295\n"
CONTAINER = "0 100000 65536\n"
SINGLE = "0 1000 1\n"


def test_root_gives_sandboxes_an_id_that_belongs_to_nobody() -> None:
    assert mapped_id(DROPPED_ID_BASE + 5, WHOLE) == DROPPED_ID_BASE + 5


def test_in_a_container_with_few_ids_it_is_nobodys() -> None:
    assert mapped_id(DROPPED_ID_BASE + 5, CONTAINER) == INSIDE_ID


def test_with_a_single_id_there_is_none() -> None:
    assert mapped_id(DROPPED_ID_BASE + 5, SINGLE) is None
    assert mapped_id(DROPPED_ID_BASE + 5, "0 0 10\n20 20 70000\n") == INSIDE_ID


def as_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mapping: str) -> None:
    """This process's view of itself: root, with ``mapping`` as its user-id map."""
    file = tmp_path / "uid_map"
    file.write_text(mapping)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("builtins.open", lambda *_a, **_k: file.open())


def test_root_that_cannot_be_left_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        as_root(patch, tmp_path, "0 0 1\n")
        with pytest.raises(OSError, match="root cannot be left"):
            launcher.unprivileged_id(0)


def test_a_root_that_is_a_plain_user_outside_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        as_root(patch, tmp_path, SINGLE)
        assert launcher.unprivileged_id(0) is None


def test_slots_get_different_ids(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Attack 30: limits that the kernel counts per user are not shared between sandboxes."""
    with monkeypatch.context() as patch:
        as_root(patch, tmp_path, WHOLE)
        ids = [launcher.unprivileged_id(slot) for slot in range(DROPPED_IDS_EACH)]
    assert len(set(ids)) == DROPPED_IDS_EACH
    assert all(one is not None and 0x70000000 <= one < 0x7FFE0000 for one in ids)


def test_an_unprivileged_launcher_keeps_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert launcher.unprivileged_id(0) is None


def test_sealed_memory_is_read_only_for_everybody_who_holds_it() -> None:
    fd = sealed_memory(b"abc", "test")
    try:
        assert os.read(fd, 10) == b"abc"
        with pytest.raises(PermissionError):
            os.write(fd, b"x")
        with pytest.raises(PermissionError):
            os.truncate(fd, 100)
    finally:
        os.close(fd)


def test_reports_of_bubblewrap_are_read_in_pieces() -> None:
    read_end, write_end = os.pipe2(os.O_NONBLOCK)
    run = launcher.Run(1, 2, read_end)
    os.write(write_end, b'{ "child-pid": 12')
    assert not run.read_status()
    os.write(write_end, b'34, "net-namespace": 1 }\n{ "exit-')
    assert run.read_status()
    assert (run.init, run.exit_code, run.closed) == (1234, None, False)
    os.write(write_end, b'code": 3 }\n')
    os.close(write_end)
    assert not run.read_status(), "the init was known already"
    assert (run.exit_code, run.closed) == (3, True)
    os.close(read_end)


async def test_the_launcher_has_nothing_of_the_environment(
    host: BubblewrapHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    async with host.open(SandboxSpec()) as box:
        await box.exec(["/bin/true"])
        assert host._launcher is not None
        assert b"secret-token" not in Path(f"/proc/{host._launcher.pid}/environ").read_bytes()


async def test_cpu_seconds_cover_every_process_of_the_sandbox(host: BubblewrapHost) -> None:
    burn = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass\n"
    async with host.open(SandboxSpec(processes=3)) as box:
        alone = await box.python(burn)
        orphan = await box.python(
            "import os\nif os.fork() == 0:\n  " + burn.replace("\n", "\n  ") + "\nelse:\n  os.wait()"
        )
    assert 0.4 <= alone.cpu_seconds < 2
    assert 0.4 <= orphan.cpu_seconds < 2


async def test_killing_twice_or_too_late_is_harmless(host: BubblewrapHost) -> None:
    async with host.open(SandboxSpec()) as box:
        await box.exec(["/bin/true"])
        client = host._launcher
        assert client is not None
        client._control.send(b"K999")
        assert (await box.exec(["/bin/true"])).ok
    await asyncio.sleep(0)
    assert client.alive
