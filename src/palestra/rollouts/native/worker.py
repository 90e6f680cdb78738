"""The one thread that owns the decode batch; everything reaches it as a command, in order.

Commands are handled between two steps, never within one. Every command that
promises an answer carries a future, and every future is settled: with its answer,
or, when the thread ends for whatever reason, with an EngineDead that holds the
traceback. A score that fails fails alone; a failed install or step ends the
thread, because what it computes with is then unknown. Nothing can be posted to a
thread that has ended. Tokens are told to whoever listens before the answer is.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import torch

from palestra.errors import EngineError, PalestraError, boundary
from palestra.rollouts.base import EngineDead, OnToken, PauseMode
from palestra.rollouts.native.adapters import Adapter
from palestra.rollouts.native.batch import DecodeBatch
from palestra.rollouts.native.rows import Row
from palestra.rollouts.native.threads import limit_this_thread
from palestra.rollouts.native.weights import Weights
from palestra.types import Boundary, Completion, SamplingParams, Version

REST_S = 0.5
"""Seconds without work after which the cache is given back: the trainer's step begins about then."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Rows that enter together, in this order."""

    rows: tuple[tuple[Row, Future[Completion]], ...]
    listeners: tuple[tuple[Row, Listener], ...] = ()


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
class LoadAdapter:
    key: str
    adapter: Adapter
    replaces: str
    """The key of an earlier load, to be forgotten once nobody uses it; or empty."""


@dataclass(frozen=True, slots=True)
class DropAdapter:
    key: str


@dataclass(frozen=True, slots=True)
class Pause:
    mode: PauseMode
    answer: Future[None]


@dataclass(frozen=True, slots=True)
class Resume:
    pass


@dataclass(frozen=True, slots=True)
class Abort:
    """End every row, waiting ones too."""

    answer: Future[None]


@dataclass(frozen=True, slots=True)
class Close:
    pass


Quick = Submit | Cancel | LoadAdapter | DropAdapter | Pause | Resume | Abort
Command = Quick | Score | Install | Close


@dataclass(slots=True)
class Listener:
    """Who hears a row's tokens, on which event loop, and how many it has heard."""

    on_token: OnToken
    loop: asyncio.AbstractEventLoop
    heard: int = 0


class DecodeWorker:
    """Runs a `DecodeBatch` in a thread of its own."""

    def __init__(self, batch: DecodeBatch, *, threads: int) -> None:
        self.busy_s = 0.0
        self._batch = batch
        self._threads = threads
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._futures: dict[Row, Future[Completion]] = {}
        self._listeners: dict[Row, Listener] = {}
        self._paused = False
        self._draining: list[Future[None]] = []
        self._stale: set[str] = set()
        """Adapters to forget as soon as no row uses them."""
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
        reason: EngineError = EngineDead("the decode thread ended without a reason")
        try:
            with boundary(Boundary.ENGINE, "the decode thread"):
                limit_this_thread(self._threads)
                with torch.inference_mode():
                    self._run()
            reason = EngineError("the engine was closed")
        except PalestraError as error:
            reason = _dead(error)
        finally:
            self._end(reason)

    def _run(self) -> None:
        while True:
            command = self._next(wait=not self._active)
            while command is not None:
                if isinstance(command, Close):
                    return
                self._handle(command)
                command = self._next()
            self._settle(self._batch.take_ended())
            if self._active:
                start = time.perf_counter()
                ended = self._batch.step()
                self.busy_s += time.perf_counter() - start
                self._tell()
                self._settle(ended)
            if self._draining and not self._batch.running:
                self._hold()

    @property
    def _active(self) -> bool:
        return self._batch.busy and not self._paused

    def _next(self, *, wait: bool = False) -> Command | None:
        """The next command. One at a time: whatever ends the thread, the others are still in the queue."""
        try:
            return self._commands.get(block=wait, timeout=REST_S if wait else None)
        except Empty:
            if not wait:
                return None
        self._batch.rest()
        return self._commands.get()

    def _handle(self, command: Quick | Score | Install) -> None:
        match command:
            case Submit(rows, listeners):
                self._futures.update(rows)
                self._listeners.update(listeners)
                self._batch.submit([row for row, _ in rows])
            case Cancel(row):
                self._futures.pop(row, None)
                self._listeners.pop(row, None)
                self._batch.cancel(row)
            case Score(token_ids, sampling, answer):
                _answer(answer, "scoring", lambda: self._batch.score(token_ids, sampling))
            case Install(weights, version, answer):
                doing = f"installing {version}"
                failure = _answer(answer, doing, lambda: self._batch.install(weights, version))
                if failure is not None:
                    raise failure
            case LoadAdapter(key, adapter, replaces):
                self._batch.adapters[key] = adapter
                self._stale |= {replaces} - {""}
            case DropAdapter(key):
                self._stale.add(key)
            case Pause(mode, answer):
                self._pause(mode, answer)
            case Resume():
                self._paused, self._batch.admitting = False, True
                self._release_drainers()
            case Abort(answer):
                failure = _answer(answer, "ending every request", self._abort_all)
                if failure is not None:
                    raise failure
        self._forget_stale()

    def _abort_all(self) -> None:
        self._batch.abort(waiting=True)
        self._settle(self._batch.take_ended())

    def _pause(self, mode: PauseMode, answer: Future[None]) -> None:
        self._batch.admitting = False
        self._draining.append(answer)
        if mode == "abort":
            self._batch.abort(waiting=False)
        if mode == "keep" or self._paused:  # what is held already cannot drain
            self._hold()

    def _hold(self) -> None:
        """Nothing is computed from here on until a resume."""
        self._paused = True
        self._release_drainers()

    def _release_drainers(self) -> None:
        for answer in self._draining:
            _answer(answer, "pausing", lambda: None)
        self._draining.clear()

    def _forget_stale(self) -> None:
        for key in tuple(self._stale):
            self._batch.forget_adapter(key)
        self._stale &= self._batch.adapters.keys()

    def _tell(self) -> None:
        """Hand each listener's new tokens to its event loop, where they come before the row's answer."""
        for row, listener in self._listeners.items():
            fresh = slice(listener.heard, None)
            news = list(zip(row.tokens[fresh], row.logprobs[fresh], row.versions[fresh], strict=True))
            if news:
                listener.heard += len(news)
                with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                    listener.loop.call_soon_threadsafe(_hear, listener.on_token, news)

    def _settle(self, rows: list[Row]) -> None:
        if rows:
            self._forget_stale()
        for row in rows:
            self._listeners.pop(row, None)
            future = self._futures.pop(row, None)  # none: it was cancelled after it had ended
            if future is None or not future.set_running_or_notify_cancel():
                continue
            if isinstance(row.outcome, Completion):
                future.set_result(row.outcome)
            elif row.outcome is not None:
                future.set_exception(row.outcome)

    def _end(self, reason: EngineError) -> None:
        with self._lock:
            self._ended = reason
        while (command := self._next()) is not None:
            if isinstance(command, Submit):
                self._futures.update(command.rows)
            elif isinstance(command, Score | Install | Pause | Abort):
                _refuse(command.answer, reason)
        for answer in self._draining:
            _refuse(answer, reason)
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


def _hear(on_token: OnToken, news: list[tuple[int, float, int]]) -> None:
    for token, logprob, version in news:
        on_token(token, logprob, version)


def _dead(error: PalestraError) -> EngineError:
    return _copied(error, EngineDead)


def _again(error: PalestraError) -> EngineError:
    """The same message as an exception of its own: tracebacks of waiters must not pile up on one object."""
    return _copied(error, type(error) if isinstance(error, EngineError) else EngineError)


def _copied(error: PalestraError, kind: type[EngineError]) -> EngineError:
    return kind(
        error.what,
        where=error.where,
        expected=error.expected,
        nearest=error.nearest,
        next_command=error.next_command,
        detail=error.detail,
    )
