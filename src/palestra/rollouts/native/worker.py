"""The one thread that owns the decode batch; everything reaches it as a command, in order.

Commands are handled between two steps, never within one. Every command that
promises an answer carries a future, and every future is settled: with its answer,
or, when the thread ends for whatever reason, with an EngineError that holds the
traceback. A score that fails fails alone; a failed install or step ends the
thread, because what it computes with is then unknown. Nothing can be posted to a
thread that has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import torch

from palestra.errors import EngineError, PalestraError, boundary
from palestra.rollouts.native.batch import DecodeBatch, Row
from palestra.rollouts.native.threads import limit_this_thread
from palestra.rollouts.native.weights import Weights
from palestra.types import Boundary, Completion, SamplingParams, Version

REST_S = 0.5
"""Seconds without work after which the cache is given back: the trainer's step begins about then."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Rows that enter together, in this order."""

    rows: tuple[tuple[Row, Future[Completion]], ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    row: Row


@dataclass(frozen=True, slots=True)
class Score:
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    answer: Future[tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Install:
    weights: Weights
    version: Version
    answer: Future[None]


@dataclass(frozen=True, slots=True)
class Close:
    pass


Command = Submit | Cancel | Score | Install | Close


class DecodeWorker:
    """Runs a `DecodeBatch` in a thread of its own."""

    def __init__(self, batch: DecodeBatch, *, threads: int) -> None:
        self.busy_s = 0.0
        self._batch = batch
        self._threads = threads
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._futures: dict[Row, Future[Completion]] = {}
        self._lock = threading.Lock()
        self._ended: EngineError | None = None
        self._thread = threading.Thread(target=self._main, name="palestra-decode", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Command) -> None:
        """Hand over a command; raises EngineError if the thread has ended."""
        with self._lock:
            if self._ended is not None:
                raise _again(self._ended)
            self._commands.put(command)

    def cancel(self, row: Row) -> None:
        """Free what ``row`` holds before the next step; nothing to do if the thread has ended."""
        with self._lock:
            if self._ended is None:
                self._commands.put(Cancel(row))

    def check(self) -> None:
        """Raise EngineError if the thread has ended."""
        if self._ended is not None:
            raise _again(self._ended)

    def join(self) -> None:
        """End the thread and wait for it. May be called twice."""
        with self._lock:
            if self._ended is None:
                self._commands.put(Close())
        self._thread.join()

    def _main(self) -> None:
        reason = EngineError("the decode thread ended without a reason")
        try:
            with boundary(Boundary.ENGINE, "the decode thread"):
                limit_this_thread(self._threads)
                with torch.inference_mode():
                    self._run()
            reason = EngineError("the engine was closed")
        except PalestraError as error:
            reason = error if isinstance(error, EngineError) else _again(error)
        finally:
            self._end(reason)

    def _run(self) -> None:
        while True:
            command = self._next(wait=not self._batch.busy)
            while command is not None:
                if isinstance(command, Close):
                    return
                self._handle(command)
                command = self._next()
            if self._batch.busy:
                start = time.perf_counter()
                ended = self._batch.step()
                self.busy_s += time.perf_counter() - start
                for row in ended:
                    self._settle(row)

    def _next(self, *, wait: bool = False) -> Command | None:
        """The next command. One at a time: whatever ends the thread, the others are still in the queue."""
        try:
            return self._commands.get(block=wait, timeout=REST_S if wait else None)
        except Empty:
            if not wait:
                return None
        self._batch.rest()
        return self._commands.get()

    def _handle(self, command: Submit | Cancel | Score | Install) -> None:
        match command:
            case Submit(rows):
                self._futures.update(rows)
                self._batch.submit([row for row, _ in rows])
            case Cancel(row):
                self._futures.pop(row, None)
                self._batch.cancel(row)
            case Score(token_ids, sampling, answer):
                _answer(answer, "scoring", lambda: self._batch.score(token_ids, sampling))
            case Install(weights, version, answer):
                doing = f"installing {version}"
                failure = _answer(answer, doing, lambda: self._batch.install(weights, version))
                if failure is not None:
                    raise failure

    def _settle(self, row: Row) -> None:
        future = self._futures.pop(row)
        if not future.set_running_or_notify_cancel():
            return
        if isinstance(row.outcome, Completion):
            future.set_result(row.outcome)
        else:
            future.set_exception(row.outcome)

    def _end(self, reason: EngineError) -> None:
        with self._lock:
            self._ended = reason
        while (command := self._next()) is not None:
            if isinstance(command, Submit):
                self._futures.update(command.rows)
            elif isinstance(command, Score | Install):
                _refuse(command.answer, reason)
        for future in self._futures.values():
            _refuse(future, reason)
        self._futures.clear()
        self._batch.free()


def _answer(future: Future[Any], doing: str, compute: Callable[[], object]) -> PalestraError | None:
    """Settle ``future`` with the result, or with what went wrong, which is returned too."""
    if not future.set_running_or_notify_cancel():
        return None
    try:
        with boundary(Boundary.ENGINE, doing):
            future.set_result(compute())
    except PalestraError as error:
        future.set_exception(_again(error))
        return error
    return None


def _refuse(future: Future[Any], reason: EngineError) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(_again(reason))


def _again(error: PalestraError) -> EngineError:
    """The same message as an exception of its own: tracebacks of waiters must not pile up on one object."""
    return EngineError(
        error.what,
        where=error.where,
        expected=error.expected,
        nearest=error.nearest,
        next_command=error.next_command,
        detail=error.detail,
    )
