"""The launcher as palestra's event loop sees it: start, kill, and the end of each run.

A run's `done` future resolves exactly once: with the launcher's report, or with
SandboxError when the launcher itself is gone; by then no process of the run is
left. Nothing here blocks the loop. A `Launcher` belongs to the loop it was
started in. Programs never hold the control socket.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palestra.errors import SandboxError
from palestra.sandboxes.seccomp import filter_program
from palestra.sandboxes.system import Bwrap, SandboxPython

STOP_S = 10.0
"""How long a stopping launcher may take to bury its sandboxes."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The launcher's report on a run that has ended completely."""

    wait_status: int
    exit_code: int | None
    """As bubblewrap reported it; None if the program never ran or was killed."""
    up: bool
    """Whether the sandbox's init existed."""
    error: str
    cpu_s: float


@dataclass(eq=False)
class Run:
    """A sandbox in the launcher's hands."""

    key: int
    up: asyncio.Future[None]
    done: asyncio.Future[Finished]
    killed: bool = field(default=False)


def sealed_memory(data: bytes, name: str) -> int:
    """A descriptor of read-only memory that holds ``data``, at offset 0. The caller closes it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    except OSError:
        os.close(fd)
        raise
    return fd


class Launcher:
    """Owns the launcher process. Start it with `Launcher.start`."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, errors_fd: int) -> None:
        self.loop = asyncio.get_running_loop()
        self._process = process
        self._control = control
        self._errors_fd = errors_fd
        self._runs: dict[int, Run] = {}
        self._keys = itertools.count()
        self._closed = False
        self.loop.add_reader(control, self._hear)

    @classmethod
    def start(cls, bwrap: Bwrap, python: SandboxPython) -> Launcher:
        """Start the process, in the running loop. Raises IsolationUnavailable or SandboxError."""
        filter_fd = sealed_memory(filter_program(), "filter")
        errors_fd = os.memfd_create("launcher-errors", os.MFD_CLOEXEC)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        script = Path(__file__).with_name("launcher.py")
        # No environment of ours reaches it, except what a Python may need to find its library.
        environment = {k: v for k, v in os.environ.items() if k == "LD_LIBRARY_PATH"}
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", str(script),
                 str(os.getpid()), str(theirs.fileno()), str(filter_fd),
                 str(bwrap.binary), str(bwrap.library or "-"), str(python.prefix or "-")],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors_fd,
                env=environment, pass_fds=(theirs.fileno(), filter_fd), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            ours.close()
            os.close(errors_fd)
            raise SandboxError(f"the sandbox launcher could not be started: {error}") from error
        finally:
            theirs.close()
            os.close(filter_fd)
        return cls(process, ours, errors_fd)

    @property
    def alive(self) -> bool:
        return not self._closed

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, request: Mapping[str, Any], fds: Sequence[int]) -> Run:
        """Start a sandbox with ``fds`` (stdin, stdout, stderr, source?); the caller closes its copies."""
        if self._closed:
            raise SandboxError("the sandbox launcher is gone", detail=self._errors())
        key = next(self._keys)
        body = sealed_memory(json.dumps(request).encode(), "request")
        run = Run(key, self.loop.create_future(), self.loop.create_future())
        try:
            socket.send_fds(self._control, [b"R%d" % key], [body, *fds])
        except OSError as error:
            raise SandboxError(
                f"the sandbox launcher took no request: {error}", detail=self._errors()
            ) from error
        finally:
            os.close(body)
        self._runs[key] = run
        return run

    def kill(self, run: Run) -> None:
        """Kill everything of the run; ``run.done`` follows. Killing twice is harmless."""
        if run.killed or run.done.done():
            return
        run.killed = True
        try:
            self._control.send(b"K%d" % run.key)
        except OSError as error:
            self._lost(f"the sandbox launcher took no kill: {error}")

    async def close(self) -> None:
        """Kill what runs, wait until it is gone, and end the process. May be called twice."""
        if not self._closed:
            self._lost("the sandbox host was closed")
        try:
            await asyncio.wait_for(asyncio.to_thread(self._process.wait), STOP_S)
        except TimeoutError:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        if self._errors_fd >= 0:
            os.close(self._errors_fd)
            self._errors_fd = -1

    def discard(self) -> None:
        """`close`, for a launcher that died or whose event loop is gone; blocks for milliseconds."""
        if not self._closed:
            self._lost("the event loop of this sandbox has ended")
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._errors_fd)
        self._errors_fd = -1

    def _hear(self) -> None:
        while True:
            try:
                data = self._control.recv(65536)
            except BlockingIOError:
                return
            except OSError as error:
                self._lost(f"the sandbox launcher failed: {error}")
                return
            if not data:
                self._lost("the sandbox launcher died")
                return
            self._note(json.loads(data))

    def _note(self, message: dict[str, Any]) -> None:
        run = self._runs[message["id"]]
        if message["event"] == "up":
            if not run.up.done():
                run.up.set_result(None)
            return
        del self._runs[run.key]
        if not run.done.done():
            run.done.set_result(
                Finished(
                    wait_status=message["wait_status"],
                    exit_code=message["exit_code"],
                    up=message["up"],
                    error=message["error"],
                    cpu_s=message["cpu_s"],
                )
            )

    def _lost(self, reason: str) -> None:
        """Without its control socket the launcher kills everything and exits."""
        self._closed = True
        if not self.loop.is_closed():
            self.loop.remove_reader(self._control)
        self._control.close()
        for run in self._runs.values():
            if not run.done.done():
                run.done.set_exception(SandboxError(reason, detail=self._errors()))
                run.done.exception()  # retrieved: nobody may be waiting any more
        self._runs.clear()

    def _errors(self) -> str:
        if self._errors_fd < 0:
            return ""
        return os.pread(self._errors_fd, 65536, 0).decode(errors="replace")
