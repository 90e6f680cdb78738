"""Everything a run left behind, read back: never writes, never needs the run to be alive.

Works on a running, killed, copied or read-only folder. A torn last line is no
record; a whole line that does not parse is skipped and counted in ``skipped``; keys
it does not know are kept; files it does not know are left alone. Records come in
the order (attempt, process with the controller first, as written), which no clock
can disturb. Every record carries ``attempt`` and ``process``.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from palestra.errors import RecordError
from palestra.records import heartbeat
from palestra.records.files import read_lines
from palestra.records.folder import NewerSchemaError, read_info, unknown_run
from palestra.records.schema import (
    ATTEMPT_DIR,
    COMMITTED,
    CONTROLLER,
    HEARTBEAT,
    RUN_JSON,
    SEGMENT,
    STREAM_FILE,
    Room,
    State,
    Stream,
    special,
)
from palestra.records.tokens import TokenColumns, read_block

Record = dict[str, Any]
Axis = Literal["step", "version", "t", "m"]
_ENDED: tuple[State, ...] = ("finished", "failed", "stopped")


class RunState(NamedTuple):
    state: State
    reason: str


class CheckpointEntry(NamedTuple):
    step: int
    path: Path
    complete: bool
    """It has its COMMITTED marker; without one it is a torn write, and nothing may load it."""


class SegmentFile(NamedTuple):
    attempt: int
    process: str
    path: Path


class RunReader:
    """One run, read only. Holds nothing but the path: every call reads what is there now."""

    def __init__(self, path: Path) -> None:
        """Raises RecordError where there is no run, or one of a newer schema."""
        self.path = Path(os.path.abspath(path))
        self.skipped: Counter[str] = Counter()
        """Lines that did not parse, by file, over all calls so far."""
        if (self.path / RUN_JSON).is_file():
            self.info()
        elif not (self.path / "events").is_dir() and not (self.path / "config").is_dir():
            raise unknown_run(self.path)

    def info(self) -> Record:
        """``run.json``, or an empty dict where it is missing or damaged and the rest is still readable."""
        try:
            return read_info(self.path)
        except NewerSchemaError:
            raise
        except RecordError:
            return {}

    def state(self) -> RunState:
        """How the run stands, and why. A run whose process is gone is ``lost``, whatever it last claimed."""
        info = self.info()
        if not info:
            return RunState("lost", "run.json is missing or damaged")
        status, reason = str(info.get("status", "")), str(info.get("status_reason", ""))
        for ended in _ENDED:
            if status == ended:
                return RunState(ended, reason)
        if not info.get("attempt"):
            return RunState("empty", "nothing was started yet")
        who = info.get("owner")
        beat = heartbeat.read_beat(self.path / HEARTBEAT)
        gone = heartbeat.trouble(who if isinstance(who, Mapping) else {}, beat)
        return RunState("lost", gone) if gone else RunState("running", reason)

    def attempts(self) -> list[Record]:
        """Each attempt: ``attempt``, ``launch``, ``resolved``, ``provenance``, ``started`` where known."""
        told = {a.get("attempt"): a for a in self.info().get("attempts", []) if isinstance(a, dict)}
        folders = sorted(
            (int(match[1]), folder)
            for folder in self._listing("config")
            if (match := ATTEMPT_DIR.fullmatch(folder.name)) and folder.is_dir()
        )
        return [
            {"attempt": n, **told.get(n, {})} | {part: _json(folder / f"{part}.json") for part in
             ("launch", "resolved", "provenance")} for n, folder in folders
        ]  # fmt: skip

    def metrics(self, names: Collection[str] | None = None) -> list[Record]:
        """Metric records with their clocks; ``values`` has floats, and only ``names`` where given."""
        found: list[Record] = []
        for record in self.stream("metrics"):
            values = record.get("values")
            if not isinstance(values, dict):
                continue
            kept = {n: special(v) for n, v in values.items() if names is None or n in names}
            if kept or names is None:
                found.append({**record, "values": kept})
        return found

    def events(self, kind: str | None = None) -> list[Record]:
        """Event records; what was said is in ``fields``."""
        return [r for r in self.stream("events") if kind is None or r.get("kind") == kind]

    def spans(self) -> list[Record]:
        """Spans by opening: ``seconds`` (monotonic) and ``error`` where closed, ``open`` true where not."""
        found: dict[tuple[int, str, str], Record] = {}
        for record in self.stream("spans"):
            key = (record["attempt"], record["process"], str(record.get("id")))
            if record.get("phase") == "open":
                found[key] = {k: v for k, v in record.items() if k != "phase"} | {
                    "open": True, "seconds": None, "error": None}  # fmt: skip
            elif key in found:
                span = found[key]
                span |= {"open": False, "seconds": _seconds(span, record), "error": record.get("error")}
        return list(found.values())

    def rollouts(
        self, step: int | None = None, split: str | None = None, limit: int | None = None
    ) -> list[Record]:
        """Rollout records, or the first ``limit``; a step redone after a restart has both attempts'."""
        return list(islice(self.iter_rollouts(step, split), limit))

    def iter_rollouts(self, step: int | None = None, split: str | None = None) -> Iterator[Record]:
        """Like `rollouts`, one at a time."""
        for record in self._room("rollouts"):
            if (step is None or record.get("step") == step) and (
                split is None or record.get("split") == split
            ):
                yield record

    def tokens(self, rollout_record: Mapping[str, Any]) -> TokenColumns:
        """The token columns of a record from `rollouts`. Raises RecordError where missing or damaged."""
        where = rollout_record.get("tokens")
        if isinstance(where, Mapping):
            name, index = where.get("segment"), where.get("index")
            # The name comes from a file: only a segment's own form may become a path.
            if isinstance(name, str) and SEGMENT.fullmatch(name) and isinstance(index, int) and index >= 0:
                return read_block(self.path / "tokens", name, index)
        raise RecordError(
            f"rollout {rollout_record.get('id')!r} names no token columns",
            where=str(self.path),
            expected="a record from RunReader.rollouts",
        )

    def ledger(self) -> list[Record]:
        """The ledger's entries as given, with ``attempt``, ``process`` and ``t`` where they had none."""
        return self._entries("ledger")

    def evals(self) -> list[Record]:
        """Evaluation entries as they were given, like `ledger`."""
        return self._entries("evals")

    def checkpoints(self) -> list[CheckpointEntry]:
        """Checkpoint folders by step."""
        return sorted(
            CheckpointEntry(int(folder.name), folder, (folder / COMMITTED).is_file())
            for folder in self._listing("checkpoints")
            if re.fullmatch(r"[0-9]+", folder.name) and folder.is_dir()
        )

    def series(self, name: str, x: Axis = "step") -> list[tuple[float, float]]:
        """One metric over one clock, oldest first, without what a restart undid.

        A later attempt supersedes the earlier ones from the first step it reports on,
        because it went back to before that step. Over ``step`` and ``version`` there is
        one point per x, the last said; over the clocks every point stays.
        """
        records = self.metrics([name])
        undone_from: dict[int, float] = {}
        first: dict[int, float] = {}
        for record in records:
            step = _number(record.get("step"))
            if step is not None:
                first[record["attempt"]] = min(step, first.get(record["attempt"], step))
        for attempt in first:
            undone_from[attempt] = min((s for a, s in first.items() if a > attempt), default=float("inf"))
        points: list[tuple[float, float]] = []
        for record in records:
            step, at, value = (
                _number(v) for v in (record.get("step"), record.get(x), record["values"][name])
            )
            if at is None or value is None or (step is not None and step >= undone_from[record["attempt"]]):
                continue
            points.append((at, value))
        return sorted(dict(points).items()) if x in ("step", "version") else points

    def stream(self, stream: Stream) -> Iterator[Record]:
        """Every record of one stream as written, of all processes and attempts."""
        for part in self.stream_files(stream):
            yield from self._read(part)

    def stream_files(self, stream: Stream) -> list[SegmentFile]:
        found: list[SegmentFile] = []
        for process in self._listing("events"):
            for path in _list(process):
                match = STREAM_FILE.fullmatch(path.name)
                if match and match[1] == stream:
                    found.append(SegmentFile(int(match[2]), process.name, path))
        return sorted(found, key=_order)

    def _room(self, room: Room) -> Iterator[Record]:
        found = [
            SegmentFile(int(match[1]), match[2] or CONTROLLER, path)
            for path in self._listing(room)
            if path.suffix == ".jsonl" and (match := SEGMENT.fullmatch(path.stem))
        ]
        for part in sorted(found, key=_order):
            yield from self._read(part)

    def _read(self, part: SegmentFile) -> Iterator[Record]:
        for record in read_lines(part.path, self.skipped):
            yield {**record, "attempt": part.attempt, "process": part.process}

    def _entries(self, room: Room) -> list[Record]:
        found: list[Record] = []
        for record in self._room(room):
            entry = record.get("entry")
            if isinstance(entry, dict):
                found.append({key: record.get(key) for key in ("attempt", "process", "t")} | entry)
            else:
                self.skipped[str(self.path / room)] += 1
        return found

    def _listing(self, name: str) -> list[Path]:
        return _list(self.path / name)


def _list(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RecordError(
            f"records could not be listed: {error.strerror or error}", where=str(folder),
            expected="a folder this user may read",
        ) from error  # fmt: skip


def _order(part: SegmentFile) -> tuple[int, bool, str]:
    return part.attempt, part.process != CONTROLLER, part.process


def _json(path: Path) -> Record:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _seconds(opened: Record, closed: Record) -> float | None:
    start, end = _number(opened.get("m")), _number(closed.get("m"))
    return None if start is None or end is None else max(0.0, end - start)
