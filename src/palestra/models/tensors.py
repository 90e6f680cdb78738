"""Named tensors and their bytes: safetensors files, and the digests that manifests hold.

A file that is cut short, a shard that is absent or a tensor outside its index is
an error that names the file; nothing is filled in. Pickled weights are never
opened. Writing is atomic and durable: under the final name there is the old file
or the whole new one, also after ``kill -9``; tensors are converted and written
one by one, so a save needs memory for one of them. A digest is of the bytes in
row-major order, never of a name or a counter, whoever holds the tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from palestra.errors import ModelSourceError
from palestra.models.config import read_json
from palestra.types import TensorEntry

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
"""torch dtype to the name safetensors gives it."""


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes in row-major order; a view wherever that is how it lies in memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def tensor_digest(tensor: Tensor) -> str:
    """32 hex digits of XXH3-128 over the tensor's bytes."""
    return xxhash.xxh3_128_hexdigest(tensor_bytes(tensor))


def entry_of(name: str, tensor: Tensor) -> TensorEntry:
    """What a manifest says of ``tensor``."""
    return TensorEntry(
        name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes, tensor_digest(tensor)
    )


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


def save_tensors(
    folder: Path, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype] | None = None
) -> Path:
    """Write ``model.safetensors``, each tensor in its type of ``dtypes``; returns the path.

    Tied weights are given once: two names over the same memory raise ValueError.
    """
    owners: dict[int, str] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            first = owners.setdefault(tensor.untyped_storage().data_ptr(), name)
            if first != name and tensor.data_ptr() == tensors[first].data_ptr():
                raise ValueError(f"{name} and {first} are the same memory: give tied weights once")
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / SINGLE, tensors, dtypes)
    return folder / SINGLE


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype] | None = None
) -> tuple[int, str]:
    """Write one file as `write_durably` does; its size, and its digest (32 hex digits of XXH3-128)."""
    kinds = {name: (dtypes or {}).get(name, tensor.dtype) for name, tensor in tensors.items()}
    return write_durably(path, _safetensors_blocks(tensors, kinds))


def write_durably(path: Path, blocks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Replace ``path`` by ``blocks``, written through to the disk; after an error the old file stands."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    digest = xxhash.xxh3_128()
    size = 0
    try:
        with open(temporary, "wb") as file:
            for block in blocks:
                file.write(block)
                digest.update(block)
                size += len(block)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return size, digest.hexdigest()


def _safetensors_blocks(
    tensors: Mapping[str, Tensor], kinds: Mapping[str, torch.dtype]
) -> Iterator[bytes | memoryview]:
    """The header, then each tensor, in the order in which the library writes them.

    Wide types come first, so every tensor lies at a multiple of its width.
    """
    names = sorted(tensors, key=lambda name: (-kinds[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].numel() * kinds[name].itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[kinds[name]],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield tensor_bytes(tensors[name].detach().to(kinds[name]))


def _weight_map(folder: Path) -> dict[str, str]:
    value = read_json(folder / INDEX).get("weight_map")
    if not isinstance(value, dict) or any(Path(str(name)).name != name for name in value.values()):
        raise ModelSourceError(f"{INDEX} has no usable weight_map", where=str(folder / INDEX))
    return value
