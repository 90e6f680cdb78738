from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from helpers.fakes import FakeTrainer
from palestra.errors import RecordError, TrainerError
from palestra.loop import checkpoints


def test_a_written_checkpoint_restores_trainer_and_place(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    trainer.weight = trainer.weight * 3
    written = checkpoints.write(tmp_path, 4, trainer, {"step": 4}, keep=2)
    other = FakeTrainer()
    other.load_state(checkpoints.committed(tmp_path)[-1].trainer_folder)
    assert torch.equal(other.weight, trainer.weight)
    assert written.loop_state() == {"step": 4}
    assert (written.folder / "config.json").is_file(), "the folder is a model folder"


def test_only_the_newest_are_kept_and_they_are_found_in_order(tmp_path: Path) -> None:
    for step in (1, 2, 9, 10):
        checkpoints.write(tmp_path, step, FakeTrainer(), {}, keep=2)
    assert [c.step for c in checkpoints.committed(tmp_path)] == [9, 10]


def test_a_checkpoint_without_its_marker_does_not_exist_and_is_swept(tmp_path: Path) -> None:
    """prime-rl PR#2337 (case 7): weights were announced before the data was there."""
    checkpoints.write(tmp_path, 1, FakeTrainer(), {}, keep=2)
    (tmp_path / "2").mkdir()
    (tmp_path / ".writing-3").mkdir()
    assert [c.step for c in checkpoints.committed(tmp_path)] == [1]
    assert checkpoints.sweep(tmp_path) == [".writing-3", "2"]
    assert [c.step for c in checkpoints.committed(tmp_path)] == [1]


def test_nothing_is_found_where_nothing_was_written(tmp_path: Path) -> None:
    assert checkpoints.committed(tmp_path / "absent") == []
    assert checkpoints.sweep(tmp_path / "absent") == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_cannot_take_it_leaves_the_earlier_checkpoint(tmp_path: Path, number: int) -> None:
    checkpoints.write(tmp_path, 1, FakeTrainer(), {}, keep=1)
    failing = FakeTrainer(write_error=OSError(number, os.strerror(number)))
    with pytest.raises(RecordError) as caught:
        checkpoints.write(tmp_path, 2, failing, {}, keep=1)
    assert os.strerror(number) in str(caught.value)
    assert "run the same command" in str(caught.value)
    assert [c.step for c in checkpoints.committed(tmp_path)] == [1]
    assert not list(tmp_path.glob(".writing-*"))


def test_a_trainers_own_disk_error_is_a_disk_error_too(tmp_path: Path) -> None:
    class Wrapping(FakeTrainer):
        def save_state(self, folder: Path) -> None:
            raise TrainerError("cannot write") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(RecordError, match="No space left"):
        checkpoints.write(tmp_path, 2, Wrapping(), {}, keep=1)
    assert not list(tmp_path.glob(".writing-*"))


def test_a_run_that_would_not_fit_is_refused_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="MB are free"):
        checkpoints.require_space(tmp_path / "new", 1 << 60)
    checkpoints.require_space(tmp_path / "new", 1)


def test_writing_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoints.write(tmp_path, 3, FakeTrainer(), {"seconds": 1}, keep=1)
    checkpoints.write(tmp_path, 3, FakeTrainer(), {"seconds": 2}, keep=1)
    assert [c.loop_state() for c in checkpoints.committed(tmp_path)] == [{"seconds": 2}]


def test_killed_while_writing_there_is_a_whole_checkpoint_or_none(tmp_path: Path) -> None:
    """prime-rl PR#1348, #3050 (case 7): either side may be killed in any state."""
    script = textwrap.dedent(
        f"""
        import itertools, pathlib, sys
        sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
        from helpers.fakes import FakeTrainer
        from palestra.loop import checkpoints
        trainer = FakeTrainer(size=20000)
        print("ready", flush=True)
        for step in itertools.count(1):
            checkpoints.write(pathlib.Path({str(tmp_path)!r}), step, trainer, {{"step": step}}, keep=2)
        """
    )
    for delay in (0.02, 0.05, 0.11):
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(delay)
        child.kill()
        child.wait()
        child.stdout.close()
        checkpoints.sweep(tmp_path)
        for checkpoint in checkpoints.committed(tmp_path):
            other = FakeTrainer()
            other.load_state(checkpoint.trainer_folder)
            assert len(other.weight) == 20000
            assert checkpoint.loop_state() == {"step": checkpoint.step}
