"""The engine as the loop sees it: requests, versions, errors, cancellation, shutdown."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from palestra.errors import EngineError, WeightsError
from palestra.rollouts.base import Engine, GenerateRequest
from palestra.rollouts.native import forward
from palestra.rollouts.native.engine import NativeEngine
from palestra.rollouts.native.threads import limit_this_thread
from palestra.types import SamplingParams, StopReason, Version
from rollouts.conftest import Start
from rollouts.support import (
    Tiny,
    engine_threads,
    generate_all,
    manifest_of,
    ragged_prompts,
    versions_alive,
)


def request(prompt: list[int], **params: Any) -> GenerateRequest:
    return GenerateRequest(tuple(prompt), SamplingParams(**params), "r1")


async def until(condition: Callable[[], bool]) -> None:
    """Wait for the decode thread to get somewhere; fail after a minute."""
    for _ in range(30_000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("the decode thread did not get there")


async def test_it_is_an_engine_and_serves_the_version_it_was_started_with(tiny: Tiny, serve: Start) -> None:
    engine: Engine = NativeEngine(tiny.folder, dtype="fp32", threads=1)
    assert engine.version is None
    manifest = manifest_of(tiny.tensors)
    assert await engine.start(manifest, tiny.tensors.items()) == manifest.digest
    assert engine.version == Version("test", 0)
    with pytest.raises(EngineError, match="started already"):
        await engine.start(manifest, tiny.tensors.items())
    await engine.close()


async def test_greedy_tokens_equal_those_of_transformers(serve: Start, reference: Any) -> None:
    engine = await serve(eos_token_ids=())
    prompts = ragged_prompts(5, seed=11)
    ours = await generate_all(engine, prompts, [SamplingParams(max_new_tokens=24, temperature=0)] * 5)
    for prompt, completion in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        theirs = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, min_new_tokens=24, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert list(completion.token_ids) == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.3])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (12, 1.0), (0, 0.9), (20, 0.8)])
async def test_logprobs_of_generation_equal_those_of_scoring(
    serve: Start, temperature: float, top_k: int, top_p: float
) -> None:
    """trl#4159, NeMo-RL PR#316, OpenRLHF PR#853: temperature applied on one side only."""
    engine = await serve()
    prompts = ragged_prompts(6, seed=12)
    samplings = [
        SamplingParams(max_new_tokens=16, temperature=temperature, top_k=top_k, top_p=top_p, seed=i)
        for i in range(6)
    ]
    for prompt, sampling, done in zip(
        prompts, samplings, await generate_all(engine, prompts, samplings), strict=True
    ):
        scores = await engine.score([*prompt, *done.token_ids], sampling)
        assert scores[len(prompt) - 1 :] == pytest.approx(done.logprobs, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.6, 1.3])
async def test_scores_equal_those_of_transformers(serve: Start, reference: Any, temperature: float) -> None:
    engine = await serve()
    tokens = ragged_prompts(1, seed=13)[0]
    ours = await engine.score(tokens, SamplingParams(temperature=temperature))
    with torch.no_grad():
        logits = reference(torch.tensor([tokens])).logits[0, :-1] / temperature
    theirs = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert ours == pytest.approx(theirs.tolist(), abs=1e-4)


async def test_two_hundred_requests_over_eight_slots_all_finish_and_repeat_bit_for_bit(serve: Start) -> None:
    """verl#7990: far more requests in flight than slots."""
    prompts = ragged_prompts(200, seed=14, longest=12)
    samplings = [SamplingParams(max_new_tokens=1 + i % 9, seed=i) for i in range(200)]
    runs = [await generate_all(await serve(), prompts, samplings) for _ in range(2)]
    assert runs[0] == runs[1]
    assert all(len(done.token_ids) <= 1 + i % 9 for i, done in enumerate(runs[0]))
    assert {done.stop_reason for done in runs[0]} <= {StopReason.LENGTH, StopReason.EOS}


async def test_the_result_does_not_depend_on_when_requests_arrive_or_with_which(serve: Start) -> None:
    prompts = ragged_prompts(10, seed=15)
    samplings = [SamplingParams(max_new_tokens=12, seed=i, top_p=0.95) for i in range(10)]
    together = await generate_all(await serve(), prompts, samplings)

    async def late(engine: NativeEngine, index: int) -> Any:
        await asyncio.sleep(0.004 * (index * 7 % 10))
        return await engine.generate(GenerateRequest(tuple(prompts[index]), samplings[index]))

    engine = await serve(max_running=3)
    scattered = await asyncio.gather(*(late(engine, i) for i in range(10)))
    assert scattered == together


async def test_requests_of_one_loop_iteration_enter_together_even_through_nested_tasks(serve: Start) -> None:
    """A group's members share one prefill only if they are admitted as one batch."""
    engine = await serve()
    prompt = ragged_prompts(1, seed=16)[0]

    async def nested(depth: int, seed: int) -> Any:
        if depth:
            return await asyncio.create_task(nested(depth - 1, seed))
        return await engine.generate(request(prompt, max_new_tokens=3, seed=seed))

    await asyncio.gather(*(nested(i % 4, i) for i in range(8)))
    assert engine.stats().prompt_tokens == len(prompt)


async def test_each_token_carries_the_version_that_chose_it(tiny: Tiny, serve: Start) -> None:
    engine = await serve(eos_token_ids=())
    prompt = ragged_prompts(1, seed=17)[0]
    running = asyncio.create_task(engine.generate(request(prompt, max_new_tokens=200)))
    await until(lambda: engine.stats().generated_tokens >= 5)
    other = tiny.changed()
    manifest = manifest_of(other, 1)
    assert await engine.stage(manifest, other.items()) == manifest.digest
    assert engine.version == Version("test", 0)
    await engine.commit(Version("test", 1))
    assert engine.version == Version("test", 1)
    done = await running
    switch = done.versions.index(1)
    assert 5 <= switch < 200
    assert done.versions == (0,) * switch + (1,) * (200 - switch)
    untouched = await (await serve(eos_token_ids=())).generate(request(prompt, max_new_tokens=200))
    assert done.token_ids[:switch] == untouched.token_ids[:switch]
    assert done.token_ids != untouched.token_ids


async def test_after_a_commit_the_engine_computes_exactly_with_the_new_weights(
    tiny: Tiny, serve: Start
) -> None:
    """unsloth PR#8701: a weight path that silently stopped applying."""
    engine = await serve()
    tokens = ragged_prompts(1, seed=18)[0]
    for number in range(1, 5):
        other = tiny.changed(seed=number)
        await engine.stage(manifest_of(other, number), other.items())
        before = await engine.score(tokens, SamplingParams())
        await engine.commit(Version("test", number))
        after = await engine.score(tokens, SamplingParams())
        assert before != after
        fresh = await serve(tensors=other)
        assert after == await fresh.score(tokens, SamplingParams())


async def test_at_most_two_versions_are_alive_and_one_after_a_commit(tiny: Tiny, serve: Start) -> None:
    before = versions_alive()
    engine = await serve()
    assert versions_alive() == before + 1
    for number in range(1, 4):
        manifest = manifest_of(tiny.changed(seed=number), number)
        for _ in range(2):
            await engine.stage(manifest, tiny.changed(seed=number).items())
            assert versions_alive() == before + 2
        await engine.commit(Version("test", number))
        assert versions_alive() == before + 1
    await engine.close()
    assert versions_alive() == before


async def test_bytes_that_are_not_the_manifests_are_refused_before_they_can_serve(
    tiny: Tiny, serve: Start
) -> None:
    """verl#7495: whoever drives the engine, a version whose bytes changed on the way never serves."""
    other = tiny.changed()
    engine = NativeEngine(tiny.folder, dtype="fp32", threads=1)
    with pytest.raises(WeightsError, match="not those its manifest announced"):
        await engine.start(manifest_of(tiny.tensors), other.items())
    assert engine.version is None
    assert engine_threads() == []
    await engine.start(manifest_of(tiny.tensors), tiny.tensors.items())
    with pytest.raises(WeightsError, match="not those its manifest announced"):
        await engine.stage(manifest_of(tiny.tensors, 1), other.items())
    with pytest.raises(WeightsError, match="nothing is staged"):
        await engine.commit(Version("test", 1))
    assert engine.version == Version("test", 0)
    await engine.close()


async def test_a_commit_goes_through_while_many_requests_wait(tiny: Tiny, serve: Start) -> None:
    """verl#7990: deadlock in sync under many outstanding requests."""
    engine = await serve(max_running=4)
    prompts = ragged_prompts(120, seed=19, longest=10)
    pending = asyncio.gather(
        *(engine.generate(request(p, max_new_tokens=6, seed=i)) for i, p in enumerate(prompts))
    )
    await until(lambda: engine.stats().generated_tokens > 30)
    other = tiny.changed()
    await engine.stage(manifest_of(other, 1), other.items())
    await engine.commit(Version("test", 1))
    done = await pending
    assert len(done) == 120
    assert {version for completion in done for version in completion.versions} == {0, 1}
    for completion in done:
        assert list(completion.versions) == sorted(completion.versions)


async def test_committing_what_is_not_staged_is_refused(tiny: Tiny, serve: Start) -> None:
    engine = await serve()
    with pytest.raises(WeightsError, match="nothing is staged"):
        await engine.commit(Version("test", 1))
    await engine.stage(manifest_of(tiny.tensors, 1), tiny.tensors.items())
    with pytest.raises(WeightsError, match="test@1 is staged"):
        await engine.commit(Version("test", 2))
    assert engine.version == Version("test", 0)


async def test_a_stage_that_fails_leaves_the_old_version_serving(tiny: Tiny, serve: Start) -> None:
    engine = await serve()
    tokens = ragged_prompts(1, seed=20)[0]
    before = await engine.score(tokens, SamplingParams())

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from list(tiny.changed().items())[:5]
        raise OSError("the trainer went away")

    with pytest.raises(WeightsError, match="the trainer went away") as caught:
        await engine.stage(manifest_of(tiny.tensors, 1), broken())
    assert "Traceback" in caught.value.detail
    with pytest.raises(WeightsError, match="missing"):
        await engine.stage(manifest_of(tiny.tensors, 1), list(tiny.changed().items())[:5])
    with pytest.raises(WeightsError, match="nothing is staged"):
        await engine.commit(Version("test", 1))
    assert await engine.score(tokens, SamplingParams()) == before


async def test_a_start_that_fails_leaves_an_engine_that_can_be_started(tiny: Tiny) -> None:
    before = versions_alive()
    engine = NativeEngine(tiny.folder, dtype="fp32", threads=1)
    with pytest.raises(WeightsError, match="missing"):
        await engine.start(manifest_of(tiny.tensors), list(tiny.tensors.items())[:3])
    assert versions_alive() == before
    assert engine_threads() == []
    with pytest.raises(EngineError, match="not been started"):
        await engine.generate(request([1]))
    await engine.start(manifest_of(tiny.tensors), tiny.tensors.items())
    assert (await engine.generate(request([1], max_new_tokens=2))).token_ids
    await engine.close()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt of request r1 is empty"),
        ([5, 259], "holds token 259"),
        ([-1], "holds token -1"),
        ([65] * 64, "has 64 tokens and the context is 64"),
    ],
)
async def test_an_impossible_prompt_is_refused_and_the_engine_serves_on(
    serve: Start, prompt: list[int], message: str
) -> None:
    engine = await serve(context_tokens=64)
    with pytest.raises(EngineError, match=message):
        await engine.generate(request(prompt))
    assert (await engine.generate(request([65] * 63))).stop_reason in (StopReason.CONTEXT, StopReason.EOS)


async def test_a_prompt_too_long_says_both_lengths_and_what_to_change(serve: Start) -> None:
    engine = await serve(context_tokens=32)
    with pytest.raises(EngineError) as caught:
        await engine.generate(request([65] * 40))
    assert "40 tokens" in caught.value.what
    assert "at most 31 tokens" in caught.value.expected
    assert "context_tokens (the model allows 256)" in caught.value.next_command
    with pytest.raises(EngineError, match="33 tokens and the context is 32"):
        await engine.score([65] * 33, SamplingParams())


def test_impossible_settings_are_refused(tiny: Tiny) -> None:
    with pytest.raises(EngineError, match="context_tokens is 257"):
        NativeEngine(tiny.folder, dtype="fp32", context_tokens=257)
    with pytest.raises(EngineError, match="max_running"):
        NativeEngine(tiny.folder, dtype="fp32", max_running=0)
    with pytest.raises(EngineError, match="threads"):
        NativeEngine(tiny.folder, dtype="fp32", threads=-1)


async def test_a_character_that_spans_tokens_stops_where_its_last_byte_comes(serve: Start) -> None:
    """Token b is byte b here. Of eight hot samples one holds a two-byte character: it becomes the stop."""
    engine = await serve(eos_token_ids=())
    hot = [SamplingParams(max_new_tokens=120, temperature=8.0, seed=i) for i in range(8)]
    seed, end = next(
        (i, at)
        for i, done in enumerate(await generate_all(engine, [[1]] * 8, hot))
        for at in range(2, 120)
        if (first := done.token_ids[at - 2]) in range(0xC2, 0xE0)
        and (second := done.token_ids[at - 1]) in range(0x80, 0xC0)
        and bytes(t for t in done.token_ids if t < 256).count(bytes((first, second))) == 1
    )  # fmt: skip
    free = await engine.generate(GenerateRequest((1,), hot[seed]))
    character = bytes(free.token_ids[end - 2 : end]).decode()
    cut = await engine.generate(GenerateRequest((1,), replace(hot[seed], stop=("no", character))))
    assert cut.stop_reason is StopReason.STOP
    assert cut.token_ids == free.token_ids[:end]


async def test_a_stop_string_inside_what_would_be_sampled_cuts_it_there(serve: Start) -> None:
    engine = await serve(eos_token_ids=())
    sampling = SamplingParams(max_new_tokens=60, temperature=1.0, seed=3)
    free = await engine.generate(GenerateRequest((65,), sampling))
    data = b"".join(engine._tokenizer.token_bytes(t) for t in free.token_ids)
    text = data.decode("utf-8", errors="ignore")
    stop = next(
        text[i : i + 3] for i in range(10, len(text) - 3) if data.count(text[i : i + 3].encode()) == 1
    )
    cut = await engine.generate(
        GenerateRequest((65,), SamplingParams(max_new_tokens=60, seed=3, stop=("never this", stop)))
    )
    kept = b"".join(engine._tokenizer.token_bytes(t) for t in cut.token_ids)
    assert cut.stop_reason is StopReason.STOP
    assert kept == data[: data.index(stop.encode()) + len(stop.encode())]
    assert cut.logprobs == free.logprobs[: len(cut.token_ids)]


async def test_end_tokens_stop_tokens_and_limits_are_told_apart(serve: Start) -> None:
    engine = await serve(eos_token_ids=())
    free = await engine.generate(request([65], max_new_tokens=9, temperature=0))
    assert (free.stop_reason, len(free.token_ids)) == (StopReason.LENGTH, 9)
    third = free.token_ids[2]
    first = free.token_ids.index(third) + 1
    stopped = await engine.generate(request([65], max_new_tokens=9, temperature=0, stop_token_ids=(third,)))
    assert (stopped.stop_reason, stopped.token_ids) == (StopReason.STOP, free.token_ids[:first])
    ending = await serve(eos_token_ids=(third,))
    ended = await ending.generate(request([65], max_new_tokens=9, temperature=0))
    assert (ended.stop_reason, ended.token_ids) == (StopReason.EOS, free.token_ids[:first])
    short = await serve(eos_token_ids=(), context_tokens=6)
    full = await short.generate(request([65], max_new_tokens=9, temperature=0))
    assert (full.stop_reason, full.token_ids) == (StopReason.CONTEXT, free.token_ids[:5])


async def test_cancelling_frees_the_slot_for_the_next_request(serve: Start) -> None:
    engine = await serve(max_running=1, eos_token_ids=())
    long = asyncio.create_task(engine.generate(request([1, 2], max_new_tokens=250)))
    waiting = asyncio.create_task(engine.generate(request([3], max_new_tokens=250)))
    await until(lambda: engine.stats().running == 1)
    assert engine.stats().waiting == 1
    long.cancel()
    waiting.cancel()
    results = await asyncio.gather(long, waiting, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    done = await engine.generate(request([4], max_new_tokens=3))
    assert len(done.token_ids) == 3
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.generated_tokens < 250


async def test_a_request_cancelled_before_it_left_the_loop_is_never_computed(serve: Start) -> None:
    """Requests that keep arriving in nested tasks hold the batch back, so the cancellation overtakes it."""
    engine = await serve()

    async def nested(depth: int) -> Any:
        if depth:
            return await asyncio.create_task(nested(depth - 1))
        return await engine.generate(request([7], max_new_tokens=2))

    doomed = asyncio.create_task(engine.generate(request([1, 2], max_new_tokens=50)))
    others = [asyncio.create_task(nested(depth)) for depth in range(8)]
    await asyncio.sleep(0)
    doomed.cancel()
    await asyncio.gather(*others)
    assert doomed.cancelled()
    assert engine.stats().prompt_tokens == 1
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)


async def test_a_cancelled_commit_has_still_happened_when_the_cancellation_arrives(
    tiny: Tiny, serve: Start
) -> None:
    """Half a commit would leave buffers that serve open to the next stage."""
    engine = await serve(eos_token_ids=())
    busy = asyncio.create_task(engine.generate(request([1], max_new_tokens=100)))
    other = tiny.changed()
    await engine.stage(manifest_of(other, 1), other.items())
    commit = asyncio.create_task(engine.commit(Version("test", 1)))
    await asyncio.sleep(0)
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    assert engine.version == Version("test", 1)
    await busy
    tokens = ragged_prompts(1)[0]
    third = tiny.changed(seed=5)
    before = await engine.score(tokens, SamplingParams())
    await engine.stage(manifest_of(third, 2), third.items())
    assert await engine.score(tokens, SamplingParams()) == before


async def test_an_exception_in_the_decode_thread_fails_every_request_with_its_traceback(
    serve: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """prime-rl PR#3020, NeMo-RL PR#3589: a child failed and its traceback was never shown; clients parked."""
    engine = await serve(max_running=2)

    def explode(*_: object) -> Tensor:
        raise RuntimeError("out of memory, say")

    monkeypatch.setattr("palestra.rollouts.native.forward.step", explode)
    results = await asyncio.gather(
        *(engine.generate(request([i + 1], max_new_tokens=9)) for i in range(5)), return_exceptions=True
    )
    for result in results:
        assert isinstance(result, EngineError)
        assert "out of memory, say" in str(result)
        assert "in explode" in result.detail
    assert len({id(result) for result in results}) == 5
    for call in (engine.generate(request([1])), engine.score([1, 2], SamplingParams())):
        with pytest.raises(EngineError, match="out of memory, say"):
            await call
    await engine.close()


async def test_an_exception_while_scoring_reaches_its_caller(
    serve: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await serve()

    def explode(*_: object) -> None:
        raise RuntimeError("scoring broke")

    with monkeypatch.context() as patch:
        patch.setattr("palestra.rollouts.native.batch.logprobs_of", explode)
        with pytest.raises(EngineError, match="scoring broke"):
            await engine.score([1, 2, 3], SamplingParams())
    assert len(await engine.score([1, 2, 3], SamplingParams())) == 2, "the engine serves on"


async def test_closing_ends_every_request_and_every_later_call_says_so(tiny: Tiny, serve: Start) -> None:
    before, alive = threading.active_count(), versions_alive()
    engine = await serve(max_running=1, eos_token_ids=())
    tasks = [asyncio.create_task(engine.generate(request([1], max_new_tokens=200))) for _ in range(3)]
    await until(lambda: engine.stats().running == 1)
    await engine.close()
    await engine.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(r, EngineError) and "was closed" in str(r) for r in results)
    calls = (
        engine.generate(request([1])),
        engine.score([1, 2], SamplingParams()),
        engine.stage(manifest_of(tiny.tensors, 1), tiny.tensors.items()),
        engine.commit(Version("test", 1)),
        engine.start(manifest_of(tiny.tensors), tiny.tensors.items()),
    )
    for call in calls:
        with pytest.raises(EngineError, match="was closed"):
            await call
    assert engine.version is None
    assert versions_alive() == alive
    assert engine_threads() == []
    assert threading.active_count() <= before + 2


class SlowTensors:
    """A model's tensors, of which the third comes only when it is told to."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.waiting, self.go_on = threading.Event(), threading.Event()
        self._items = list(tensors.items())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._items[:2]
        self.waiting.set()
        assert self.go_on.wait(30)
        yield from self._items[2:]


@pytest.mark.parametrize("started", [False, True])
async def test_closing_while_a_version_is_taken_leaves_no_thread_and_no_weights(
    tiny: Tiny, serve: Start, started: bool
) -> None:
    """A run that is stopped in the middle of a sync: the load may not bring the engine back to life."""
    alive = versions_alive()
    engine = await serve() if started else NativeEngine(tiny.folder, dtype="fp32", threads=1)
    slow = SlowTensors(tiny.tensors)
    take = engine.stage if started else engine.start
    taking = asyncio.create_task(take(manifest_of(tiny.tensors, 1), slow))
    await until(slow.waiting.is_set)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    slow.go_on.set()
    with pytest.raises(EngineError, match="was closed"):
        await taking
    await closing
    assert engine.version is None
    assert engine_threads() == []
    del taking
    assert versions_alive() == alive


async def test_closing_while_a_version_is_committed_leaves_nothing_behind(
    tiny: Tiny, serve: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = versions_alive()
    engine = await serve(eos_token_ids=())
    other = tiny.changed()
    await engine.stage(manifest_of(other, 1), other.items())
    real, waiting, go_on = forward.step, threading.Event(), threading.Event()

    def slow_step(*arguments: Any) -> Tensor:
        waiting.set()
        assert go_on.wait(30)
        return real(*arguments)

    monkeypatch.setattr(forward, "step", slow_step)
    running = asyncio.create_task(engine.generate(request([1], max_new_tokens=100)))
    await until(waiting.is_set)
    committing = asyncio.create_task(engine.commit(Version("test", 1)))
    await asyncio.sleep(0)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    go_on.set()
    results = await asyncio.gather(running, committing, return_exceptions=True)
    assert all(isinstance(r, EngineError) and "was closed" in str(r) for r in results)
    await closing
    assert engine.version is None
    assert engine_threads() == []
    del results, running, committing
    assert versions_alive() == alive


async def test_closing_right_after_submitting_leaves_nobody_waiting(serve: Start) -> None:
    engine = await serve()
    task = asyncio.create_task(engine.generate(request([1], max_new_tokens=200)))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineError, match="was closed"):
        await task


async def test_totals_are_counted(serve: Start) -> None:
    engine = await serve(eos_token_ids=())
    prompt = ragged_prompts(1, seed=21)[0]
    done = await generate_all(
        engine, [prompt] * 4, [SamplingParams(max_new_tokens=5, seed=i) for i in range(4)]
    )
    stats = engine.stats()
    assert stats.prompt_tokens == len(prompt)
    assert stats.generated_tokens == sum(len(completion.token_ids) for completion in done) == 20
    assert stats.busy_s > 0


def test_limiting_one_thread_leaves_the_others_as_they_were() -> None:
    """The trainer computes in another thread of the same process."""
    seen: dict[str, int] = {}

    def worker() -> None:
        limit_this_thread(3)
        seen["worker"] = torch.get_num_threads()

    def later() -> None:
        seen["later"] = torch.get_num_threads()

    torch.set_num_threads(2)
    for target in (worker, later):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    assert seen == {"worker": 3, "later": 2}
    assert torch.get_num_threads() == 2
