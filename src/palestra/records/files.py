"""The file operations that survive a kill and a full disk.

An `AppendFile` holds whole appends only: one that fails is cut off again, so the
next begins where the last good one ended, and a reader sees a prefix of what was
written plus at most one torn line after a kill. `replace` changes a small file in
one step: old content or new, never between. Errors of the disk become
`RecordError`s that say which path, how much room is left and how to go on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from palestra.errors import RecordError
from palestra.records.schema import decode

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def disk_error(doing: str, path: Path, error: OSError, *, started: bool = True) -> RecordError:
    """The RecordError for an ``OSError`` met while ``doing`` something to ``path``.

    Before anything was ``started`` a folder that refuses is wrong usage: another one is the way out.
    """
    why = error.strerror or str(error)
    if not started and error.errno not in _FULL:
        refused = RecordError(
            f"{doing} failed: {why}",
            where=str(path),
            expected="a folder this process may write to",
            next_command="choose another place with --runs-dir DIR; nothing was started",
        )
        refused.exit_code = 2
        return refused
    if error.errno not in _FULL:
        return RecordError(
            f"{doing} failed: {why}",
            where=str(path),
            expected="a folder this process may write to",
            next_command="mend it and run the same command: it continues where it stopped",
        )
    near = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
    return RecordError(
        f"{doing} failed: {why}",
        where=f"{path} ({shutil.disk_usage(near).free / 1e6:.1f} MB free on its disk)",
        expected="room for the run's records",
        next_command="free some space and run the same command: it continues where it stopped",
    )


def sync_folder(path: Path) -> None:
    """Make the names in ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, data: bytes) -> None:
    """Durably replace ``path``'s content in one step. Raises OSError; then the old content stands."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


class AppendFile:
    """A file that grows by whole appends. One writer; not thread-safe.

    ``lines`` files end a torn last line before the first append.
    """

    def __init__(self, path: Path, *, lines: bool = True) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._fd).st_size
        self._dirty = False
        if lines and self._size and os.pread(self._fd, 1, self._size - 1) != b"\n":
            self.append(b"\n")

    @property
    def size(self) -> int:
        """Bytes of the whole appends."""
        return self._size

    def fileno(self) -> int:
        return self._fd

    def append(self, data: bytes) -> int:
        """Append all of ``data`` and return where it begins. Raises OSError; then nothing was added."""
        start = self._size
        if self._dirty:
            self._cut()
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            self._dirty = True
            with contextlib.suppress(OSError):  # tried again before the next append
                self._cut()
            raise
        self._size = start + len(data)
        return start

    def append_durably(self, data: bytes) -> None:
        """Append and wait for the disk. Raises OSError; then nothing was added."""
        start = self.append(data)
        try:
            os.fsync(self._fd)
            if start == 0:
                sync_folder(self.path.parent)
                sync_folder(self.path.parent.parent)
        except OSError:
            self.cut_to(start)
            raise

    def cut_to(self, size: int) -> None:
        """Forget everything after ``size``; retried before the next append if the disk refuses now."""
        self._size = size
        self._dirty = True
        with contextlib.suppress(OSError):
            self._cut()

    def _cut(self) -> None:
        os.ftruncate(self._fd, self._size)
        self._dirty = False

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_lines(path: Path, skipped: Counter[str]) -> Iterator[dict[str, Any]]:
    """The records of a line file, oldest first; none where there is no file.

    A last line without its newline is being written or was torn by a kill: it is no
    record. Whole lines that do not parse are counted in ``skipped`` under the path.
    """
    try:
        with path.open("rb") as handle:
            for line in handle:
                if not line.endswith(b"\n"):
                    return
                record = decode(line)
                if record is not None:
                    yield record
                elif line.strip():
                    skipped[str(path)] += 1
    except FileNotFoundError:
        return
    except OSError as error:
        raise RecordError(
            f"records could not be read: {error.strerror or error}",
            where=str(path),
            expected="files this user may read",
        ) from error


def last_lines(path: Path, tail_bytes: int = 1 << 18) -> list[dict[str, Any]]:
    """The records among the last ``tail_bytes`` of a line file, newest first."""
    try:
        with path.open("rb") as handle:
            size = handle.seek(0, os.SEEK_END)
            handle.seek(max(0, size - tail_bytes))
            block = handle.read()
    except OSError:
        return []
    lines = block.split(b"\n")[:-1]  # what follows the last newline is torn
    if size > tail_bytes:
        lines = lines[1:]
    return [record for line in reversed(lines) if (record := decode(line)) is not None]
