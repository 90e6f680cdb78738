"""What is left of an engine's server when the process that started it is gone: nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from helpers import fake_served as fake
from helpers.tiny import make_tiny_model
from rollouts.processes import gone, members


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("served") / "tiny")


async def test_when_this_process_is_killed_no_server_is_left(folder: Path, tmp_path: Path) -> None:
    """The parent gets no chance to clean up its files: kill -9. Its processes go all the same."""
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
    print(engine._life._server.group, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": short}
    )
    assert parent.stdout is not None
    group = int(parent.stdout.readline())
    assert len(members(group)) >= 2
    parent.kill()
    parent.wait()
    assert await gone(group)
    shutil.rmtree(short)
