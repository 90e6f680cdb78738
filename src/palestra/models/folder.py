"""Which files make up a model folder, whether they are all there, and their digest.

A folder that passes `check_folder` has a configuration this package computes, a
tokenizer, and weight files that are whole: nothing later finds out, an hour into
a run, that a shard was cut short. The digest covers the bytes of every file that
decides what the model computes or how text becomes tokens, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import xxhash
from safetensors import SafetensorError, safe_open

from palestra.errors import ModelSourceError, nearest
from palestra.models.config import ModelConfig, read_json
from palestra.models.tensors import INDEX, SINGLE, weight_files

COMPANION_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""Everything beside the weights that a checkpoint of the same model needs."""
_CHUNK_BYTES = 1 << 22

FileMarks = dict[str, tuple[int, str]]
"""File name -> (bytes, 32 hex digits of XXH3-128)."""


def check_folder(folder: Path) -> None:
    """Raise ModelSourceError unless the folder can be loaded; all absent parts are named at once."""
    present = {path.name for path in folder.iterdir()}
    absent = [name for name in ("config.json", "tokenizer.json") if name not in present]
    if not present & {SINGLE, INDEX}:
        absent.append(f"{SINGLE} (or {INDEX} with its shards)")
    if absent:
        raise ModelSourceError(
            f"the model folder lacks {', '.join(absent)}",
            where=str(folder),
            expected="a model in Hugging Face layout: config.json, tokenizer.json, *.safetensors",
            nearest=_other_weights(present),
        )
    ModelConfig.from_folder(folder)
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelSourceError(
                f"{path.name} is damaged or cut short: {error}",
                where=str(path),
                expected="a complete safetensors file",
                next_command="fetch or copy the model again",
            ) from error


def fingerprint(folder: Path) -> FileMarks:
    """Size and XXH3-128 of the companion files and weights; reads each byte once."""
    names = [name for name in (*COMPANION_FILES, INDEX) if (folder / name).is_file()]
    names += [path.name for path in weight_files(folder)]
    return {name: _mark(folder / name) for name in sorted(names)}


def folder_digest(marks: Mapping[str, tuple[int, str]]) -> str:
    """64 hex digits of SHA-256 over the marks in the order of the names."""
    rows = sorted([name, size, mark] for name, (size, mark) in marks.items())
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def copy_model_files(source: Path, target: Path, *, dtype: str | None = None) -> list[str]:
    """Copy configuration, tokenizer and generation files (no weights) into ``target``; returns their names.

    ``dtype`` (float32, bfloat16) is written into the copied config.json where the
    weights saved beside it have another type than the source's.
    """
    target.mkdir(parents=True, exist_ok=True)
    names = [name for name in COMPANION_FILES if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, target / name)
    if dtype is not None:
        config = read_json(target / "config.json")
        config.pop("torch_dtype", None)
        (target / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2) + "\n")
    return names


def nearest_folder(path: Path) -> str:
    """The most similar folder beside ``path``, or '' where none is close."""
    if not path.parent.is_dir():
        return ""
    close = nearest(path.name, [p.name for p in path.parent.iterdir() if p.is_dir()])
    return str(path.parent / close) if close else ""


def _mark(path: Path) -> tuple[int, str]:
    state = xxhash.xxh3_128()
    size = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            state.update(chunk)
            size += len(chunk)
    return size, state.hexdigest()


def _other_weights(present: set[str]) -> str:
    for ending, advice in ((".gguf", "a GGUF file"), (".bin", "pickled weights, which are never opened")):
        found = sorted(name for name in present if name.endswith(ending))
        if found and SINGLE not in present:
            return f"{found[0]} ({advice}; convert it to safetensors)"
    return ""
