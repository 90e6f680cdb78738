"""Sandboxes by bubblewrap: one fresh set of namespaces per program, gone when exec returns.

A program runs as uid 65534 in its own user, pid, network, ipc, uts, cgroup and
mount namespaces, without capabilities, environment, network, /proc, /sys or
anything of the host but a read-only system and an empty /tmp of bounded size. On
the host it is never root: a root palestra gives each slot a user id that belongs
to nobody. Limits are set before bubblewrap starts, where the program cannot raise
them. `exec` returns only after the kernel has removed every process of the
sandbox. A program's failure is an ExecResult; only bubblewrap's or the launcher's
is a SandboxError, told apart by bubblewrap's own report on a descriptor that no
program holds. Not isolated: CPU time between sandboxes, and kernel bugs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from signal import SIGKILL, SIGXCPU
from typing import Any, TypeVar

from palestra.errors import IsolationUnavailable, SandboxError
from palestra.sandboxes.base import ExecResult, ExecStatus, SandboxSpec
from palestra.sandboxes.client import Finished, Launcher, Run, sealed_memory
from palestra.sandboxes.launcher import FILTER_FD, INSIDE_ID, LIBRARY_FD, SOURCE_FD, STATUS_FD
from palestra.sandboxes.limits import LEAST_MEMORY_MB, MIB, cpu_seconds, resource_limits, scratch_inodes
from palestra.sandboxes.probe import PROBE_SOURCE, PROBE_SPEC, Canary, judge, remedy
from palestra.sandboxes.system import Bwrap, SandboxPython, find_bwrap, find_python, system_arguments

START_S = 60.0
"""How long bubblewrap may take to create the namespaces; not counted against the program."""
KILL_S = 30.0
"""How long the kernel may take to remove a killed sandbox."""
MAIN = "/main.py"
T = TypeVar("T")


class BubblewrapHost:
    """Makes sandboxes here; at most ``concurrency`` programs run at once, further ones wait."""

    def __init__(self, concurrency: int = 4) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {concurrency}")
        self.concurrency = concurrency
        self._probed: IsolationUnavailable | bool = False
        self._probing = threading.Lock()
        self._parts: tuple[Bwrap, SandboxPython, list[str]] | None = None
        self._launcher: Launcher | None = None
        self._slots: asyncio.Queue[int] | None = None
        self._closed = False

    def probe(self) -> None:
        """Run one real sandbox (once; the verdict is kept) and raise IsolationUnavailable unless all held."""
        with self._probing:
            if self._probed is False:
                try:
                    _in_thread(lambda: _probe(self.parts()))
                    self._probed = True
                except IsolationUnavailable as error:
                    self._probed = error
        if isinstance(self._probed, IsolationUnavailable):
            raise self._probed

    @asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[BubblewrapSandbox]:
        """A sandbox for programs under ``spec``. Raises IsolationUnavailable before anything ran."""
        if spec.memory_mb < LEAST_MEMORY_MB:
            raise IsolationUnavailable(
                f"a sandbox cannot start in {spec.memory_mb} MiB",
                where="memory_mb",
                expected=f"at least {LEAST_MEMORY_MB}",
            )
        if self._probed is not True:
            await asyncio.to_thread(self.probe)
        box = BubblewrapSandbox(self, spec)
        try:
            yield box
        finally:
            await box.close()

    async def close(self) -> None:
        """Kill every program and end the launcher. May be called twice."""
        self._closed = True
        if self._launcher is not None:
            await self._launcher.close()
            self._launcher = None

    def parts(self) -> tuple[Bwrap, SandboxPython, list[str]]:
        """bubblewrap, the Python of the sandboxes, and the arguments for the system; found once."""
        if self._parts is None:
            python = find_python()
            arguments = system_arguments()
            if python.prefix is not None:
                arguments += ["--ro-bind", str(python.prefix), str(python.prefix)]
            self._parts = (find_bwrap(), python, arguments)
        return self._parts

    def launcher(self) -> Launcher:
        """The running launcher of this event loop, started where there is none."""
        if self._closed:
            raise SandboxError("the sandbox host is closed")
        current = self._launcher
        if current is None or not current.alive or current.loop is not asyncio.get_running_loop():
            if current is not None:
                current.discard()
            bwrap, python, _arguments = self.parts()
            self._launcher = current = Launcher.start(bwrap, python)
            self._slots = asyncio.Queue()
            for slot in range(self.concurrency):
                self._slots.put_nowait(slot)
        return current

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[tuple[Launcher, int]]:
        """A place to run one program; it is given back when its program is gone."""
        launcher = self.launcher()
        slots = self._slots
        assert slots is not None
        number = await slots.get()
        try:
            yield launcher, number
        finally:
            slots.put_nowait(number)


class BubblewrapSandbox:
    """One sandbox's spec and what of it runs now. Made by `BubblewrapHost.open`."""

    def __init__(self, host: BubblewrapHost, spec: SandboxSpec) -> None:
        self.spec = spec
        self._host = host
        self._execs: set[asyncio.Task[ExecResult]] = set()
        self._closed = False

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> ExecResult:
        """Run a program to its end; see the port. Exit codes 129 to 192 mean a signal, as in a shell."""
        return await self._owned(self._exec(list(argv), stdin, dict(env or {}), None))

    async def python(self, source: str, *, stdin: bytes = b"") -> ExecResult:
        """Run ``source`` as /main.py: isolated mode, no site packages, stdin its own."""
        _bwrap, python, _arguments = self._host.parts()
        argv = [python.executable, "-I", "-S", "-B", MAIN]
        # Text that is no UTF-8 becomes a SyntaxError of the program, not a failure of ours.
        data = source.encode("utf-8", "surrogatepass")
        return await self._owned(self._exec(argv, stdin, {}, data))

    async def close(self) -> None:
        """Kill what runs here. May be called twice."""
        self._closed = True
        running = list(self._execs)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    async def _owned(self, work: Coroutine[Any, Any, ExecResult]) -> ExecResult:
        """``work`` as a task that `close` can end."""
        if self._closed:
            work.close()
            raise SandboxError("this sandbox is closed")
        task = asyncio.create_task(work)
        self._execs.add(task)
        task.add_done_callback(self._execs.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if self._closed and task.cancelled() and not _being_cancelled():
                raise SandboxError("the sandbox was closed while a program ran in it") from None
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            raise

    async def _exec(
        self, argv: list[str], stdin: bytes, env: dict[str, str], source: bytes | None
    ) -> ExecResult:
        _check_program(argv, env)
        if any("\0" in text for text in argv):
            # No system starts such a program. It may be the model's text, so it is a result, not our failure.
            why = b"an argument holds a NUL character\n"
            return ExecResult(ExecStatus.EXITED, 126, None, b"", why, truncated=False, seconds=0.0)
        async with self._host.slot() as (launcher, slot):
            request = self._request(argv, env, source, slot)
            with contextlib.ExitStack() as stack:
                try:
                    fds, outputs = _open_descriptors(stack, stdin, source)
                except OSError as error:
                    raise SandboxError(f"no pipe or memory for a sandbox's streams: {error}") from error
                run = launcher.run(request, fds)
                for fd in fds:
                    os.close(fd)
                stack.pop_all()
            collector = _Collector(outputs, self.spec.output_kb * 1024, lambda: launcher.kill(run))
            try:
                return await self._await_end(launcher, run, collector, argv)
            finally:
                collector.close()
                if not run.done.done():
                    launcher.kill(run)
                    await asyncio.wait([run.done], timeout=KILL_S)

    async def _await_end(
        self, launcher: Launcher, run: Run, collector: _Collector, argv: list[str]
    ) -> ExecResult:
        await asyncio.wait([run.up, run.done], timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if not run.up.done() and not run.done.done():
            raise SandboxError(f"bubblewrap created no namespaces within {START_S:.0f} s")
        started = time.monotonic()
        await asyncio.wait([run.done], timeout=self.spec.time_s)
        timed_out = not run.done.done()
        if timed_out:
            launcher.kill(run)
            await asyncio.wait([run.done], timeout=KILL_S)
            if not run.done.done():
                raise SandboxError(f"a killed sandbox was still there after {KILL_S:.0f} s")
        seconds = time.monotonic() - started
        finished = run.done.result()
        collector.drain()
        return _result(finished, collector, self.spec, timed_out, seconds, argv)

    def _request(
        self, argv: list[str], env: Mapping[str, str], source: bytes | None, slot: int
    ) -> dict[str, Any]:
        bwrap, _python, system = self._host.parts()
        arguments = [*NAMESPACES, *system]
        if source is not None:
            arguments += ["--perms", "0444", "--file", str(SOURCE_FD), MAIN]
        arguments += ["--bind", "/tmp", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]
        arguments += ["--json-status-fd", str(STATUS_FD), "--seccomp", str(FILTER_FD)]
        if bwrap.library is not None:
            arguments += ["--block-fd", str(LIBRARY_FD)]  # reads a byte of it, and closes it
        for name, value in {**ENVIRONMENT, **env}.items():
            arguments += ["--setenv", name, value]
        return {
            "slot": slot,
            "argv": [*arguments, "--", *argv],
            "limits": resource_limits(self.spec, source_bytes=len(source or b"")),
            "scratch_bytes": self.spec.scratch_mb * MIB,
            "scratch_inodes": scratch_inodes(self.spec),
        }


ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    "LANG": "C.UTF-8",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
}
NAMESPACES = [
    "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts",
    "--unshare-cgroup-try", "--uid", str(INSIDE_ID), "--gid", str(INSIDE_ID), "--hostname", "sandbox",
    "--cap-drop", "ALL", "--new-session", "--die-with-parent", "--clearenv",
]  # fmt: skip


def _check_program(argv: list[str], env: Mapping[str, str]) -> None:
    if not argv:
        raise ValueError("exec needs a program, got an empty argv")
    if any("\0" in text for text in [*env, *env.values()]):
        raise ValueError("a program's environment cannot hold a NUL character")
    if any(not name or "=" in name for name in env):
        raise ValueError("an environment variable's name cannot be empty or hold '='")


def _open_descriptors(
    stack: contextlib.ExitStack, stdin: bytes, source: bytes | None
) -> tuple[list[int], tuple[int, int]]:
    """The program's descriptors, and our ends of its stdout and stderr; ``stack`` closes all on failure."""

    def keep(fd: int) -> int:
        stack.callback(os.close, fd)
        return fd

    fds = [keep(sealed_memory(stdin, "stdin"))]
    outputs: list[int] = []
    for _stream in ("stdout", "stderr"):
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        outputs.append(keep(read_end))
        fds.append(keep(write_end))
        os.set_blocking(read_end, False)
    if source is not None:
        fds.append(keep(sealed_memory(source, "source")))
    return fds, (outputs[0], outputs[1])


class _Collector:
    """Reads stdout and stderr as they come; never holds more than the limit, then calls ``on_limit``."""

    def __init__(self, fds: tuple[int, int], limit: int, on_limit: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._fds = {fd: bytearray() for fd in fds}
        self._open = set(fds)
        self._room = limit
        self._on_limit = on_limit
        self.stdout, self.stderr = (self._fds[fd] for fd in fds)
        self.truncated = False
        for fd in fds:
            self._loop.add_reader(fd, self._read, fd)

    def _read(self, fd: int) -> bool:
        """Whether there may be more."""
        try:
            block = os.read(fd, min(65536, self._room + 1))
        except BlockingIOError:
            return False
        if not block:
            self._shut(fd)
            return False
        self._fds[fd] += block[: self._room]
        if len(block) > self._room:
            self.truncated = True
            for other in list(self._open):
                self._shut(other)
            self._on_limit()
            return False
        self._room -= len(block)
        return True

    def drain(self) -> None:
        """Take what dead writers left in the pipes."""
        for fd in self._fds:
            while fd in self._open and self._read(fd):
                pass

    def close(self) -> None:
        for fd in list(self._open):
            self._shut(fd)

    def _shut(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        self._open.discard(fd)
        os.close(fd)


def _result(
    finished: Finished,
    collector: _Collector,
    spec: SandboxSpec,
    timed_out: bool,
    seconds: float,
    argv: list[str],
) -> ExecResult:
    code = finished.exit_code
    stdout, stderr = bytes(collector.stdout), bytes(collector.stderr)
    status, signal_number = ExecStatus.EXITED, None
    if finished.error:
        raise SandboxError(f"a sandbox could not be prepared: {finished.error}")
    if collector.truncated:
        status, code = ExecStatus.OUTPUT_LIMIT, None
    elif code is None and timed_out and finished.up:
        status = ExecStatus.TIMEOUT
    elif code is None:
        code = _code_of_missing_program(finished, stderr, argv)
    if code is not None and 128 < code <= 192:
        status, signal_number, code = ExecStatus.SIGNALED, code - 128, None
        spent = finished.cpu_s >= cpu_seconds(spec) - 0.5
        if signal_number in (SIGXCPU, SIGKILL) and spent:
            status = ExecStatus.TIMEOUT
    return ExecResult(
        status=status,
        exit_code=code,
        signal=signal_number,
        stdout=stdout,
        stderr=stderr,
        truncated=collector.truncated,
        seconds=seconds,
        cpu_seconds=finished.cpu_s,
    )


def _code_of_missing_program(finished: Finished, stderr: bytes, argv: list[str]) -> int:
    """127 or 126 if only the program could not be executed; SandboxError for everything else.

    bubblewrap reports an exit code exactly when the program ran, so without one nothing but
    bubblewrap has written to ``stderr``: its words can be trusted here, and only here.
    """
    prefix = f"bwrap: execvp {argv[0]}: ".encode("utf-8", "surrogateescape")
    exited = os.WIFEXITED(finished.wait_status)
    if finished.up and exited and stderr.startswith(prefix):
        return 127 if stderr.endswith(b"No such file or directory\n") else 126
    how = (
        f"exit code {os.WEXITSTATUS(finished.wait_status)}"
        if exited
        else f"signal {os.WTERMSIG(finished.wait_status)}"
    )
    raise SandboxError(
        f"bubblewrap failed before the program ran ({how})", detail=stderr.decode(errors="replace")
    )


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _in_thread(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The coroutine's result, from an event loop of its own: the caller may have one running."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(lambda: asyncio.run(make())).result()


async def _probe(parts: tuple[Bwrap, SandboxPython, list[str]]) -> None:
    host = BubblewrapHost(concurrency=1)
    host._parts, host._probed = parts, True
    try:
        with Canary() as canary:
            async with host.open(PROBE_SPEC) as box:
                result = await box.python(PROBE_SOURCE, stdin=canary.question())
        judge(result, parts[1].prefix)
    except IsolationUnavailable:
        raise
    except (SandboxError, OSError) as error:
        raise remedy(error) from error
    finally:
        await host.close()
