"""The engine's further ports: streaming, sessions, versions asked for, pause, sleep, many requests."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from palestra.errors import EngineError
from palestra.rollouts.base import (
    AdapterHost,
    EngineDead,
    GenerateRequest,
    Pausable,
    RequestRefused,
    Sleeper,
    VersionNotReady,
)
from palestra.rollouts.native import forward
from palestra.rollouts.native.engine import NativeEngine
from palestra.types import SamplingParams, StopReason, Version
from rollouts.conftest import Start
from rollouts.support import Tiny, engine_threads, generate_all, manifest_of, ragged_prompts, versions_alive
from rollouts.test_engine import until


def request(prompt: list[int], *, session: str = "", **params: Any) -> GenerateRequest:
    return GenerateRequest(
        tuple(prompt), SamplingParams(**({"max_new_tokens": 12} | params)), session=session
    )


async def serve_next(engine: NativeEngine, tiny: Tiny, number: int) -> None:
    tensors = tiny.changed(seed=number)
    manifest = manifest_of(tensors, number)
    await engine.stage(manifest, tensors.items())
    await engine.commit(Version("test", number))


# -- streaming


async def test_a_listener_hears_each_token_once_in_order_before_the_answer(serve: Start) -> None:
    engine = await serve(eos_token_ids=())
    heard: list[list[tuple[int, float, int]]] = [[], [], []]
    prompts = ragged_prompts(3, seed=40)
    done = await asyncio.gather(
        *(
            engine.generate(request(p, seed=i), lambda *token, i=i: heard[i].append(token))
            for i, p in enumerate(prompts)
        )
    )
    for tokens, completion in zip(heard, done, strict=True):
        columns = (completion.token_ids, completion.logprobs, completion.versions)
        assert tuple(zip(*tokens, strict=True)) == columns
    silent = await engine.generate(request(prompts[0]))
    assert silent.token_ids == done[0].token_ids


async def test_tokens_are_heard_while_more_are_sampled(serve: Start) -> None:
    engine = await serve(eos_token_ids=(), context_tokens=256)
    heard: list[int] = []
    job = asyncio.create_task(
        engine.generate(request([1, 2], max_new_tokens=200), lambda token, *_: heard.append(token))
    )
    await until(lambda: len(heard) >= 3)
    assert not job.done()
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    await until(lambda: engine.stats().running == 0)
    count = len(heard)
    await engine.generate(request([1]))
    assert len(heard) <= count + 1, "at most the token that was under way"


# -- sessions and versions


async def test_a_session_computes_its_beginning_once_and_says_the_same(serve: Start) -> None:
    engine, plain = await serve(), await serve()
    history = ragged_prompts(1, seed=41)[0]
    for turn in range(3):
        asked = request(history, session="episode", seed=turn)
        with_session, without = await asyncio.gather(
            engine.generate(asked), plain.generate(request(history, seed=turn))
        )
        assert with_session.token_ids == without.token_ids
        history = [*history, *with_session.token_ids, 65 + turn]
    computed, reused = engine.stats().prompt_tokens, engine.stats().reused_tokens
    assert reused > 0
    assert computed + reused == plain.stats().prompt_tokens


async def test_a_session_is_not_computed_upon_across_a_commit(tiny: Tiny, serve: Start) -> None:
    """NeMo-RL PR#4018, prime-rl PR#2270, vllm#9744: the prefix cache survived a weight update."""
    engine, fresh = await serve(), await serve(tiny.changed(seed=1))
    first = await engine.generate(request([1, 2, 3, 4], session="s"))
    await serve_next(engine, tiny, 1)
    longer = [1, 2, 3, 4, *first.token_ids, 9]
    ours = await engine.generate(request(longer, session="s"))
    theirs = await fresh.generate(request(longer))
    assert engine.stats().reused_tokens == 0
    assert (ours.token_ids, ours.logprobs) == (theirs.token_ids, theirs.logprobs)


async def test_a_version_that_does_not_serve_yet_is_a_retryable_answer(tiny: Tiny, serve: Start) -> None:
    engine = await serve()
    sampling = SamplingParams(max_new_tokens=3)
    for fields in ({"min_version": 1}, {"exact_version": 1}):
        with pytest.raises(VersionNotReady, match="the engine serves test@0") as caught:
            await engine.generate(GenerateRequest((1, 2), sampling, **fields))
        assert "version 1" in caught.value.expected
    await serve_next(engine, tiny, 1)
    done = await engine.generate(GenerateRequest((1, 2), sampling, min_version=1, exact_version=1))
    assert set(done.versions) == {1}
    with pytest.raises(VersionNotReady):
        await engine.generate(GenerateRequest((1, 2), sampling, exact_version=0))


async def test_a_request_bound_to_a_version_ends_when_that_version_does(tiny: Tiny, serve: Start) -> None:
    engine = await serve(eos_token_ids=(), context_tokens=256)
    bound = GenerateRequest((1, 2), SamplingParams(max_new_tokens=250), exact_version=0)
    job = asyncio.create_task(engine.generate(bound))
    await until(lambda: engine.stats().running == 1)
    await serve_next(engine, tiny, 1)
    with pytest.raises(VersionNotReady, match="serves test@1 now"):
        await job


# -- pausing


async def test_paused_nothing_is_computed_and_resumed_it_goes_on_as_if_nothing_had_been(serve: Start) -> None:
    engine, other = await serve(eos_token_ids=()), await serve(eos_token_ids=())
    assert isinstance(engine, Pausable)
    expected = await other.generate(request([1, 2], max_new_tokens=60))
    heard: list[int] = []
    job = asyncio.create_task(
        engine.generate(request([1, 2], max_new_tokens=60), lambda token, *_: heard.append(token))
    )
    await until(lambda: len(heard) >= 3)
    await engine.pause()
    await asyncio.sleep(0)
    count = engine.stats().generated_tokens
    late = asyncio.create_task(engine.generate(request([3], max_new_tokens=2)))
    scored = await engine.score((1, 2, 3), SamplingParams())
    assert len(scored) == 2, "scoring goes on"
    await asyncio.sleep(0.05)
    assert engine.stats().generated_tokens == count
    assert not job.done()
    assert not late.done()
    await engine.resume()
    assert (await job).token_ids == expected.token_ids
    assert len((await late).token_ids) == 2


async def test_weights_change_under_a_pause_and_running_requests_go_on_with_the_new(
    tiny: Tiny, serve: Start
) -> None:
    engine = await serve(eos_token_ids=())
    heard: list[int] = []
    job = asyncio.create_task(
        engine.generate(request([1, 2], max_new_tokens=40), lambda token, *_: heard.append(token))
    )
    await until(lambda: len(heard) >= 3)
    await engine.pause("keep")
    await serve_next(engine, tiny, 1)
    await engine.resume()
    versions = (await job).versions
    assert set(versions) == {0, 1}
    assert list(versions) == sorted(versions)


async def test_draining_finishes_what_runs_and_begins_nothing(serve: Start) -> None:
    engine = await serve(eos_token_ids=(), max_running=2)
    jobs = [asyncio.create_task(engine.generate(request([i + 1], max_new_tokens=20))) for i in range(4)]
    await until(lambda: engine.stats().running == 2)
    await engine.pause("drain")
    await asyncio.sleep(0)
    assert [job.done() for job in jobs] == [True, True, False, False]
    assert engine.stats().running == 0
    await engine.resume()
    assert [len(done.token_ids) for done in await asyncio.gather(*jobs)] == [20] * 4


async def test_aborting_ends_what_runs_with_its_tokens_and_keeps_what_waits(serve: Start) -> None:
    engine = await serve(eos_token_ids=(), max_running=1, context_tokens=256)
    heard: list[int] = []
    job = asyncio.create_task(
        engine.generate(request([1, 2], max_new_tokens=200), lambda token, *_: heard.append(token))
    )
    await until(lambda: len(heard) >= 2)
    waits = asyncio.create_task(engine.generate(request([3], max_new_tokens=2)))
    await asyncio.sleep(0.01)
    await engine.pause("abort")
    done = await job
    assert done.stop_reason is StopReason.ABORTED
    assert list(done.token_ids) == heard
    assert not waits.done()
    await engine.resume()
    assert (await waits).stop_reason is StopReason.LENGTH


@pytest.mark.parametrize("then", ["resume", "sleep", "commit"])
async def test_requests_cancelled_while_they_are_aborted_harm_nobody(
    tiny: Tiny, serve: Start, then: str
) -> None:
    """A cancel may meet a row that has just ended: the decode thread lives, and nothing waits for ever."""
    engine = await serve(eos_token_ids=(), context_tokens=256)
    for round_ in range(5):
        jobs = [asyncio.create_task(engine.generate(request([i + 1], max_new_tokens=200))) for i in range(8)]
        await until(lambda: engine.stats().running == 8)
        if then == "commit":
            bound = GenerateRequest((1,), SamplingParams(max_new_tokens=200), exact_version=round_)
            jobs += [asyncio.create_task(engine.generate(bound)) for _ in range(4)]
            await asyncio.sleep(0.01)
            ending: Any = asyncio.create_task(serve_next(engine, tiny, round_ + 1))
        else:
            ending = asyncio.create_task(engine.pause("abort") if then == "resume" else engine.sleep())
        await asyncio.sleep(0)
        for job in jobs:
            job.cancel()
        await asyncio.wait_for(ending, 60)
        await asyncio.gather(*jobs, return_exceptions=True)
        if then == "sleep":
            await engine.start(manifest_of(tiny.tensors), tiny.tensors.items())
        await engine.resume()
        assert len((await engine.generate(request([1], max_new_tokens=2))).token_ids) == 2


async def test_what_is_held_already_is_drained_at_once(serve: Start) -> None:
    engine = await serve(eos_token_ids=(), context_tokens=256)
    job = asyncio.create_task(engine.generate(request([1, 2], max_new_tokens=60)))
    await until(lambda: engine.stats().running == 1)
    await engine.pause("keep")
    await asyncio.wait_for(engine.pause("drain"), 30)
    assert not job.done()
    await engine.resume()
    assert len((await job).token_ids) == 60


async def test_a_pause_that_was_cancelled_pauses_nothing(serve: Start) -> None:
    engine = await serve(eos_token_ids=(), context_tokens=256)
    job = asyncio.create_task(engine.generate(request([1, 2], max_new_tokens=120)))
    await until(lambda: engine.stats().running == 1)
    drain = asyncio.create_task(engine.pause("drain"))
    await asyncio.sleep(0.01)
    drain.cancel()
    with pytest.raises(asyncio.CancelledError):
        await drain
    await job
    assert len((await engine.generate(request([3], max_new_tokens=3))).token_ids) == 3
    with pytest.raises(EngineError, match="no pause mode 'freeze'"):
        await engine.pause("freeze")  # type: ignore[arg-type]
    await engine.generate(request([3], max_new_tokens=3))


async def test_closing_a_paused_engine_leaves_nobody_waiting(serve: Start) -> None:
    engine = await serve()
    await engine.pause()
    job = asyncio.create_task(engine.generate(request([1])))
    await asyncio.sleep(0.01)
    await engine.close()
    with pytest.raises(EngineError, match="was closed"):
        await job
    with pytest.raises(EngineError, match="closed"):
        await engine.resume()


# -- sleeping


async def test_asleep_it_holds_nothing_and_wakes_with_what_it_is_given(tiny: Tiny, serve: Start) -> None:
    """trl#5312: weights were not refreshed after the engine woke from sleep."""
    before = versions_alive()
    engine = await serve(eos_token_ids=(), context_tokens=256)
    assert isinstance(engine, Sleeper)
    job = asyncio.create_task(engine.generate(request([1, 2], max_new_tokens=200)))
    await until(lambda: engine.stats().generated_tokens >= 2)
    await engine.sleep()
    done = await job
    assert done.stop_reason is StopReason.ABORTED
    assert done.token_ids
    assert engine.version is None
    assert versions_alive() == before
    assert not engine_threads()
    with pytest.raises(EngineError, match="not been started"):
        await engine.generate(request([1]))
    await engine.sleep()
    changed = tiny.changed(seed=1)
    await engine.start(manifest_of(changed, 5), changed.items())
    other = await serve(changed, eos_token_ids=())
    woken = await engine.generate(request([1, 2]))
    assert woken.token_ids == (await other.generate(request([1, 2]))).token_ids
    assert set(woken.versions) == {5}


PEAK = """
import asyncio, resource, sys
from pathlib import Path
import torch
from palestra.models.config import ModelConfig
from palestra.models.tensors import load_tensors
from palestra.rollouts.native.engine import NativeEngine
from palestra.types import SamplingParams, Version
from palestra.weights.manifests import full_manifest
folder = Path(sys.argv[1])
torch.set_num_threads(1)

def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024

def reset():
    open("/proc/self/clear_refs", "w").write("5")

async def main():
    tensors = load_tensors(folder)
    size = sum(t.nbytes for t in tensors.values())
    manifest = full_manifest(Version("r", 0), tensors.items())
    engine = NativeEngine(folder, dtype="fp32", threads=1)
    reset(); base = peak()
    await engine.start(manifest, tensors.items())
    first = peak() - base
    await engine.sleep()
    reset(); asleep = peak() - base
    await engine.start(manifest, tensors.items())
    woken = peak() - base
    await engine.close()
    print(first / size, asleep / size, woken / size)

asyncio.run(main())
"""


def test_waking_never_holds_two_copies_of_the_weights(tmp_path: Any) -> None:
    """vllm#15254, vime PR#191: waking held two copies of the weights. Measured: peak resident memory."""
    from helpers.tiny import make_tiny_model

    folder = make_tiny_model(tmp_path / "model", hidden=512, layers=6, heads=8, kv_heads=4)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(folder), ""],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, asleep, woken = map(float, done.stdout.split())
    assert first > 0.9, "the measure sees the weights"
    assert asleep < 0.5, "asleep they are gone"
    assert woken < 1.6, "one copy and what is being converted"


# -- limits


async def test_ten_thousand_requests_wait_and_all_are_answered(serve: Start) -> None:
    engine = await serve(max_running=64)
    prompts = [[1 + i % 7] for i in range(10_000)]
    done = await generate_all(engine, prompts, [SamplingParams(max_new_tokens=1)] * len(prompts))
    assert len(done) == 10_000
    assert {completion.token_ids for completion in done[:7]} == {c.token_ids for c in done}
    assert engine.stats().waiting == engine.stats().running == 0


async def test_thousands_that_wait_are_cancelled_at_once(serve: Start) -> None:
    engine = await serve(eos_token_ids=(), max_running=1, context_tokens=256)
    jobs = [asyncio.create_task(engine.generate(request([1], max_new_tokens=200))) for _ in range(3000)]
    await until(lambda: engine.stats().running == 1)
    for job in jobs:
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)
    await until(lambda: engine.stats().running == 0)
    assert len((await engine.generate(request([1], max_new_tokens=2))).token_ids) == 2


async def test_a_request_that_could_never_fit_the_cache_is_refused_with_both_numbers(
    tiny: Tiny, serve: Start
) -> None:
    engine = await serve()
    engine._budget = 40
    with pytest.raises(EngineError, match="may take 52 positions; the cache holds 40"):
        await engine.generate(request([1] * 2, max_new_tokens=50))
    with pytest.raises(EngineError, match="a full context has"):
        NativeEngine(tiny.folder, dtype="fp32", cache_mb=-1)


@pytest.mark.parametrize("wrong", [(1.5,), (True,), ("a",), (None,), (1, None)])
def test_what_is_no_token_id_makes_no_request(wrong: Any) -> None:
    with pytest.raises(TypeError, match="must hold token ids"):
        GenerateRequest(wrong, SamplingParams())
    with pytest.raises(TypeError, match="must hold token ids"):
        GenerateRequest((1,), SamplingParams(), logit_bias={wrong[-1]: 1.0})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39, "x", None])
def test_a_bias_is_a_number_within_reach(value: Any) -> None:
    with pytest.raises(ValueError, match="logit_bias"):
        GenerateRequest((1,), SamplingParams(), logit_bias={5: value})


async def test_a_bias_on_a_token_that_is_not_there_is_refused(serve: Start) -> None:
    engine = await serve()
    wrong = GenerateRequest((1, 2), SamplingParams(), logit_bias={10**6: 1.0})
    with pytest.raises(EngineError, match="logit_bias holds token 1000000"):
        await engine.generate(wrong)
    with pytest.raises(ValueError, match="min_new_tokens must be in"):
        GenerateRequest((1,), SamplingParams(max_new_tokens=3), min_new_tokens=4)


async def test_what_is_wrong_with_a_request_is_told_apart_from_what_is_wrong_with_the_engine(
    serve: Start,
) -> None:
    engine = await serve()
    for prompt, params in (([], {}), ([10**6], {}), ([1] * 5000, {}), ([1], {"temperature": 1e-30})):
        with pytest.raises(RequestRefused):
            await engine.generate(request(prompt, **params))
    with pytest.raises(RequestRefused, match="temperature 0"):
        await engine.score((1, 2), SamplingParams(temperature=1e-30))
    coldest = await engine.generate(request([1, 2], temperature=1e-5))
    assert coldest.token_ids == (await engine.generate(request([1, 2], temperature=0))).token_ids


async def test_an_unknown_adapter_is_named_with_the_nearest_and_the_engine_serves_on(serve: Start) -> None:
    engine = await serve()
    assert isinstance(engine, AdapterHost)
    wrong = GenerateRequest((1, 2), SamplingParams(), adapter="maths")
    with pytest.raises(EngineError, match="no adapter named 'maths' is loaded"):
        await engine.generate(wrong)
    with pytest.raises(EngineError, match="no adapter named 'maths'"):
        await engine.drop_adapter("maths")
    await engine.generate(request([1, 2]))


async def test_a_decode_thread_that_dies_says_that_the_engine_is_dead(
    serve: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """prime-rl PR#3020: what ended it reaches whoever waits; another replica may answer."""
    engine = await serve()

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(forward, "step", broken)
    with pytest.raises(EngineDead, match="out of memory"):
        await engine.generate(request([1, 2]))
    with pytest.raises(EngineDead, match="out of memory"):
        await engine.pause()
