"""The cache of fetched and converted models: what is under a final name is whole.

A folder is built under a temporary sibling name, written through to disk and then
renamed, so a process killed at any instant leaves the old state or the new one.
Builders of one name hold a lock that the kernel releases when they die; readers
take none. Temporary folders of dead builders are removed by the next builder.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from palestra.errors import ModelSourceError

LOCK_WAIT_S = 1800.0
"""How long to wait for another process that prepares the same model (a slow download)."""
_POLL_S = 0.1

Say = Callable[[str], None]


def default_cache() -> Path:
    """``$PALESTRA_CACHE``, else ``~/.cache/palestra``."""
    named = os.environ.get("PALESTRA_CACHE")
    return (Path(named) if named else Path("~/.cache/palestra")).expanduser().absolute()


def slug(*parts: str) -> str:
    """A file name for a source: parts joined by ``--``, unusual characters replaced."""
    return "--".join(re.sub(r"[^A-Za-z0-9._+-]", "_", part).lstrip(".") for part in parts)


@contextmanager
def building(final: Path, say: Say, *, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """Hold the builder's lock of ``final``; on entry the leftovers of dead builders are removed.

    Raises ModelSourceError if the cache cannot be written or the lock is not free in ``wait_s``.
    """
    lock = final.parent / f".{final.name}.lock"
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        handle = open(lock, "a")  # noqa: SIM115 - closed below; closing is what releases the lock
    except OSError as error:
        raise cache_unwritable(final.parent, error) from error
    try:
        _acquire(handle.fileno(), final, say, wait_s)
        for leftover in final.parent.glob(f".{final.name}.*.building"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield
    finally:
        handle.close()


def build_folder(final: Path, fill: Callable[[Path], None]) -> None:
    """Replace ``final`` by what ``fill`` writes into an empty folder. Call it inside `building`.

    If ``fill`` raises, ``final`` is untouched and nothing is left behind.
    """
    temporary = final.parent / f".{final.name}.{os.getpid()}.building"
    try:
        temporary.mkdir()
        fill(temporary)
        for path in temporary.iterdir():
            _sync(path)
        _sync(temporary)
        if final.exists():
            final.rename(final.parent / f".{final.name}.{os.getpid()}.old.building")
        temporary.rename(final)
        _sync(final.parent)
    except OSError as error:
        raise cache_unwritable(final.parent, error) from error
    finally:
        for leftover in final.parent.glob(f".{final.name}.{os.getpid()}.*building"):
            shutil.rmtree(leftover, ignore_errors=True)


def cache_unwritable(folder: Path, error: OSError) -> ModelSourceError:
    return ModelSourceError(
        f"the model cache cannot be written: {error.strerror or error}",
        where=str(error.filename or folder),
        expected="a writable folder with room for the model",
        next_command="PALESTRA_CACHE=/another/folder palestra ...",
    )


def _acquire(descriptor: int, final: Path, say: Say, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise ModelSourceError(
                    f"another process has been preparing {final.name} for more than {wait_s:.0f} s",
                    where=str(final.parent),
                    expected="that process to finish, or to be ended",
                ) from error
        if not told:
            say(f"waiting for another process that prepares {final.name}")
            told = True
        time.sleep(_POLL_S)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
