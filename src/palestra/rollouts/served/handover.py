"""A version as one safetensors file that another process reads, checked before it may.

Each tensor is written to its place as it arrives, so a version is never held twice.
The digest is computed from the file when it is complete: from the bytes that the
other process will read. Names, shapes and bytes must be those of the model and of
the manifest, or the file is removed and WeightsError names the first difference.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import xxhash
from safetensors import safe_open
from torch import Tensor

from palestra.errors import WeightsError, nearest
from palestra.models.config import read_json
from palestra.models.tensors import DTYPE_NAMES, SINGLE, tensor_bytes, weight_files
from palestra.rollouts.served import leftovers
from palestra.types import Manifest, TensorEntry

_SPARE_BYTES = 2**30
_HEAD = "lm_head.weight"
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model folder and its shape; a tied head is not a tensor of its own."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if read_json(folder / "config.json").get("tie_word_embeddings", False):
        shapes.pop(_HEAD, None)
    return shapes


def room_for(nbytes: int) -> Path:
    """A new private folder for ``nbytes``: in memory if they fit there with a gibibyte to spare."""
    shared = leftovers.SHARED_MEMORY
    in_memory = shared.is_dir() and os.access(shared, os.W_OK)
    if in_memory and shutil.disk_usage(shared).free >= nbytes + _SPARE_BYTES:
        return leftovers.make_folder(parent=shared)
    return leftovers.make_folder()


def write_version(
    path: Path,
    manifest: Manifest,
    tensors: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
) -> str:
    """Write the version to ``path``; the manifest digest computed from the bytes in the file.

    Raises WeightsError for a tensor that is missing, unknown, given twice, of another shape
    or type than the model's, or other bytes than the manifest announced; then there is no file.
    """
    where = f"weights {manifest.version}"
    try:
        _check_names(manifest, shapes, where)
        offsets = _write(path, manifest, tensors, where)
        return _digest(path, manifest, offsets, where)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def link_model(source: Path, folder: Path, weights: Path) -> None:
    """Make ``folder`` a model like ``source``, but with the weights of the file ``weights``."""
    folder.mkdir()
    for path in source.iterdir():
        if not path.name.endswith(_WEIGHTS):
            (folder / path.name).symlink_to(path.absolute())
    (folder / SINGLE).symlink_to(weights)


def _check_names(manifest: Manifest, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    if manifest.kind != "full":
        raise WeightsError(f"a {manifest.kind} manifest cannot be served", where=where, expected="a full one")
    given = {entry.name: entry for entry in manifest.tensors}
    for name, entry in given.items():
        if name not in shapes:
            raise WeightsError(
                f"the model has no tensor named {name}", where=where, nearest=nearest(name, shapes)
            )
        if entry.shape != tuple(shapes[name]):
            raise WeightsError(
                f"{name} has shape {list(entry.shape)}", where=where, expected=f"shape {list(shapes[name])}"
            )
    missing = [name for name in shapes if name not in given]
    if missing:
        raise WeightsError(
            f"{len(missing)} of {len(shapes)} tensors are missing, first {missing[0]}",
            where=where,
            expected="every tensor of the model, once",
        )


def _write(
    path: Path, manifest: Manifest, tensors: Iterable[tuple[str, Tensor]], where: str
) -> dict[str, int]:
    """Write header and tensors; where each tensor begins in the file."""
    header, offsets = _layout(manifest)
    due = {entry.name: entry for entry in manifest.tensors}
    with open(path, "wb") as file:
        file.write(header)
        for name, tensor in tensors:
            entry = due.pop(name, None)
            if entry is None:
                known = name in offsets
                raise WeightsError(
                    f"{name} was given twice" if known else f"the manifest has no tensor named {name}",
                    where=where,
                    nearest="" if known else nearest(name, offsets),
                )
            if (DTYPE_NAMES.get(tensor.dtype), tuple(tensor.shape)) != (entry.dtype, entry.shape):
                raise WeightsError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)}",
                    where=where,
                    expected=f"{entry.dtype} {list(entry.shape)}, as announced",
                )
            file.seek(offsets[name])
            file.write(tensor_bytes(tensor))
    if due:
        raise WeightsError(
            f"{len(due)} of {len(offsets)} tensors are missing, first {next(iter(due))}", where=where
        )
    return offsets


def _layout(manifest: Manifest) -> tuple[bytes, dict[str, int]]:
    """The file's header, and where each tensor begins: widest types first, so that all are aligned."""
    entries = sorted(manifest.tensors, key=lambda e: (-_width(e), e.name))
    places, end = {}, 0
    for entry in entries:
        places[entry.name] = (end, end + entry.nbytes)
        end += entry.nbytes
    table = {
        entry.name: {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": places[entry.name]}
        for entry in entries
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **table}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + place[0] for name, place in places.items()}


def _width(entry: TensorEntry) -> int:
    count = 1
    for size in entry.shape:
        count *= size
    return entry.nbytes // count if count else 0


def _digest(path: Path, manifest: Manifest, offsets: Mapping[str, int], where: str) -> str:
    found: list[TensorEntry] = []
    with open(path, "rb") as file:
        for entry in manifest.tensors:
            file.seek(offsets[entry.name])
            digest = xxhash.xxh3_128_hexdigest(file.read(entry.nbytes))
            if digest != entry.digest:
                raise WeightsError(
                    f"the bytes received for {entry.name} are not those its manifest announced",
                    where=where,
                    expected=f"digest {entry.digest}",
                    next_command="the same command again; if it repeats, the transport corrupts data",
                )
            found.append(TensorEntry(entry.name, entry.dtype, entry.shape, entry.nbytes, digest))
    return Manifest.digest_of(found)
