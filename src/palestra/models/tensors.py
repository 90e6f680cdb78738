"""A model folder's weights as named tensors, read and written as safetensors only.

A file that is cut short, a shard that is absent or a tensor outside its index is
an error that names the file; nothing is filled in. Pickled weights are never
opened. Writing is atomic: under the final name there is the old file or the
whole new one, also after ``kill -9``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from palestra.errors import ModelSourceError
from palestra.models.config import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder; ModelSourceError if there are none or one is absent.

    ``model.safetensors`` wins over an index beside it, as in transformers.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        pickled = sorted(p.name for p in folder.glob("*.bin"))
        raise ModelSourceError(
            "the model folder has no safetensors weights",
            where=str(folder),
            expected=f"{SINGLE}, or {INDEX} and the shards it names",
            nearest=f"{pickled[0]} (pickled weights are never opened; convert them)" if pickled else "",
        )
    names = sorted(set(_weight_map(folder).values()))
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ModelSourceError(
            f"the model folder lacks the shard {absent[0]} that {INDEX} names", where=str(folder)
        )
    return [folder / name for name in names]


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder on the CPU, under its Hugging Face name, in its type on disk."""
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            tensors.update(load_file(path))
        except (SafetensorError, OSError) as error:
            raise ModelSourceError(
                f"{path.name} is damaged or cut short: {error}",
                where=str(path),
                expected="a complete safetensors file",
                next_command=f"rm {path}  # then fetch the model again",
            ) from error
    if not (folder / SINGLE).is_file():
        lost = sorted(set(_weight_map(folder)) - set(tensors))
        if lost:
            raise ModelSourceError(
                f"the tensor {lost[0]} that {INDEX} names is in no shard", where=str(folder)
            )
    return tensors


def save_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Write ``model.safetensors`` atomically and durably; returns its path.

    Tied weights are given once: two names over the same memory raise ValueError.
    """
    owners: dict[int, str] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            first = owners.setdefault(tensor.untyped_storage().data_ptr(), name)
            if first != name and tensor.data_ptr() == tensors[first].data_ptr():
                raise ValueError(f"{name} and {first} are the same memory: give tied weights once")
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{SINGLE}.{os.getpid()}"
    try:
        ready = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        save_file(ready, temporary, metadata={"format": "pt"})
        temporary.chmod(0o644)  # safetensors writes 0600, which locks others out of a shared cache
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, folder / SINGLE)
    finally:
        temporary.unlink(missing_ok=True)
    return folder / SINGLE


def _weight_map(folder: Path) -> dict[str, str]:
    value = read_json(folder / INDEX).get("weight_map")
    if not isinstance(value, dict) or any(Path(str(name)).name != name for name in value.values()):
        raise ModelSourceError(f"{INDEX} has no usable weight_map", where=str(folder / INDEX))
    return value
