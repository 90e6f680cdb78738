"""Reward functions in processes that can be killed, because user code may hang, crash or exit.

One call runs in one worker under one deadline. A worker that outlives its deadline,
dies, or whose call is cancelled is killed with everything it started and replaced;
the others never notice. Every failure is a RewardError with the remote traceback
and what the function printed; none is a number. ``close`` leaves no process, and
workers die with this process even when it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import itertools
import os
import pickle
import signal
import socket
import sys
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

import palestra
from palestra.environments import worker_process
from palestra.environments.rewards import name_of, place_of
from palestra.environments.worker_process import HEADER, Call, Done, Failed, Load, Setup, keep_last
from palestra.errors import RewardError, traceback_of

START_S = 60.0
"""Longest start of a worker, and longest unpickling (imports included) of a reward function."""
USER_MODULES = "palestra_user_"
"""Modules of this prefix were loaded from a file: no worker could import them by name."""
_TAIL_BYTES = 8192
_MAX_ANSWER_BYTES = 1 << 28


class RewardWorkers:
    """At most ``count`` processes that call functions. Used from one event loop; they start when needed."""

    def __init__(self, count: int = 2, *, memory_mb: int | None = None) -> None:
        if count < 1:
            raise ValueError(f"count must be >= 1, got {count}")
        self._memory_bytes = None if memory_mb is None else memory_mb << 20
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._places = asyncio.Semaphore(count)
        self._shipments: dict[object, _Shipment] = {}
        self._keys = itertools.count()
        self._reaping: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """The worker processes alive now."""
        return tuple(worker.pid for worker in self._all)

    async def call(self, function: Callable[..., object], *arguments: object, deadline_s: float) -> object:
        """``function(*arguments)``, computed in a worker; waiting for a free one is not counted.

        The function is pickled on its first call and kept while it is among the last KEPT:
        changes to what it closes over stay here. Raises RewardError if it raises, hangs,
        dies, or cannot be pickled.
        """
        shipment = self._shipment(function)
        packed = _pickled(arguments, f"the arguments of {name_of(function)}", function)
        async with self._places:
            if self._closed:
                raise _closed_error(function)
            worker = await self._free_worker()
            try:
                return await worker.call(shipment, packed, deadline_s)
            except RewardError as error:
                if self._closed:
                    raise _closed_error(function) from error
                raise
            finally:
                # Whoever did not come back with an answer is not asked again.
                if worker.usable and not self._closed:
                    self._idle.append(worker)
                else:
                    self._discard(worker)

    async def close(self) -> None:
        """Kill every worker and wait until it is gone; calls under way raise RewardError. May be repeated."""
        self._closed = True
        for worker in tuple(self._all):
            self._discard(worker)
        if self._reaping:
            await asyncio.wait(self._reaping)

    async def _free_worker(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            self._discard(worker)
        worker = await _Worker.spawn(Setup(tuple(sys.path), self._memory_bytes))
        self._all.add(worker)
        try:
            await worker.greet()
        finally:
            if not worker.usable:
                self._discard(worker)
        return worker

    def _discard(self, worker: _Worker) -> None:
        if worker not in self._all:
            return
        self._all.discard(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        worker.kill()
        task = asyncio.ensure_future(worker.reap())
        self._reaping.add(task)
        task.add_done_callback(self._reaping.discard)

    def _shipment(self, function: Callable[..., object]) -> _Shipment:
        try:
            key: object = (function,)
            hash(key)
        except TypeError:  # a callable that defines __eq__ only
            key = id(function)
        found = self._shipments.get(key)
        if found is None:
            found = _Shipment(next(self._keys), function, _pickled_function(function))
        return keep_last(self._shipments, key, found)


def _closed_error(function: object) -> RewardError:
    return RewardError(f"{name_of(function)} gave no verdict: the reward workers were closed")


class _Shipment:
    """A function as workers get it; holding it here keeps its identity from being reused."""

    def __init__(self, key: int, function: Callable[..., object], pickled: bytes) -> None:
        self.key = key
        self.function = function
        self.pickled = pickled


class _Worker:
    """One process. ``usable`` is false from the moment an answer is owed until it has come."""

    def __init__(
        self, process: asyncio.subprocess.Process, connection: socket.socket, stderr: int, setup: Setup
    ) -> None:
        self.pid = process.pid
        self.usable = False
        self._process = process
        self._connection = connection
        self._stderr = stderr
        self._setup = setup
        self._tail = b""
        self._loaded: dict[int, None] = {}
        self._killed = False
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @classmethod
    async def spawn(cls, setup: Setup) -> _Worker:
        ours, theirs = socket.socketpair()
        stderr_read, stderr_write = os.pipe()
        root = str(Path(palestra.__file__).parents[1])
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", worker_process.__name__, str(theirs.fileno()), str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=stderr_write,
                pass_fds=(theirs.fileno(),), env={**os.environ, "PYTHONPATH": path},
                # Its own session: Ctrl-C in the terminal is for us, and one kill reaches all it starts.
                start_new_session=True,
            )  # fmt: skip
        except BaseException:
            ours.close()
            os.close(stderr_read)
            raise
        finally:
            theirs.close()
            os.close(stderr_write)
        ours.setblocking(False)
        os.set_blocking(stderr_read, False)
        worker = cls(process, ours, stderr_read, setup)
        asyncio.get_running_loop().add_reader(stderr_read, worker._drain)
        return worker

    @property
    def alive(self) -> bool:
        return self._process.returncode is None and not self._killed

    async def greet(self) -> None:
        """Hand over the set-up; RewardError if the process does not come up."""
        self._streams = await asyncio.open_connection(sock=self._connection)
        answer = await self._ask(self._setup, START_S, "the start of a reward worker", "")
        if isinstance(answer, Failed):
            raise RewardError(f"a reward worker failed to start: {answer.summary}", detail=answer.trace)

    async def call(self, shipment: _Shipment, arguments: bytes, deadline_s: float) -> object:
        name, place = name_of(shipment.function), place_of(shipment.function)
        self._tail = b""
        if shipment.key not in self._loaded:
            answer = await self._ask(
                Load(shipment.key, shipment.pickled), START_S, f"the import of {name}", place
            )
            if isinstance(answer, Failed):
                raise self._error(
                    f"{name} cannot be loaded in a worker: {answer.summary}", place, answer.trace
                )
        keep_last(self._loaded, shipment.key, None)
        answer = await self._ask(Call(shipment.key, arguments), deadline_s, name, place)
        if isinstance(answer, Failed):
            raise self._error(f"{name} raised {answer.summary}", answer.where or place, answer.trace)
        try:
            return pickle.loads(answer.value)
        except Exception as error:
            raise self._error(
                f"{name} returned what cannot be unpickled: {error}", place, traceback_of(error)
            ) from error

    async def _ask(self, message: object, deadline_s: float, name: str, place: str) -> Done | Failed:
        """One message, one answer. After an exception the worker's state is unknown: it is not usable."""
        self.usable = False
        try:
            async with asyncio.timeout(deadline_s):
                answer = await self._exchange(message)
        except TimeoutError:
            self.kill()
            expected = "a reward that ends in time; deadlines.reward_s sets the limit"
            raise self._error(
                f"{name} did not return within {deadline_s:g} s", place, expected=expected
            ) from None
        except (EOFError, ConnectionError):
            raise self._error(f"{name} ended its worker process: {await self._death()}", place) from None
        self.usable = True
        return answer

    async def _exchange(self, message: object) -> Any:
        assert self._streams is not None
        reader, writer = self._streams
        body = pickle.dumps(message)
        writer.write(HEADER.pack(len(body)) + body)
        await writer.drain()
        size: int = HEADER.unpack(await reader.readexactly(HEADER.size))[0]
        if size > _MAX_ANSWER_BYTES:
            raise RewardError(
                f"a reward worker answered with {size} bytes", expected=f"at most {_MAX_ANSWER_BYTES}"
            )
        return pickle.loads(await reader.readexactly(size))

    async def _death(self) -> str:
        """How the process ended, in words."""
        try:
            async with asyncio.timeout(5):
                code = await self._process.wait()
        except TimeoutError:
            self.kill()
            return "it closed its connection and went on"
        if code >= 0:
            return f"it exited with code {code}"
        return f"it was killed by {signal.Signals(-code).name}"

    def _error(self, what: str, where: str, trace: str = "", *, expected: str = "") -> RewardError:
        self._drain()
        printed = self._tail.decode(errors="replace").strip()
        detail = "\n".join(part for part in (trace.rstrip(), printed and f"it printed:\n{printed}") if part)
        return RewardError(what, where=where, expected=expected, detail=detail)

    def _drain(self) -> None:
        """Take what the pipe holds now, keeping the last part of it."""
        while self._stderr >= 0:
            try:
                chunk = os.read(self._stderr, 65536)
            except BlockingIOError:
                return
            if not chunk:
                self._close_stderr()
                return
            self._tail = (self._tail + chunk)[-_TAIL_BYTES:]

    def _close_stderr(self) -> None:
        if self._stderr >= 0:
            asyncio.get_running_loop().remove_reader(self._stderr)
            os.close(self._stderr)
            self._stderr = -1

    def kill(self) -> None:
        """Kill the process and what it started, once. It is reaped by ``reap``."""
        self.usable = False
        if not self._killed:
            self._killed = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def reap(self) -> None:
        """Wait until the process is gone and give back what belonged to it."""
        await self._process.wait()
        self._close_stderr()
        if self._streams is None:
            self._connection.close()
            return
        self._streams[1].close()
        with contextlib.suppress(ConnectionError):
            await self._streams[1].wait_closed()


def _reduced_code(code: CodeType) -> tuple[Any, ...]:
    reduced: Any = cloudpickle.Pickler.dispatch_table[CodeType](code)
    make, arguments = reduced
    return worker_process.code_in_file, (code.co_filename, make, arguments)


_KNOWN: Any = cloudpickle.Pickler.dispatch_table


class _Pickler(cloudpickle.Pickler):
    """Cloudpickle forgets which file a function came from; a remote traceback has to name it."""

    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _reduced_code}, _KNOWN)


def _dumps(value: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _pickled_function(function: Callable[..., object]) -> bytes:
    for name, module in tuple(sys.modules.items()):
        if name.startswith(USER_MODULES):
            cloudpickle.register_pickle_by_value(module)
    return _pickled(function, name_of(function), function)


def _pickled(value: object, name: str, function: Callable[..., object]) -> bytes:
    try:
        return _dumps(value)
    except Exception as error:
        culprit = _culprit(function) if value is function else ""
        raise RewardError(
            f"{name} cannot be sent to a reward worker: {culprit}{type(error).__name__}: {error}",
            where=place_of(function),
            expected="a reward that uses only what can be pickled; open connections, locks and models "
            "inside it, or make it async def: that runs in this process",
            detail=traceback_of(error),
        ) from error


def _culprit(function: Callable[..., object]) -> str:
    """Which variable of a plain function is at fault, in words; '' where nothing so simple is."""
    used = inspect.getclosurevars(function) if inspect.isfunction(function) else None
    for name, value in {**used.globals, **used.nonlocals}.items() if used else ():
        try:
            _dumps(value)
        except Exception:  # noqa: BLE001 - any exception of any __reduce__ means just that
            return f"its variable {name!r} (a {type(value).__name__}): "
    return ""
