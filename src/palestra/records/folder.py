"""The run directory: one folder is one run, and one process at a time owns it.

`RunFolder.open` never adopts a folder that is not a run and never reads one of a
newer schema. The lock is the kernel's (flock), so it ends with its holder however
that dies, and a forked child does not keep it. Each start of the run is an attempt
with its own configuration and its own files; earlier attempts are never written
again. ``run.json`` changes by rename only: a reader sees the old or the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palestra.errors import RecordError, nearest
from palestra.records import heartbeat
from palestra.records.files import disk_error, replace
from palestra.records.schema import (
    ATTEMPT_DIR,
    HEARTBEAT,
    RUN_JSON,
    RUN_LOCK,
    SCHEMA,
    STATUSES,
    encode,
    jsonable,
)

_FIXED = frozenset({"schema", "id", "created", "attempt", "attempts", "owner"})
_held: weakref.WeakSet[RunFolder] = weakref.WeakSet()


class NewerSchemaError(RecordError):
    """The run was written by a newer palestra than this one."""


class RunFolder:
    """One run's folder, opened. Reading needs no lock; `begin_attempt` takes it."""

    def __init__(self, path: Path, info: dict[str, Any]) -> None:
        """Use `RunFolder.open`."""
        self.path = path
        self._info = info
        self._lock_fd = -1
        self._attempt = int(info.get("attempt", 0))
        self._beat: heartbeat.Heartbeat | None = None
        self._guard = threading.RLock()

    @classmethod
    def open(cls, path: Path, *, create: bool) -> RunFolder:
        """The run in ``path``. With ``create``, a missing or empty folder becomes one.

        Raises RecordError for an unknown run, a folder that holds something else,
        a newer schema, or a disk that refuses.
        """
        path = Path(os.path.abspath(path))
        if (path / RUN_JSON).is_file():
            return cls(path, read_info(path))
        if not create:
            raise unknown_run(path)
        _require_ours(path)
        info = {"schema": SCHEMA, "id": path.name, "name": path.name, "created": time.time(),
                "status": "new", "status_reason": "", "attempt": 0, "attempts": []}  # fmt: skip
        try:
            path.mkdir(parents=True, exist_ok=True)
            replace(path / RUN_JSON, encode(info))
        except OSError as error:
            raise disk_error("creating the run's folder", path, error, started=False) from error
        return cls(path, info)

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    @property
    def attempt(self) -> int:
        """The attempt begun here, or else the last one of the run; 0 before the first."""
        return self._attempt

    @property
    def info(self) -> dict[str, Any]:
        """A copy of ``run.json`` as this object last read or wrote it."""
        with self._guard:
            return dict(self._info)

    def update(self, **fields: Any) -> None:
        """Set fields of ``run.json``, durably. Raises RecordError; then the old file stands."""
        fixed = _FIXED.intersection(fields)
        if fixed:
            raise RecordError(f"{', '.join(sorted(fixed))} of a run cannot be changed", where=str(self.path))
        self._write(fields)

    def set_status(self, status: str, reason: str = "") -> None:
        """Record how the run stands. Anything but ``running`` ends the heartbeats."""
        if status not in STATUSES:
            raise RecordError(
                f"unknown run status {status!r}",
                expected=", ".join(STATUSES),
                nearest=nearest(status, STATUSES),
            )
        fields: dict[str, Any] = {"status": status, "status_reason": reason}
        if status != "running":
            self._stop_heart()
            fields["ended"] = time.time()
        self._write(fields)

    def _write(self, fields: Mapping[str, Any]) -> None:
        with self._guard:
            info = {**read_info(self.path), **jsonable(fields)}
            try:
                replace(self.path / RUN_JSON, encode(info))
            except OSError as error:
                raise disk_error("updating run.json", self.path / RUN_JSON, error) from error
            self._info = info

    def lock(self) -> None:
        """Own the run until `unlock` or the end of this process. Raises RecordError if another one does."""
        with self._guard:
            if self._lock_fd >= 0:
                return
            path = self.path / RUN_LOCK
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise disk_error("locking the run", path, error) from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, encode({**heartbeat.owner(), "since": time.time()}), 0)
            except BlockingIOError as error:
                os.close(descriptor)
                raise self._held_by_another(path) from error
            except OSError as error:
                os.close(descriptor)
                raise disk_error("locking the run", path, error) from error
            self._lock_fd = descriptor
            _held.add(self)

    def _held_by_another(self, path: Path) -> RecordError:
        holder = heartbeat.read_beat(path) or {}
        pid, host = holder.get("pid", "unknown"), holder.get("host", "this machine")
        since = holder.get("since")
        text = time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(since)) if since else ""
        return RecordError(
            f"run {self.path.name!r} is in use by process {pid} on {host}{text}",
            where=str(self.path),
            expected="one process per run: wait for that one, stop it, or give this run another name",
            next_command=f"palestra runs show {self.path.name}",
        )

    def unlock(self) -> None:
        """Give the run up. Does nothing where it is not held."""
        with self._guard:
            self._stop_heart()
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
                self._lock_fd = -1
                _held.discard(self)

    def begin_attempt(
        self, launch: Mapping[str, Any], resolved: Mapping[str, Any], provenance: Mapping[str, Any]
    ) -> int:
        """Open the next attempt, own the run and start its heartbeats; returns its number, from 1.

        After a RecordError the run is as before, but for a lock this call may have taken.
        """
        with self._guard:
            self.lock()
            try:
                attempt = self._next_attempt()
                self._write_config(
                    attempt, {"launch": launch, "resolved": resolved, "provenance": provenance}
                )
                (self.path / "logs" / f"attempt_{attempt}").mkdir(parents=True, exist_ok=True)
                self.checkpoints_dir.mkdir(exist_ok=True)
                self._stop_heart()
                beat = heartbeat.Heartbeat(self.path / HEARTBEAT, attempt)
                beat.start()
            except OSError as error:
                raise disk_error("beginning an attempt", self.path, error) from error
            self._beat = beat
            started = {"attempt": attempt, "started": time.time()}
            self._write(
                {"attempt": attempt, "attempts": [*self._info.get("attempts", []), started], "ended": None,
                 "owner": heartbeat.owner(), "status": "running", "status_reason": ""}
            )  # fmt: skip
            self._attempt = attempt
            return attempt

    def _next_attempt(self) -> int:
        """One more than any attempt that left a trace, even one killed before it was announced."""
        for rubbish in [*self.path.glob(f".{RUN_JSON}.*.tmp"), *(self.path / "config").glob(".attempt_*")]:
            if rubbish.is_dir():
                shutil.rmtree(rubbish)
            else:
                rubbish.unlink(missing_ok=True)
        found = [
            int(match[1])
            for folder in (self.path / "config").glob("*")
            if (match := ATTEMPT_DIR.fullmatch(folder.name))
        ]
        return max([0, int(read_info(self.path).get("attempt", 0)), *found]) + 1

    def _write_config(self, attempt: int, parts: Mapping[str, Mapping[str, Any]]) -> None:
        draft = self.path / "config" / f".attempt_{attempt}"
        draft.mkdir(parents=True)
        for name, content in parts.items():
            text = json.dumps(jsonable(content), indent=1, ensure_ascii=False, allow_nan=False)
            replace(draft / f"{name}.json", text.encode("utf-8", "backslashreplace") + b"\n")
        draft.rename(draft.with_name(f"attempt_{attempt}"))

    def _stop_heart(self) -> None:
        if self._beat is not None:
            self._beat.stop()
            self._beat = None

    def _forget_lock(self) -> None:
        """In a forked child: let go of the inherited descriptor without unlocking the parent's lock."""
        if self._lock_fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._lock_fd)
            self._lock_fd = -1
        self._beat = None


def _after_fork() -> None:
    for folder in list(_held):
        folder._forget_lock()
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)


def read_info(path: Path) -> dict[str, Any]:
    """``run.json`` of the run in ``path``. Raises RecordError if unreadable or of a newer schema."""
    file = path / RUN_JSON
    try:
        info = json.loads(file.read_bytes())
        schema = int(info["schema"])
        if schema <= SCHEMA:
            _ = float(info["created"]) + int(info.get("attempt") or 0)
    except OSError as error:
        raise disk_error("reading run.json", file, error) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecordError(
            "run.json is damaged",
            where=str(file),
            expected="a JSON object with its schema, as the run wrote it",
            detail=str(error),
        ) from error
    if schema > SCHEMA:
        raise NewerSchemaError(
            f"this run was written by a newer palestra (schema {schema})",
            where=str(path),
            expected=f"schema {SCHEMA} or older",
            next_command="pip install --upgrade palestra",
        )
    return info


def unknown_run(path: Path) -> RecordError:
    """The error for a run that is not there, naming the nearest one beside it."""
    parent = path.parent
    names = sorted(p.parent.name for p in parent.glob(f"*/{RUN_JSON}")) if parent.is_dir() else []
    what = (
        f"there is no run {path.name!r}"
        if not path.exists()
        else f"{path.name!r} is not a run: it has no run.json"
    )
    return RecordError(
        what,
        where=str(parent),
        expected=f"one of the {len(names)} runs there" if names else "a folder that holds a run",
        nearest=nearest(path.name, names),
        next_command="palestra runs list",
    )


def _require_ours(path: Path) -> None:
    """Refuse to make a run of something that already is something else."""
    if not path.exists():
        return
    if not path.is_dir():
        raise RecordError(f"{path.name!r} is a file", where=str(path), expected="a folder for the run")
    try:
        foreign = sorted(p.name for p in path.iterdir() if not _own_name(p.name))
    except OSError as error:
        raise disk_error("opening the run's folder", path, error) from error
    if foreign:
        raise RecordError(
            f"the folder {path.name!r} is not empty and is not a run: it holds {', '.join(foreign[:3])}"
            + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""),
            where=str(path),
            expected="a new or empty folder, or one with a run.json",
        )


def _own_name(name: str) -> bool:
    """Names a run leaves that was killed while it was created."""
    return name in (RUN_LOCK, HEARTBEAT) or (name.startswith(f".{RUN_JSON}.") and name.endswith(".tmp"))
