"""The trainer's state on disk: safetensors beside one JSON that vouches for them.

``trainer.json`` is written last, so a folder without it holds no state; it names
each file's size and XXH3-128 digest, so one that is cut short or foreign is
found before a single weight is touched. Files are written tensor by tensor and
made durable before they get their names. Errors name the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from palestra.errors import TrainerError
from palestra.models.tensors import write_durably, write_safetensors

SCHEMA = 1
INDEX = "trainer.json"
_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class StateIndex:
    """What ``trainer.json`` holds."""

    updates: int
    fingerprint: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]
    """File name -> {"bytes", "xxh3_128"}."""


def write_state(
    folder: Path, parts: Mapping[str, Mapping[str, Tensor]], updates: int, fingerprint: Mapping[str, Any]
) -> None:
    """Write ``<part>.safetensors`` for each part, then the index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).unlink(missing_ok=True)
    files = {}
    for part, tensors in parts.items():
        name = f"{part}.safetensors"
        size, digest = write_safetensors(folder / name, tensors)
        files[name] = {"bytes": size, "xxh3_128": digest}
    index = {"schema": SCHEMA, "updates": updates, "fingerprint": dict(fingerprint), "files": files}
    write_durably(folder / INDEX, [(json.dumps(index, indent=1) + "\n").encode()])
    _sync_folder(folder)


def read_index(folder: Path) -> StateIndex:
    path = folder / INDEX
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["schema"] != SCHEMA:
            raise TrainerError(
                f"the trainer state is of schema {value['schema']}",
                where=str(path),
                expected=f"schema {SCHEMA}",
            )
        return StateIndex(int(value["updates"]), dict(value["fingerprint"]), dict(value["files"]))
    except FileNotFoundError as error:
        raise TrainerError(
            "the folder holds no finished trainer state", where=str(path), expected=f"a file {INDEX}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainerError(f"{INDEX} cannot be read: {error!r}", where=str(path)) from error


def check_file(path: Path, record: Mapping[str, Any] | None, shapes: Mapping[str, torch.Size]) -> None:
    """TrainerError unless ``path`` is the very file the index describes, with exactly these fp32 tensors."""
    if record is None:
        raise TrainerError(f"{INDEX} does not mention {path.name}", where=str(path))
    try:
        size = path.stat().st_size
        if size != record["bytes"]:
            raise _damaged(path, f"it has {size} bytes, {INDEX} says {record['bytes']}")
        digest = xxhash.xxh3_128()
        with open(path, "rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
    except OSError as error:
        raise TrainerError(f"{path.name} cannot be read: {error}", where=str(path)) from error
    if digest.hexdigest() != record["xxh3_128"]:
        raise _damaged(path, f"its digest is {digest.hexdigest()}, {INDEX} says {record['xxh3_128']}")
    with safe_open(path, "pt") as file:
        found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        different = sorted(
            name
            for name in found.keys() | shapes.keys()
            if name not in found
            or name not in shapes
            or found[name].get_shape() != list(shapes[name])
            or found[name].get_dtype() != "F32"
        )
    if different:
        raise TrainerError(
            f"{path.name} is the state of another model: {different[0]} differs",
            where=str(path),
            expected=f"{len(shapes)} fp32 tensors of this model's names and shapes",
        )


def read_into(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Copy a checked file's tensors into these."""
    with safe_open(path, "pt") as file, torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(file.get_tensor(name))


def _damaged(path: Path, why: str) -> TrainerError:
    return TrainerError(
        f"{path.name} is cut short or was changed: {why}",
        where=str(path),
        expected="the file as it was saved",
        next_command="resume from an earlier checkpoint",
    )


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
