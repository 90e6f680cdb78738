"""``palestra doctor``: looks at this machine, changes nothing, and says what to do next.

Each check is one function that returns what it found; a check that cannot look
says so as its finding, so one broken part never hides the others. ``fail`` means
that ``palestra quickstart`` would not run here; ``warn`` that something will be
slower, smaller or unavailable.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from palestra.cli.codes import MISSING, OK
from palestra.cli.command import Command, print_json, safe
from palestra.cli.runs import default_runs_dir
from palestra.errors import PalestraError

Status = Literal["ok", "warn", "fail"]
GIB = 2**30
MEMORY_GIB = 8
DISK_GIB = 8
"""What the quick start needs: two checkpoints of a 135M model with optimiser state, and its cache."""
EXTRAS = {
    "torch": ("torch", "numpy", "safetensors", "tokenizers", "jinja2", "xxhash", "gguf"),
    "hub": ("huggingface_hub",),
}
"""Extra -> the modules it brings. The sandbox extra is looked at by running a sandbox."""
_MEMORY_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""Below /sys/fs/cgroup, for version 2 and version 1."""
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


@dataclass(frozen=True, slots=True)
class Check:
    """One finding."""

    name: str
    status: Status
    found: str
    next: str = ""
    """The next command, where something should be done."""


def python_version() -> Check:
    """Always enough: no older Python can install or parse this package."""
    return Check("python", "ok", f"{sys.version.split()[0]} at {sys.executable}")


def extra(name: str, *, needed: bool) -> Check:
    """Whether the modules of an extra are there, without importing them."""
    missing = [module for module in EXTRAS[name] if importlib.util.find_spec(module) is None]
    if not missing:
        return Check(f"extra {name}", "ok", ", ".join(EXTRAS[name]))
    status: Status = "fail" if needed else "warn"
    purpose = "" if needed else " (only for models from the hub)"
    return Check(
        f"extra {name}", status, f"missing: {', '.join(missing)}{purpose}", f"pip install 'palestra[{name}]'"
    )


def processor() -> Check:
    count = len(os.sched_getaffinity(0))
    flags = _cpu_flags()
    shown = ", ".join(flag for flag in _FLAGS if flag in flags) or "none of " + ", ".join(_FLAGS)
    return Check("processor", "ok" if count >= 2 else "warn", f"{count} usable; vector units: {shown}")


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(flags.partition(":")[2].split())


def number_type() -> Check:
    if importlib.util.find_spec("torch") is None:
        return Check("number type", "warn", "not measured: torch is missing", "pip install 'palestra[torch]'")
    from palestra.models.dtypes import fastest_dtype

    return Check("number type", "ok", f"{fastest_dtype()} is the faster one here (measured)")


def memory(available: int | None) -> Check:
    """``available``: bytes, None where it is unknown."""
    if available is None:
        return Check("memory", "warn", "unknown: /proc/meminfo cannot be read")
    found = f"{available / GIB:.1f} GiB free"
    if available >= MEMORY_GIB * GIB:
        return Check("memory", "ok", found)
    return Check(
        "memory",
        "warn",
        f"{found}; the quick start may take {MEMORY_GIB}",
        "palestra quickstart --task expressions",
    )


def available_memory() -> int | None:
    """Bytes a process may still take: the machine's and this control group's, whichever is less."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    root = Path("/sys/fs/cgroup")
    for limit, used in _MEMORY_FILES:
        try:
            left = int((root / limit).read_text()) - int((root / used).read_text())
        except (OSError, ValueError):  # no such controller here, or "max"
            continue
        free = min(free, max(0, left))
    return free


def disk(folder: Path) -> Check:
    """Space and permission where runs would be written."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        return Check("disk", "fail", f"{place} cannot be written", "palestra quickstart --set runs_dir=DIR")
    free = shutil.disk_usage(place).free
    found = f"{free / GIB:.1f} GiB free for {folder}"
    if free >= DISK_GIB * GIB:
        return Check("disk", "ok", found)
    status: Status = "warn" if free >= GIB else "fail"
    return Check(
        "disk", status, f"{found}; the quick start may take {DISK_GIB}", "--set runs_dir=DIR on a larger disk"
    )


def sandbox() -> Check:
    """Runs a real sandbox."""
    from palestra.sandboxes.bubblewrap import BubblewrapHost

    try:
        BubblewrapHost().probe()
    except PalestraError as error:
        found = " ".join(part for part in (error.what, error.expected) if part)
        other = "palestra quickstart --task expressions runs no model-written code"
        return Check(
            "sandbox", "fail", found, f"{error.next_command}; or: {other}" if error.next_command else other
        )
    return Check("sandbox", "ok", "a program ran isolated, without network")


def model_cache() -> Check:
    from palestra.models.cache import default_cache

    folder = default_cache()
    place = folder
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        return Check("model cache", "fail", f"{folder} cannot be written", "export PALESTRA_CACHE=DIR")
    models = sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
    return Check(
        "model cache", "ok", f"{folder}: " + (", ".join(models) if models else "empty (fetched when needed)")
    )


def checks(runs_dir: Path) -> list[Check]:
    """Every finding, in the order in which to mend them."""
    looks: list[tuple[str, Callable[[], Check]]] = [
        ("python", python_version),
        ("extra torch", lambda: extra("torch", needed=True)),
        ("extra hub", lambda: extra("hub", needed=False)),
        ("processor", processor),
        ("number type", number_type),
        ("memory", lambda: memory(available_memory())),
        ("disk", lambda: disk(runs_dir)),
        ("sandbox", sandbox),
        ("model cache", model_cache),
    ]
    return [_looked(name, look) for name, look in looks]


def _looked(name: str, look: Callable[[], Check]) -> Check:
    try:
        return look()
    except (PalestraError, OSError, ImportError, RuntimeError) as error:
        return Check(name, "fail", f"could not look: {type(error).__name__}: {error}")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs-dir", type=Path, metavar="DIR", help="where runs would be kept")
    parser.add_argument(
        "--engine",
        metavar="NAME[:PYTHON]",
        help="also start this engine and compare it with the trainer: vllm",
    )


def _doctor(args: argparse.Namespace) -> int:
    found = checks(args.runs_dir or default_runs_dir())
    if args.engine:
        from palestra.cli.doctor_engine import findings

        found += findings(args.engine)
    failed = [check for check in found if check.status == "fail"]
    if args.json:
        print_json({"ok": not failed, "checks": [asdict(check) for check in found]})
        return MISSING if failed else OK
    width = max(len(check.name) for check in found)
    for check in found:
        print(safe(f"{check.status:<4}  {check.name.ljust(width)}  {' '.join(check.found.split())}"))
        if check.next and check.status != "ok":
            print(safe(f"{'':6}{'':{width}}  next: {check.next}"))
    print("\nthis machine can run the quick start: palestra quickstart" if not failed else
          f"\n{len(failed)} of {len(found)} must be mended before palestra quickstart can run")  # fmt: skip
    return MISSING if failed else OK


COMMANDS = {
    "doctor": Command("What this machine has, what is missing, and what to do about it.", _arguments, _doctor)
}
