"""Is the process that owns a run still alive? Answered from files, on any machine.

An owner is named by process id, its start time, the machine's boot and the process
namespace, so a reused id, a reboot or another container is never mistaken for it.
Where the reader shares boot and namespace with the owner, the process table decides
at once. Anywhere else (another host, a copied folder) only the age of the heartbeat
can, and the time of the beat is in the file because copying changes file times.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

INTERVAL_S = 2.0
STALE_S = 30.0
_WIDTH = 512


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except (OSError, ValueError):
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def start_ticks(pid: int) -> str:
    """When ``pid`` started, in clock ticks since boot; '' where there is no such process."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(fields) < 20 or fields[0] in ("Z", "X"):  # a zombie no longer owns anything
        return ""
    return fields[19]


def place() -> str:
    """Names this boot of this machine and this process namespace; '' where neither is known."""
    boot, namespace = _read("/proc/sys/kernel/random/boot_id"), _link("/proc/self/ns/pid")
    return f"{boot}/{namespace}" if boot and namespace else ""


def owner() -> dict[str, Any]:
    """This process, as `trouble` can recognise it later."""
    pid = os.getpid()
    return {"pid": pid, "host": socket.gethostname(), "start": start_ticks(pid), "place": place()}


def trouble(who: Mapping[str, Any], beat: Mapping[str, Any] | None, now: float | None = None) -> str:
    """Why the owner must be gone, or '' if it is alive as far as can be told from here."""
    pid, host, here = who.get("pid"), who.get("host", "?"), place()
    if here and who.get("place") == here and isinstance(pid, int):
        return "" if start_ticks(pid) == who.get("start") else f"process {pid} on {host} is gone"
    beat_s = beat.get("t") if beat else None
    if not isinstance(beat_s, (int, float)):
        return f"process {pid} on {host} left no heartbeat"
    age_s = (time.time() if now is None else now) - beat_s
    # A beat from the future within the limit is a clock difference; beyond it, a changed clock.
    return (
        ""
        if abs(age_s) <= STALE_S
        else f"no heartbeat from process {pid} on {host} for {max(0.0, age_s):.0f} s"
    )


def read_beat(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


class Heartbeat:
    """Rewrites ``path`` in place every two seconds from a daemon thread."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._path = path
        self._content = {**owner(), "attempt": attempt}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="palestra-heartbeat", daemon=True)

    def start(self) -> None:
        """Raises OSError if the first beat cannot be written."""
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=INTERVAL_S)

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            # A missed beat is what a reader is meant to see; it must not end the run.
            with contextlib.suppress(OSError):
                self._beat()

    def _beat(self) -> None:
        text = json.dumps({"t": time.time(), **self._content})
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:  # one write of a fixed length: needs no room on a full disk, and cannot be read half
            os.pwrite(descriptor, text.ljust(_WIDTH - 1).encode() + b"\n", 0)
        finally:
            os.close(descriptor)
