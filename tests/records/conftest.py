from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from palestra.records.folder import RunFolder
from palestra.records.writer import RunWriter
from palestra.types import Abstain, Boundary, Completion, Reward, StopReason, Trajectory, Turn

Make = Callable[..., Trajectory]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    run = RunFolder.open(tmp_path / "runs" / "first", create=True)
    run.begin_attempt({"argv": ["palestra", "train"]}, {"model": "tiny", "steps": 9}, {"steps": "job.py:3"})
    yield run
    run.unlock()


@pytest.fixture
def writer(folder: RunFolder) -> Iterator[RunWriter]:
    writing = RunWriter(folder)
    yield writing
    writing.close()


@pytest.fixture
def trajectory() -> Make:
    def make(name: str = "t", *, reward: float | None = 1.0, tokens: int = 3) -> Trajectory:
        said = Completion(
            tuple(range(10, 10 + tokens)),
            tuple(-0.25 * i for i in range(tokens)),
            (4,) * tokens,
            StopReason.EOS,
        )
        outcome = (
            Abstain("boot failed", Boundary.SANDBOX, "trace")
            if reward is None
            else Reward(reward, {"unit": 0.5})
        )
        return Trajectory(name, "a" * 64, (Turn.given([1, 2]), Turn.sampled(said)), outcome)

    return make


class SmallDisk:
    """A file system of one mebibyte that can be filled, freed and made read-only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self) -> None:
        with self._filler.open("wb", buffering=0) as handle:
            try:
                while True:
                    handle.write(b"x" * 4096)
            except OSError:
                pass

    def free(self) -> None:
        self._filler.unlink()

    def read_only(self) -> None:
        subprocess.run(["mount", "-o", "remount,ro", str(self.path)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "palestra-test", str(place)], capture_output=True
        ).returncode
    )
    if not mounted:
        pytest.skip("mounting a small file system needs root; the size-limit test covers the same path")
    yield SmallDisk(place)
    subprocess.run(["umount", "-l", str(place)], check=True)
