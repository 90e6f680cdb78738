"""The batch of a skipped update on disk: whole enough to repeat the update and see why.

JSON, readable by eye, floats exact. Nothing in it is executed when it is read, and
what is no such file is refused by name. One update that is skipped again (from a
continued run) takes the place of the first.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import asdict, fields
from pathlib import Path

from palestra.batches import Batch, LossSpec
from palestra.errors import TrainerError
from palestra.models.tensors import write_durably


def save_batch(folder: Path, updates: int, batch: Batch, loss: LossSpec, total: float, norm: float) -> Path:
    """Write ``after-<updates>.json``: what the update after so many of them was given, and what came out."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = {field.name: getattr(batch, field.name) for field in fields(Batch)}
    plain = {name: list(v) if isinstance(v, array) else v for name, v in columns.items()}
    found = {"loss": repr(total), "grad_norm": repr(norm)}  # JSON has no word for nan
    text = json.dumps({"updates": updates, "found": found, "loss": asdict(loss), "batch": plain})
    path = folder / f"after-{updates}.json"
    write_durably(path, [text.encode()])
    return path


def load_batch(path: Path) -> tuple[Batch, LossSpec]:
    """What `save_batch` wrote; TrainerError if the file is cut short or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        return Batch(**value["batch"]), LossSpec(**value["loss"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainerError(
            f"{path.name} holds no batch of a skipped update: {error!r}",
            where=str(path),
            expected="a file that a run wrote into its folder 'skipped'",
        ) from error
