"""Folders that do not outlive the process that made them, even one that was killed.

Each names its owner. An engine lists its weights in ``rooms`` in its home, for the guard
of its server to remove when the process is gone (`palestra.rollouts.served.child`); what
no guard saw is swept by the next engine that starts on the machine. Nothing is removed
whose owner may live: another user's, or another container's.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
ROOMS = "rooms"
_OWNER = "owner"
_PREFIX = "palestra-"


def make_folder(name: str = "", parent: Path | None = None) -> Path:
    """A new private folder that this process owns."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX + name, dir=parent))
    (folder / _OWNER).write_text(f"{os.getpid()} {_namespace()}")
    return folder


def note_room(home: Path, room: Path) -> None:
    """List ``room`` among what is removed together with ``home``."""
    with (home / ROOMS).open("a") as file:
        file.write(f"{room}\n")


def leave(folder: Path) -> None:
    """Let ``folder`` stay when this process is gone."""
    (folder / _OWNER).unlink(missing_ok=True)


def sweep() -> None:
    """Remove the folders of this user's processes that are gone."""
    for parent in (Path(tempfile.gettempdir()), SHARED_MEMORY):
        for owner in parent.glob(f"{_PREFIX}*/{_OWNER}"):
            if _is_orphan(owner):
                shutil.rmtree(owner.parent, ignore_errors=True)


def _is_orphan(owner: Path) -> bool:
    try:
        if owner.stat().st_uid != os.getuid():
            return False
        pid, namespace = owner.read_text().split(" ")
        if namespace != _namespace():
            return False
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):
        return False
    return False


def _namespace() -> str:
    """Where process numbers mean what they mean here; empty on machines without such places."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
