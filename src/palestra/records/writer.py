"""A process's record of what it does: never slows the run, never kills it.

Metrics, spans, events and rollouts go into a bounded queue and a daemon thread
writes them within a second; if it cannot (the queue is full, the disk is), they are
counted as dropped, the first reason is kept in ``degraded``, and the run goes on.
Ledger and evaluation entries are the opposite: on return they are on the disk, and
if they cannot be, that raises. One writer per process name and attempt, held by a
lock; a forked child's copy is inert. Subscribers run in the writer's thread.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from palestra.errors import PalestraError, RecordError, boundary
from palestra.records.files import AppendFile, disk_error
from palestra.records.folder import RunFolder
from palestra.records.rollouts import rollout_record
from palestra.records.schema import (
    CONTROLLER,
    PROCESS_NAME,
    Room,
    Stream,
    as_float,
    encode,
    jsonable,
    number,
    segment,
    special,
    stream_file,
    text_of,
)
from palestra.records.tokens import TokenWriter, columns_of
from palestra.types import Boundary, Trajectory

Record = dict[str, Any]
Subscriber = Callable[[Record], None]
_Entry = tuple[str, Record, Trajectory | None, int]
"""Where it goes ('' for subscribers only), the record, the rollout's trajectory, its weight in bytes."""

_CHUNK_BYTES = 1 << 20
_EVENT_RESERVE = 1 << 20
"""Room in the queue that only events may use: a flood of metrics must not hide a failure."""

_parent_span: ContextVar[str | None] = ContextVar("palestra_parent_span", default=None)
_alive: weakref.WeakSet[RunWriter] = weakref.WeakSet()


class RunWriter:
    """Writes one process's records of the folder's current attempt. Thread-safe."""

    def __init__(
        self,
        folder: RunFolder,
        process: str = CONTROLLER,
        *,
        queue_bytes: int = 64 << 20,
        interval_s: float = 0.2,
    ) -> None:
        """Raises RecordError before the first attempt, for a bad or taken name, or if the disk refuses."""
        if not PROCESS_NAME.fullmatch(process):
            raise RecordError(f"{process!r} is no process name", expected="letters, digits, '_', '-' and '.'")
        if folder.attempt < 1:
            raise RecordError(
                "the run has no attempt to record", where=str(folder.path), expected="begin_attempt"
            )
        self._root, self._attempt, self._process = folder.path, folder.attempt, process
        self._segment = segment(folder.attempt, process)
        self._limit, self._interval_s = queue_bytes, interval_s
        self._lock = threading.Lock()
        self._drained = threading.Condition(self._lock)
        self._durable_lock = threading.Lock()
        self._wake = threading.Event()
        self._queue: list[_Entry] = []
        self._queued_bytes = 0
        self._unwritten = 0
        self._dropped = self._dropped_told = 0
        self._degraded: str | None = None
        self._closing = self._inert = False
        self._spans = 0
        self._span_prefix = secrets.token_hex(3)
        self._subscribers: list[Subscriber] = []
        self._files: dict[str, AppendFile] = {}
        self._tokens: TokenWriter | None = None
        self._claim()
        self._thread = threading.Thread(target=self._run, name=f"palestra-records-{process}", daemon=True)
        self._thread.start()
        _alive.add(self)
        atexit.register(self.close)

    def _claim(self) -> None:
        path = self._stream_path("events")
        try:
            file = AppendFile(path)
        except OSError as error:
            raise disk_error("opening the records", path, error) from error
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise RecordError(
                f"another writer records as {self._process!r} in attempt {self._attempt}",
                where=str(path),
                expected="one writer per process name",
            ) from error
        self._files["events"] = file

    # -- what the run says

    @property
    def dropped(self) -> int:
        """Records lost so far, because the queue or the disk was full."""
        return self._dropped

    @property
    def degraded(self) -> str | None:
        """The first thing that went wrong, or None."""
        return self._degraded

    def metrics(self, values: Mapping[str, float], *, step: int | None, version: int | None) -> None:
        """Numbers at one moment, under all clocks. A value that is no number is kept as text and noted."""
        clean: dict[str, float | str] = {}
        for name, value in values.items():
            if type(value) is float and value - value == 0.0:  # finite: the usual case, without a call
                clean[name] = value
                continue
            converted = as_float(value)
            if converted is None:
                self._degrade(f"metric {name!r} is no number: {text_of(value)!r}")
                clean[name] = text_of(value)
            else:
                clean[name] = number(converted)
        record = self._stamp("metrics", step=step, version=version, values=clean)
        self._put("metrics", record, 200 + 64 * len(clean))

    def span(
        self, name: str, *, step: int | None = None, version: int | None = None, **attrs: Any
    ) -> RunSpan:
        """``with writer.span("train", step=3):`` - its opening is recorded at once, its end when it ends."""
        return RunSpan(self, name, step, version, jsonable(attrs))

    def event(self, kind: str, *, step: int | None = None, **fields: Any) -> None:
        """A change of state, a failure, a notice."""
        clean = jsonable(fields)
        size = 300 + sum(len(v) for v in clean.values() if isinstance(v, str))
        self._put("events", self._stamp("event", kind=kind, step=step, fields=clean), size)

    def rollout(
        self,
        trajectory: Trajectory,
        *,
        group_id: str,
        step: int | None,
        task_id: str,
        reply_text: str,
        prompt_text: str,
        split: Literal["train", "eval"],
        advantage: float | None,
    ) -> None:
        """One episode: a full line, and its token columns."""
        value = as_float(advantage)
        record = self._stamp(
            "rollout", step=step, group=group_id, task_id=task_id, split=split,
            advantage=None if value is None else number(value), prompt=prompt_text, reply=reply_text,
        )  # fmt: skip
        tokens = sum(len(turn.token_ids) for turn in trajectory.turns)
        size = 1000 + 64 * tokens + 4 * (len(reply_text) + len(prompt_text))
        self._put("rollouts", record, size, trajectory)

    def ledger(self, entry: Mapping[str, Any]) -> None:
        """Durable: on return the entry is on the disk. Raises RecordError; then it is not in the ledger."""
        self._durably("ledger", entry, "writing the ledger")

    def evaluation(self, entry: Mapping[str, Any]) -> None:
        """Durable, like `ledger`."""
        self._durably("evals", entry, "writing an evaluation")

    def subscribe(self, callback: Subscriber) -> None:
        """Call ``callback`` with every record from now on, in the writer's thread. It must be cheap.

        One that raises is dropped and noted in ``degraded``. Records are shared: read only.
        """
        with self._lock:
            self._subscribers.append(callback)

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until everything said so far is written or counted as dropped; False if that took too long."""
        if threading.current_thread() is self._thread or self._inert:
            return False
        self._wake.set()
        with self._drained:
            return self._drained.wait_for(lambda: self._unwritten == 0, timeout_s)

    def close(self) -> None:
        """Write what is queued, make it durable, and end the thread. Safe to call twice."""
        with self._lock:
            if self._closing or self._inert:
                return
            self._closing = True
        atexit.unregister(self.close)
        self._wake.set()
        self._thread.join(timeout=30.0)
        if self._thread.is_alive():  # a disk that hangs: leave the files to the thread
            self._degrade("records were still being written at close")
            return
        with self._durable_lock:
            for file in (*self._files.values(), *((self._tokens,) if self._tokens else ())):
                try:
                    file.sync()
                except OSError as error:
                    self._degrade(str(disk_error("syncing the records", self._root, error)))
                file.close()

    # -- how it gets to the disk

    def _stamp(self, type_: str, /, **fields: Any) -> Record:
        return {"type": type_, "t": time.time(), "m": time.monotonic(), **fields}

    def _put(self, target: str, record: Record, size: int, trajectory: Trajectory | None = None) -> None:
        limit = self._limit + _EVENT_RESERVE if target in ("events", "") else self._limit
        with self._lock:
            if self._closing or self._inert or self._queued_bytes + size > limit:
                self._dropped += target != ""
                return
            self._queue.append((target, record, trajectory, size))
            self._queued_bytes += size
            self._unwritten += 1
            crowded = self._queued_bytes > self._limit // 2
        if crowded:
            self._wake.set()

    def _span_id(self) -> str:
        with self._lock:
            self._spans += 1
            return f"{self._span_prefix}.{self._spans}"

    def _durably(self, room: Room, entry: Mapping[str, Any], doing: str) -> None:
        record = self._stamp("ledger" if room == "ledger" else "eval", entry=jsonable(entry))
        path = self._root / room / f"{self._segment}.jsonl"
        with self._durable_lock:
            if self._closing or self._inert:
                raise RecordError(f"{doing} failed: this writer is closed", where=str(path))
            try:
                self._file(room, path).append_durably(encode(record))
            except OSError as error:
                raise disk_error(doing, path, error) from error
        self._put("", record, 300)

    def _stream_path(self, stream: Stream) -> Path:
        return self._root / "events" / self._process / stream_file(stream, self._attempt)

    def _file(self, name: str, path: Path) -> AppendFile:
        if name not in self._files:
            self._files[name] = AppendFile(path)
        return self._files[name]

    def _run(self) -> None:
        while True:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            with self._lock:
                batch, self._queue = self._queue, []
                ending = self._closing
            self._write_batch(batch)
            if self._dropped > self._dropped_told:
                self._tell_dropped()
            with self._drained:
                self._queued_bytes -= sum(entry[3] for entry in batch)
                self._unwritten -= len(batch)
                self._drained.notify_all()
                if ending and not self._queue:
                    return

    def _write_batch(self, batch: list[_Entry]) -> None:
        for name in ("events", "metrics", "spans", "rollouts"):
            entries = [entry for entry in batch if entry[0] == name]
            while entries:
                entries = self._write_chunk(name, entries)
        for _, record, _, _ in batch:
            self._deliver(record)

    def _write_chunk(self, name: str, entries: list[_Entry]) -> list[_Entry]:
        """Write the first mebibyte of ``entries``; returns the rest. What fails is counted, never raised."""
        lines: list[bytes] = []
        size = taken = 0
        try:
            with boundary(Boundary.RECORD, f"writing {name}"):
                for _, record, trajectory, _ in entries:
                    if size >= _CHUNK_BYTES:
                        break
                    taken += 1
                    if trajectory is not None:
                        self._complete(record, trajectory)
                    lines.append(encode(record))
                    size += len(lines[-1])
                self._file(name, self._path_of(name)).append(b"".join(lines))
        except PalestraError as error:
            self._count_lost(taken, name, error)
        return entries[taken:]

    def _path_of(self, name: str) -> Path:
        if name == "rollouts":
            return self._root / "rollouts" / f"{self._segment}.jsonl"
        return self._root / "events" / self._process / f"{name}-{self._attempt}.jsonl"

    def _complete(self, record: Record, trajectory: Trajectory) -> None:
        """Write the tokens, then what the line says about them."""
        if self._tokens is None:
            self._tokens = TokenWriter(self._root / "tokens", self._segment)
        index = self._tokens.append(columns_of(trajectory, special(record["advantage"])))
        record |= rollout_record(trajectory)
        record["tokens"] = {"segment": self._segment, "index": index}

    def _count_lost(self, count: int, name: str, error: PalestraError) -> None:
        cause = error.__cause__
        if isinstance(cause, OSError):
            error = disk_error(f"writing {name}", self._root, cause)
        with self._lock:
            self._dropped += count
        self._degrade(str(error))

    def _tell_dropped(self) -> None:
        """Put the loss itself on record, as soon as the disk takes a line again."""
        count = self._dropped
        fields = {"count": count, "reason": self._degraded or "the queue was full"}
        record = self._stamp("event", kind="dropped", step=None, fields=fields)
        try:
            self._files["events"].append(encode(record))
        except OSError:
            return
        self._dropped_told = count
        self._deliver(record)

    def _deliver(self, record: Record) -> None:
        for callback in list(self._subscribers):
            try:
                with boundary(Boundary.RECORD, "a subscriber of the records"):
                    callback(record)
            # SystemExit too: rich raises it for a closed pipe, and it would end this thread alone.
            except (PalestraError, SystemExit) as error:
                self._subscribers.remove(callback)
                self._degrade(str(error) or "a subscriber of the records left")

    def _degrade(self, why: str) -> None:
        if self._degraded is None:
            self._degraded = why

    def _make_inert(self) -> None:
        self._inert = True
        self._lock = threading.Lock()
        self._durable_lock = threading.Lock()
        self._drained = threading.Condition(self._lock)
        for file in self._files.values():
            file.close()


class RunSpan:
    """One interval. Entering records its start, leaving its end and the error that ended it, if any."""

    def __init__(
        self, writer: RunWriter, name: str, step: int | None, version: int | None, attrs: Record
    ) -> None:
        self._writer = writer
        self._fields: Record = {"name": name, "step": step, "version": version, "attrs": attrs}
        self._id = ""
        self._token: Token[str | None] | None = None

    def __enter__(self) -> RunSpan:
        self._id = self._writer._span_id()
        self._say("open", parent=_parent_span.get())
        self._token = _parent_span.set(self._id)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None:
            with contextlib.suppress(
                ValueError
            ):  # left in another context than entered: it has no parent there
                _parent_span.reset(self._token)
        self._say("close", error=kind.__name__ if kind else None)

    def _say(self, phase: str, **extra: Any) -> None:
        record = self._writer._stamp("span", phase=phase, id=self._id, **self._fields, **extra)
        self._writer._put("spans", record, 400)


def _after_fork() -> None:
    for writer in list(_alive):
        writer._make_inert()


os.register_at_fork(after_in_child=_after_fork)
