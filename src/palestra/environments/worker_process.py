"""The inside of a reward worker: a process that runs user code for `palestra.environments.worker`.

Started as ``python -m palestra.environments.worker_process FD PARENT``. It talks
length-prefixed pickles over the socket FD and nothing else writes there: what
user code prints goes to standard error. Whatever user code does (raise, exit,
return something that cannot be pickled) becomes an answer; only death does not.
It dies with its parent. It imports nothing that is slow to import.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import io
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import Any, Literal, TypeVar

import cloudpickle

_K = TypeVar("_K")
_V = TypeVar("_V")
HEADER = struct.Struct("!Q")
_PR_SET_PDEATHSIG = 1
KEPT = 32
"""How many functions a worker, and the process that sends them, remember: the last ones used."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message a worker gets."""

    path: tuple[str, ...]
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Load:
    """Keep this pickled function under ``key``."""

    key: int
    function: bytes


@dataclass(frozen=True, slots=True)
class Call:
    """Call the function under ``key`` with these pickled arguments."""

    key: int
    arguments: bytes


@dataclass(frozen=True, slots=True)
class Done:
    """It worked; ``value`` is the pickled result of a call, empty after a load."""

    value: bytes = b""


@dataclass(frozen=True, slots=True)
class Failed:
    """It raised: one line, where, and the whole traceback of this side."""

    summary: str
    where: str
    trace: str


class _Outcome:
    """Context manager that keeps whatever leaves it, SystemExit and KeyboardInterrupt included."""

    def __init__(self) -> None:
        self.failure: Failed | None = None

    def __enter__(self) -> _Outcome:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[True]:
        if error is not None:
            inner = trace  # what the user wrote begins behind this file's own frames
            while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
                inner = inner.tb_next
            inner = inner or trace
            frames = traceback.extract_tb(inner)
            where = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
            whole = traceback.TracebackException(type(error), error, inner)  # survives a broken __str__
            summary = ": ".join(part for part in (type(error).__name__, str(whole)) if part)
            self.failure = Failed(summary, where, "".join(whole.format()))
        return True


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    _die_with_parent(int(sys.argv[2]))
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what it printed before it is killed is seen
    setup = receive(connection)
    if setup is None:
        return
    sys.path[:] = setup.path
    if setup.memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (setup.memory_bytes, setup.memory_bytes))
    send(connection, Done())
    functions: dict[int, Callable[..., object]] = {}
    while (message := receive(connection)) is not None:
        answer: Done | Failed = Done()
        with _Outcome() as outcome:
            answer = _answer(message, functions)
        with contextlib.suppress(ValueError, OSError):  # user code may close them
            sys.stdout.flush()
            sys.stderr.flush()
        send(connection, outcome.failure or answer)


def _answer(message: Load | Call, functions: dict[int, Callable[..., object]]) -> Done:
    if isinstance(message, Load):
        keep_last(functions, message.key, pickle.loads(message.function))
        return Done()
    function = keep_last(functions, message.key, functions[message.key])
    value = function(*pickle.loads(message.arguments))
    if inspect.iscoroutine(value):
        value.close()
        raise TypeError("it returned a coroutine: declare it with async def, or await inside")
    return Done(cloudpickle.dumps(value))


def keep_last(kept: dict[_K, _V], key: _K, value: _V) -> _V:
    """Note that ``key`` was used; what was used longest ago is forgotten. Both sides do the same."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > KEPT:
        del kept[next(iter(kept))]
    return value


def code_in_file(file: str, make: Callable[..., CodeType], arguments: tuple[Any, ...]) -> CodeType:
    """The code object that ``make`` makes, with the file it came from: how tracebacks find the source."""
    return make(*arguments).replace(co_filename=file)


def _die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent ends, however it ends; leave if it already did."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def send(connection: socket.socket, message: object) -> None:
    body = pickle.dumps(message)
    connection.sendall(HEADER.pack(len(body)) + body)


def receive(connection: socket.socket) -> Any:
    """The next message, or None when the other side is gone."""
    header = _exactly(connection, HEADER.size)
    return pickle.loads(_exactly(connection, HEADER.unpack(header)[0])) if header else None


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = connection.recv(min(count, 1 << 20))
        if not part:
            return b""
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    # Pickle must find these classes under their module's name, not under __main__.
    from palestra.environments import worker_process

    worker_process.main()
