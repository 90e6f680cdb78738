"""What a record is on disk: one strict JSON object per line, readable by anything.

The names of the run directory (schema 1) are written here once. Whatever a caller
hands in becomes strict JSON: not-a-number and infinities become strings, foreign
objects their text, lone surrogates valid escapes, so encoding never fails and every
line parses in every language. No file of a run ever has two writers: a file's name
says attempt and process. This module does no I/O.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Literal

SCHEMA = 1
RUN_JSON = "run.json"
RUN_LOCK = "run.lock"
HEARTBEAT = "heartbeat"
COMMITTED = "COMMITTED"
CONTROLLER = "controller"

Status = Literal["new", "running", "finished", "failed", "stopped"]
STATUSES: tuple[Status, ...] = ("new", "running", "finished", "failed", "stopped")
State = Literal["running", "finished", "failed", "stopped", "lost", "empty"]
"""What a reader says about a run: ``lost`` is a run that claims to be running and is not."""

Stream = Literal["metrics", "spans", "events"]
Room = Literal["rollouts", "ledger", "evals"]

_DEEPEST = 32
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
PROCESS_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
STREAM_FILE = re.compile(r"(metrics|spans|events)-(\d+)\.jsonl")
SEGMENT = re.compile(r"attempt-(\d+)(?:-([A-Za-z0-9_][A-Za-z0-9_.-]{0,63}))?")
ATTEMPT_DIR = re.compile(r"attempt_(\d+)")


def stream_file(stream: Stream, attempt: int) -> str:
    """File name of one process's stream, below ``events/<process>/``."""
    return f"{stream}-{attempt}.jsonl"


def segment(attempt: int, process: str) -> str:
    """Stem of a file below ``rollouts/``, ``tokens/``, ``ledger/`` or ``evals/``."""
    return f"attempt-{attempt}" if process == CONTROLLER else f"attempt-{attempt}-{process}"


def number(value: float) -> float | str:
    """``value`` as JSON can hold it: the three special floats by name."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def special(value: Any) -> Any:
    """The float that ``number`` named; anything else unchanged."""
    return _SPECIAL.get(value, value) if isinstance(value, str) else value


def jsonable(value: Any, depth: int = 0) -> Any:
    """A copy of ``value`` made of strict JSON types only; foreign objects become their text."""
    if isinstance(value, Enum):
        return jsonable(value.value, depth + 1)
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, float):
        return number(value)
    if depth > _DEEPEST:
        return text_of(value)
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8", "backslashreplace")
    return _jsonable_object(value, depth + 1)


def _jsonable_object(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        return {str(jsonable(key)): jsonable(item, depth) for key, item in value.items()}
    if isinstance(value, type):
        return text_of(value)
    if is_dataclass(value):
        return {f.name: jsonable(getattr(value, f.name), depth) for f in fields(value)}
    to_list = getattr(value, "tolist", None)
    if to_list is not None:  # arrays and scalars of array, NumPy and torch
        return jsonable(to_list(), depth)
    if isinstance(value, (set, frozenset)):
        return sorted((jsonable(item, depth) for item in value), key=repr)
    if isinstance(value, Collection):
        return [jsonable(item, depth) for item in value]
    converted = as_float(value)
    return text_of(value) if converted is None else number(converted)


def as_float(value: Any) -> float | None:
    """``value`` as a float where it is one in any library's clothing; None where it is not."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # a tensor of many elements, a huge int
        return None


def text_of(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 1000 else text[:997] + "..."


def encode(record: Mapping[str, Any]) -> bytes:
    """One line, newline included. ``record`` must be made of JSON types (see ``jsonable``)."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A lone surrogate (undecodable model output) becomes \udcXX, which JSON itself understands.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """The record on a line; None for whatever is not one."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
