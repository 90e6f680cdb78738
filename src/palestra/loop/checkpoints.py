"""Checkpoints: a folder either carries its COMMITTED marker and is whole, or does not exist.

A checkpoint is written beside its place, flushed to the disk, and renamed into
it; the marker is inside before the rename. Whatever is found without a marker
is the rubbish of a killed run and is removed by the run that owns the folder.
The newest ``keep`` are kept, and the one being replaced is removed only after
the new one is committed. The folder itself is a Hugging Face model; the
trainer's state and the loop's place lie in ``trainer/`` and ``loop.json``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.errors import PalestraError, RecordError
from palestra.records.files import disk_error
from palestra.trainer.base import Trainer

MARKER = "COMMITTED"
LOOP_STATE = "loop.json"
TRAINER_STATE = "trainer"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    step: int
    folder: Path

    def loop_state(self) -> dict[str, Any]:
        return json.loads((self.folder / LOOP_STATE).read_text())

    @property
    def trainer_folder(self) -> Path:
        return self.folder / TRAINER_STATE


def committed(root: Path) -> list[Checkpoint]:
    """The whole checkpoints below ``root``, oldest first. RecordError where ``root`` is no folder."""
    if not root.exists():
        return []
    if not root.is_dir():
        raise RecordError(
            f"{root.name} is a file, not the folder of this run's checkpoints",
            where=str(root),
            expected="the folder as the run made it",
            next_command="put the folder back in its place; without one the run begins at its model again",
        )
    found = [
        Checkpoint(int(folder.name), folder)
        for folder in root.iterdir()
        if folder.name.isdigit() and (folder / MARKER).is_file()
    ]
    return sorted(found, key=lambda c: c.step)


def sweep(root: Path) -> list[str]:
    """Remove what a killed run left half written; returns the names removed."""
    if not root.exists():
        return []
    whole = {checkpoint.folder for checkpoint in committed(root)}
    rubbish = [folder for folder in root.iterdir() if folder.is_dir() and folder not in whole]
    for folder in rubbish:
        shutil.rmtree(folder)
    return sorted(folder.name for folder in rubbish)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _flush(path)


def write(root: Path, step: int, trainer: Trainer, loop_state: Mapping[str, Any], keep: int) -> Checkpoint:
    """Write and commit the checkpoint of ``step``, then prune to the newest ``keep``.

    Raises RecordError if the disk cannot take it; earlier checkpoints are untouched.
    """
    final = root / str(step)
    draft = root / f".writing-{step}"
    try:
        if draft.exists():
            shutil.rmtree(draft)
        draft.mkdir(parents=True)
        trainer.save_model(draft)
        (draft / TRAINER_STATE).mkdir()
        trainer.save_state(draft / TRAINER_STATE)
        (draft / LOOP_STATE).write_text(json.dumps(dict(loop_state), indent=1) + "\n")
        (draft / MARKER).write_text(f"{step}\n")
        _flush_tree(draft)
        if final.exists():
            shutil.rmtree(final)
        draft.rename(final)
        _flush(root)
    except (OSError, PalestraError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError):
            raise
        raise disk_error(f"writing the checkpoint of step {step}", root, cause) from error
    for old in committed(root)[: -max(1, keep)]:
        (old.folder / MARKER).unlink()  # killed while removing, it is no checkpoint any more
        shutil.rmtree(old.folder)
    return Checkpoint(step, final)


def require_space(root: Path, needed_bytes: int) -> None:
    """Raise RecordError before the first step if one checkpoint would not fit."""
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if free < needed_bytes:
        raise RecordError(
            f"a checkpoint of this model takes about {needed_bytes / 1e6:.0f} MB, "
            f"and {free / 1e6:.0f} MB are free",
            where=str(root),
            expected="room for one checkpoint more than checkpoints.keep",
            next_command="free some space, or choose another disk with --runs-dir",
        )
