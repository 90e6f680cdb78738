"""What is left of an engine's server when the process that started it is gone: nothing."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from helpers import fake_served as fake
from helpers.tiny import make_tiny_model
from palestra.errors import EngineError
from palestra.rollouts.served import leftovers
from palestra.rollouts.served.vllm import VllmEngine
from rollouts.processes import gone, members
from rollouts.test_served import version


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("served") / "tiny")


async def test_when_this_process_is_killed_no_server_is_left(folder: Path, tmp_path: Path) -> None:
    """The parent gets no chance to clean up (kill -9): its processes and its files go all the same."""
    short = tempfile.mkdtemp(prefix="p-")
    python = fake.make_python(tmp_path)
    script = f"""
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from rollouts.test_served import version
from palestra.rollouts.served.vllm import VllmEngine
async def main():
    engine = VllmEngine(Path({str(folder)!r}), python=Path({str(python)!r}), dtype="fp32")
    manifest, tensors = version(Path({str(folder)!r}), 0)
    await engine.start(manifest, tensors.items())
    manifest, tensors = version(Path({str(folder)!r}), 1)
    await engine.stage(manifest, tensors.items())
    print(engine._life._server.group, engine._home, engine._staged[1].parent, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": short}
    )
    assert parent.stdout is not None
    number, *names = parent.stdout.readline().split()
    group, folders = int(number), [Path(name) for name in names]
    assert all(path.is_dir() for path in folders)
    assert len(members(group)) >= 2
    parent.kill()
    parent.wait()
    assert await gone(group)
    assert not [path for path in folders if path.exists()]
    assert not list(Path(short).iterdir())
    shutil.rmtree(short)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without other leftovers."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    return tmp_path


def abandoned(place: Path) -> list[Path]:
    """Folders whose owner was killed before a server had a guard: one of files, one in shared memory."""
    script = f"""
import os, signal, tempfile
from pathlib import Path
from palestra.rollouts.served import leftovers
tempfile.tempdir = {str(place)!r}
for parent in (None, Path({str(place / "shm")!r})):
    folder = leftovers.make_folder("x-", parent)
    (folder / "model.safetensors").write_bytes(b"weights")
    print(folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=False)
    return [Path(line) for line in done.stdout.split()]


def test_what_a_killed_process_left_is_swept(places: Path) -> None:
    """Killed while it loads, before any server runs: nobody was there to clean up."""
    left = abandoned(places)
    assert [path.parent for path in left] == [places, places / "shm"]
    mine = leftovers.make_folder()
    leftovers.sweep()
    assert not [path for path in left if path.exists()]
    assert mine.is_dir()


def test_what_has_no_owner_or_one_that_cannot_be_known_stays(places: Path) -> None:
    """The log of a server that died is left on purpose; process numbers of another container mean nothing."""
    log, elsewhere = abandoned(places)
    leftovers.leave(log)
    pid = (elsewhere / "owner").read_text().split()[0]
    (elsewhere / "owner").write_text(f"{pid} pid:[1]")
    (places / "palestra-mine").mkdir()
    (places / "palestra-mine" / "owner").write_text("the owner")
    leftovers.sweep()
    assert log.is_dir()
    assert elsewhere.is_dir()
    assert (places / "palestra-mine").is_dir()


async def test_an_engine_that_starts_sweeps(folder: Path, places: Path, tmp_path: Path) -> None:
    left = abandoned(places)
    engine = VllmEngine(folder, python=tmp_path / "none", dtype="fp32")
    manifest, tensors = version(folder, 0)
    with pytest.raises(EngineError, match="cannot be run"):
        await engine.start(manifest, tensors.items())
    assert not [path for path in left if path.exists()]
    assert not list(places.glob("palestra-*")), "nor is there anything of the start that failed"
    await engine.close()


def test_a_version_that_is_being_written_when_the_program_ends_is_removed(folder: Path, places: Path) -> None:
    """SIGTERM while it loads: the thread that writes is done after the event loop has stopped caring."""
    manifest, tensors = version(folder, 0)

    def slowly() -> Iterator[tuple[str, Tensor]]:
        time.sleep(0.3)
        yield from tensors.items()

    async def main() -> None:
        engine = VllmEngine(folder, python=places / "none", dtype="fp32")
        engine._home = leftovers.make_folder()
        task = asyncio.create_task(engine._written(manifest, slowly()))
        await asyncio.sleep(0.1)
        assert not task.done()
        leftovers.leave(engine._home)

    asyncio.run(main())
    left = [path for path in places.rglob("palestra-*") if (path / "owner").exists()]
    assert left == []
    assert not list(places.rglob("model.safetensors"))
