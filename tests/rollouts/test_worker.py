"""The decode thread: whatever ends it, and whatever fails in it, every future is settled."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from palestra.errors import EngineError
from palestra.rollouts.base import GenerateRequest
from palestra.rollouts.native import worker as module
from palestra.rollouts.native.batch import DecodeBatch
from palestra.rollouts.native.rows import Row
from palestra.rollouts.native.stop import StopChecker
from palestra.rollouts.native.worker import Cancel, Close, DecodeWorker, Install, Score, Submit
from palestra.types import SamplingParams, Version
from rollouts.support import Tiny

SETTLED_S = 30


def make_worker(tiny: Tiny) -> DecodeWorker:
    model, weights = tiny.weights()
    batch = DecodeBatch(model, max_running=2, context=64, budget=1024)
    batch.install(weights, Version("test", 0))
    return DecodeWorker(batch, threads=1)


def submission(tokens: int = 4) -> tuple[Submit, Future[Any]]:
    sampling = SamplingParams(max_new_tokens=tokens)
    stop = StopChecker(sampling, room=60, eos_token_ids=frozenset(), token_bytes=lambda _: b"")
    future: Future[Any] = Future()
    return Submit(((Row(GenerateRequest((1, 2), sampling), stop, 60), future),)), future


def score() -> tuple[Score, Future[Any]]:
    future: Future[Any] = Future()
    return Score((1, 2, 3), SamplingParams(), future), future


def install(tiny: Tiny) -> tuple[Install, Future[Any]]:
    future: Future[Any] = Future()
    return Install(tiny.weights()[1], Version("test", 1), future), future


def test_what_stands_behind_a_close_in_the_queue_is_settled(tiny: Tiny) -> None:
    """verl#7990: an await that nobody answers looks like a deadlock."""
    worker = make_worker(tiny)
    posted = [submission(), score(), install(tiny)]
    worker.post(Close())
    for command, _ in posted:
        worker.post(command)
    worker.post(Cancel(posted[0][0].rows[0][0]))  # type: ignore[union-attr]
    worker.start()
    for _, future in posted:
        with pytest.raises(EngineError, match="was closed"):
            future.result(SETTLED_S)
    worker.join()
    with pytest.raises(EngineError, match="was closed"):
        worker.post(score()[0])


def test_a_row_that_runs_when_the_thread_is_closed_is_settled(tiny: Tiny) -> None:
    worker = make_worker(tiny)
    command, future = submission(tokens=60)
    worker.post(command)
    worker.post(Close())
    worker.start()
    with pytest.raises(EngineError, match="was closed"):
        future.result(SETTLED_S)
    worker.join()
    worker.join()


def test_a_score_that_fails_fails_alone(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_worker(tiny)
    real = worker._batch.score

    def explode(*_: object) -> None:
        raise RuntimeError("scoring broke")

    monkeypatch.setattr(worker._batch, "score", explode)
    running, completion = submission(tokens=30)
    failing, failed = score()
    worker.post(running)
    worker.post(failing)
    worker.start()
    with pytest.raises(EngineError, match="scoring raised RuntimeError: scoring broke") as caught:
        failed.result(SETTLED_S)
    assert "in explode" in caught.value.detail
    assert len(completion.result(SETTLED_S).token_ids) == 30
    monkeypatch.setattr(worker._batch, "score", real)
    again, answer = score()
    worker.post(again)
    assert len(answer.result(SETTLED_S)) == 2
    worker.join()


def test_an_install_that_fails_ends_the_thread_and_everybody_learns_why(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """prime-rl PR#3020, NeMo-RL PR#3589: clients stayed parked when a child failed."""
    worker = make_worker(tiny)

    def explode(*_: object) -> None:
        raise RuntimeError("half a swap")

    monkeypatch.setattr(worker._batch, "install", explode)
    posted = [submission(tokens=60), install(tiny), submission(), score()]
    for command, _ in posted:
        worker.post(command)
    worker.start()
    for _, future in posted:
        with pytest.raises(EngineError, match="installing test@1 raised RuntimeError: half a swap") as caught:
            future.result(SETTLED_S)
        assert "in explode" in caught.value.detail
    worker.join()
    with pytest.raises(EngineError, match="half a swap"):
        worker.check()
    assert "palestra-decode" not in {thread.name for thread in threading.enumerate()}


def test_a_thread_without_work_gives_its_cache_back_and_goes_on_as_before(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's step comes next and needs the memory."""
    monkeypatch.setattr(module, "REST_S", 0.01)
    worker = make_worker(tiny)
    rested = threading.Event()
    rest = worker._batch.rest
    monkeypatch.setattr(worker._batch, "rest", lambda: (rest(), rested.set()))
    worker.start()
    found = []
    for _ in range(2):
        command, future = submission(tokens=12)
        worker.post(command)
        found.append(future.result(SETTLED_S))
        rested.clear()
        assert rested.wait(SETTLED_S)
        assert worker._batch.cache.nbytes == 0
    worker.join()
    assert found[0] == found[1]


def test_a_future_that_was_cancelled_is_left_alone(tiny: Tiny) -> None:
    worker = make_worker(tiny)
    (command, cancelled), (other, answer) = score(), score()
    cancelled.cancel()
    worker.post(command)
    worker.post(other)
    worker.start()
    assert len(answer.result(SETTLED_S)) == 2
    worker.join()
    assert cancelled.cancelled()
