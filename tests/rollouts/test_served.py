"""What every engine behind HTTP must do, with servers that look like vLLM's and SGLang's from outside."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import fake_served as fake
from helpers.tiny import make_tiny_model
from palestra.errors import EngineError, WeightsError
from palestra.models.tensors import load_tensors
from palestra.rollouts.base import (
    AdapterHost,
    EngineDead,
    GenerateRequest,
    Pausable,
    RequestRefused,
    Sleeper,
    VersionNotReady,
)
from palestra.rollouts.served import engine as served_engine
from palestra.rollouts.served import leftovers, life
from palestra.rollouts.served.engine import ServedEngine
from palestra.rollouts.served.http import Broken, Refused
from palestra.rollouts.served.sglang import SglangEngine
from palestra.rollouts.served.vllm import VllmEngine
from palestra.types import Completion, Manifest, SamplingParams, StopReason, Version
from palestra.weights.manifests import full_manifest
from rollouts.processes import gone, server_of

Start = Callable[..., Awaitable[ServedEngine]]
KINDS: dict[str, type[VllmEngine] | type[SglangEngine]] = {"vllm": VllmEngine, "sglang": SglangEngine}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(params=KINDS)
async def start(
    request: pytest.FixtureRequest, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Start]:
    """Starts an engine of each kind at version run@0; closed at the end, with the logs of those that died."""
    engines: list[ServedEngine] = []
    short = tempfile.mkdtemp(prefix="p-")  # a socket's path has 108 bytes at most
    monkeypatch.setattr(tempfile, "tempdir", short)
    python = fake.make_python(tmp_path)

    async def started(*, serve: bool = True, **options: Any) -> ServedEngine:
        settings = {"max_running": 4, "adapter_rank": 8, "startup_s": 30.0, **options}
        engine = KINDS[request.param](folder, python=python, dtype="fp32", **settings)
        engines.append(engine)
        if serve:
            manifest, tensors = version(folder, 0)
            assert await engine.start(manifest, tensors.items()) == manifest.digest
        return engine

    yield started
    for engine in engines:
        await engine.close()
    shutil.rmtree(short)


def version(folder: Path, number: int) -> tuple[Manifest, dict[str, Tensor]]:
    """The folder's tensors, different for each number."""
    tensors = {name: tensor + number for name, tensor in load_tensors(folder).items()}
    return full_manifest(Version("run", number), tensors.items()), tensors


async def swap(engine: ServedEngine, folder: Path, number: int) -> None:
    manifest, tensors = version(folder, number)
    assert await engine.stage(manifest, tensors.items()) == manifest.digest
    await engine.commit(manifest.version)


def ask(prompt: tuple[int, ...] = (1, 2, 3), **sampling: Any) -> GenerateRequest:
    return GenerateRequest(prompt, SamplingParams(**{"max_new_tokens": 6, **sampling}))


async def journal(engine: ServedEngine) -> dict[str, Any]:
    return await engine._http.get("/journal", timeout_s=5)


async def test_tokens_come_with_logprobs_versions_and_a_reason(start: Start) -> None:
    engine = await start()
    heard: list[tuple[int, float, int]] = []
    done = await engine.generate(ask(), lambda *token: heard.append(token))
    assert done.token_ids == (4, 5, 6, 7, 8, 9)
    assert (done.versions, done.stop_reason) == ((0,) * 6, StopReason.LENGTH)
    assert heard == list(zip(done.token_ids, done.logprobs, done.versions, strict=True))
    assert isinstance(engine, Pausable)
    assert isinstance(engine, Sleeper)
    assert isinstance(engine, AdapterHost)
    stats = engine.stats()
    assert (stats.generated_tokens, stats.prompt_tokens, stats.reused_tokens) == (6, 0, 3)
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.busy_s > 0


async def test_reasons_are_found_by_the_tokens_and_the_completing_ones_are_kept(
    start: Start, folder: Path
) -> None:
    engine = await start()
    end = engine._tokenizer.eos_token_ids[0]
    assert (await engine.generate(ask(stop_token_ids=(6,)))).stop_reason is StopReason.STOP
    text = await engine.generate(ask((64,), stop=("CD",), max_new_tokens=20))
    assert (text.stop_reason, bytes(text.token_ids)) == (StopReason.STOP, b"ABCD")
    full = await engine.generate(ask((1,) * 252, max_new_tokens=20))
    assert (full.stop_reason, len(full.token_ids)) == (StopReason.CONTEXT, 4)
    assert end == 258, "the fake never samples it: EOS is tested with vLLM itself"


async def test_a_stop_string_the_server_does_not_see_ends_the_completion_all_the_same(start: Start) -> None:
    """The fake looks for no strings: what it samples beyond the match is dropped, and it is told to stop."""
    engine = await start()
    done = await engine.generate(ask((64,), stop=("AB",), max_new_tokens=100))
    assert bytes(done.token_ids) == b"AB"
    for _ in range(100):
        if not (await journal(engine))["running"]:
            break
        await asyncio.sleep(0.01)
    assert not (await journal(engine))["running"]
    assert engine.stats().generated_tokens == 2


async def test_a_swap_in_flight_splits_each_completion_in_order(start: Start, folder: Path) -> None:
    """verl#7990 (case 8): a sync completes with far more requests in flight than slots."""
    engine = await start()
    heard: list[int] = []
    begun = asyncio.Event()

    def hear(_token: int, _logprob: float, number: int) -> None:
        heard.append(number)
        begun.set()

    manifest, tensors = version(folder, 1)
    await engine.stage(manifest, tensors.items())
    tasks = [asyncio.create_task(engine.generate(ask(max_new_tokens=100), hear))]
    tasks += [asyncio.create_task(engine.generate(ask(max_new_tokens=100))) for _ in range(40)]
    await begun.wait()
    await engine.commit(manifest.version)
    done = await asyncio.gather(*tasks)
    assert all(d.versions == tuple(sorted(d.versions)) for d in done)
    assert set(done[0].versions) == {0, 1}
    assert heard == list(done[0].versions)
    assert engine.version == Version("run", 1)


async def test_prompts_are_cached_under_the_version_that_serves(start: Start, folder: Path) -> None:
    """NeMo-RL PR#4018, prime-rl PR#2270, vllm#9744 (case 6): the prefix cache survived a weight update."""
    engine = await start()
    await engine.generate(ask())
    await engine.score((1, 2, 3), SamplingParams())
    await swap(engine, folder, 1)
    await engine.generate(ask())
    await engine.score((1, 2, 3), SamplingParams())
    asked = (await journal(engine))["asked"]
    salts = [body.get("cache_salt") or body.get("extra_key") for body in asked]
    kinds = list(dict.fromkeys(salts))
    assert len(kinds) == 2
    assert salts == sorted(salts, key=kinds.index)


async def test_scores_follow_the_weights_that_were_loaded(start: Start, folder: Path) -> None:
    engine = await start()
    tokens = (1, 2, 3, 4)
    before = await engine.score(tokens, SamplingParams())
    done = await engine.generate(ask((1,), max_new_tokens=3))
    assert before == pytest.approx(done.logprobs)
    assert await engine.score((1,), SamplingParams()) == ()
    await swap(engine, folder, 1)
    after = await engine.score(tokens, SamplingParams())
    assert all(a != b for a, b in zip(after, before, strict=True))
    await swap(engine, folder, 2)
    assert await engine.score(tokens, SamplingParams()) != after


REFUSED = [
    (ask(()), "the prompt is empty"),
    (ask((1, 5000)), "token 5000, which the model does not have"),
    (replace(ask((1,) * 256), id="g3"), "the prompt of request g3 has 256 tokens and the context is 256"),
    (replace(ask(), adapter="tone"), "no adapter named 'tone' is loaded"),
    (replace(ask(), logit_bias={999: 1.0}), "logit_bias holds token 999"),
    (ask(temperature=1e-9), "temperature"),
    (ask((fake.REFUSE,)), "not to its taste"),
]


async def test_what_cannot_be_sampled_is_refused_and_the_engine_serves_on(start: Start) -> None:
    engine = await start()
    for request, said in REFUSED:
        with pytest.raises(EngineError, match=said):
            await engine.generate(request)
    assert len((await engine.generate(ask())).token_ids) == 6


async def test_versions_asked_for_are_served_or_refused(start: Start, folder: Path) -> None:
    engine = await start()
    with pytest.raises(VersionNotReady, match="run@0"):
        await engine.generate(replace(ask(), min_version=1))
    exact = replace(ask(max_new_tokens=200), exact_version=0)
    task = asyncio.create_task(engine.generate(exact))
    await asyncio.sleep(0.05)
    await swap(engine, folder, 1)
    with pytest.raises(VersionNotReady):
        await task
    with pytest.raises(VersionNotReady):
        await engine.generate(exact)
    assert (await engine.generate(replace(ask(), min_version=1))).versions == (1,) * 6


async def test_a_cancelled_request_is_ended_in_the_server(start: Start) -> None:
    engine = await start()
    tasks = [asyncio.create_task(engine.generate(ask(max_new_tokens=200))) for _ in range(8)]
    await asyncio.sleep(0.1)
    assert len((await journal(engine))["running"]) == 8
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for _ in range(200):
        if not (await journal(engine))["running"]:
            break
        await asyncio.sleep(0.01)
    assert not (await journal(engine))["running"]
    assert engine.stats().running == 0


async def test_paused_nothing_is_sampled_and_weights_may_change(start: Start, folder: Path) -> None:
    engine = await start()
    task = asyncio.create_task(engine.generate(ask(max_new_tokens=60)))
    await asyncio.sleep(0.05)
    await engine.pause()
    late = asyncio.create_task(engine.generate(ask()))
    await swap(engine, folder, 1)
    await asyncio.sleep(0.05)
    assert not task.done()
    assert not late.done()
    with pytest.raises(EngineError, match="nothing while it is paused"):
        await engine.score((1, 2), SamplingParams())
    await engine.resume()
    await engine.resume()
    assert set((await task).versions) == {0, 1}
    assert (await late).versions == (1,) * 6


async def test_pausing_may_end_requests_or_let_them_finish(start: Start) -> None:
    engine = await start()
    task = asyncio.create_task(engine.generate(ask(max_new_tokens=200)))
    await asyncio.sleep(0.1)
    await engine.pause("abort")
    aborted = await task
    assert aborted.stop_reason is StopReason.ABORTED
    assert 0 < len(aborted.token_ids) < 200
    await engine.resume()
    task = asyncio.create_task(engine.generate(ask(max_new_tokens=30)))
    await asyncio.sleep(0.02)
    await engine.pause("drain")
    assert len((await task).token_ids) == 30
    await engine.resume()


async def running(engine: ServedEngine, tokens: int = 200) -> asyncio.Task[Completion]:
    """A request of ``tokens`` tokens that has begun."""
    begun = asyncio.Event()
    task = asyncio.create_task(engine.generate(ask(max_new_tokens=tokens), lambda *_: begun.set()))
    await asyncio.wait_for(begun.wait(), 10)
    return task


@pytest.mark.parametrize("held", [False, True], ids=["running", "held"])
async def test_resume_ends_a_drain_that_waits(start: Start, held: bool) -> None:
    """A drain waits for what runs, for ever where that is held: who would go on must not wait for it."""
    engine = await start()
    task = await running(engine)
    if held:
        await engine.pause("keep")
    drain = asyncio.create_task(engine.pause("drain"))
    await asyncio.sleep(0.05)
    assert not drain.done()
    await asyncio.wait_for(engine.resume(), 5)
    await asyncio.wait_for(drain, 5)
    assert not task.done()
    assert len((await engine.generate(ask())).token_ids) == 6, "nothing is paused"
    assert len((await task).token_ids) == 200


async def test_sleep_ends_a_drain_that_waits(start: Start) -> None:
    engine = await start()
    task = await running(engine)
    await engine.pause("keep")
    drain = asyncio.create_task(engine.pause("drain"))
    await asyncio.sleep(0.05)
    await asyncio.wait_for(engine.sleep(), 10)
    await asyncio.wait_for(drain, 5)
    assert (await task).stop_reason is StopReason.ABORTED
    assert engine.version is None


async def test_an_unknown_way_to_pause_is_refused_before_anything_happens(start: Start) -> None:
    engine = await start()
    task = await running(engine)
    with pytest.raises(RequestRefused, match="no way to pause 'later'"):
        await engine.pause("later")  # type: ignore[arg-type]
    assert len((await task).token_ids) == 200
    assert len((await engine.generate(ask())).token_ids) == 6


async def test_a_server_that_does_not_end_its_requests_sleeps_all_the_same_and_it_is_said(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start()
    task = await running(engine)
    monkeypatch.setattr(served_engine, "CONTROL_S", 0.05)
    monkeypatch.setattr(engine, "_end_all", lambda: asyncio.sleep(0))
    with pytest.raises(EngineError, match="1 requests did not end"):
        await engine.sleep()
    assert engine.version is None
    with pytest.raises(EngineError):
        await task


async def test_asleep_every_request_has_ended_and_start_wakes_it(start: Start, folder: Path) -> None:
    """trl#5312 (case 3): old weights served after waking."""
    engine = await start()
    tasks = [asyncio.create_task(engine.generate(ask(max_new_tokens=200))) for _ in range(5)]
    await asyncio.sleep(0.05)
    await engine.pause()
    tasks.append(asyncio.create_task(engine.generate(ask())))
    await asyncio.sleep(0)
    await engine.sleep()
    await engine.sleep()
    assert {done.stop_reason for done in await asyncio.gather(*tasks)} == {StopReason.ABORTED}
    assert engine.version is None
    with pytest.raises(EngineError, match="has not been started"):
        await engine.generate(ask())
    manifest, tensors = version(folder, 3)
    await engine.start(manifest, tensors.items())
    assert (await engine.generate(ask())).versions == (3,) * 6


LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


async def test_an_adapter_is_replaced_whole_and_taken_away_when_no_one_runs_with_it(start: Start) -> None:
    """SkyRL PR#1606, #2129 (case 5): the adapter was gone before the new one was live."""
    engine = await start()
    tensors = {"base_model.model.x.lora_A.weight": torch.ones(4, 2)}
    await engine.load_adapter("tone", LORA, tensors.items())
    with_it = replace(ask(max_new_tokens=40), adapter="tone")
    task = asyncio.create_task(engine.generate(with_it))
    await asyncio.sleep(0.05)
    await engine.load_adapter("tone", LORA, tensors.items())
    assert (await journal(engine))["adapters"] == ["tone#1", "tone#2"]
    await task
    await engine.load_adapter("dry", LORA, tensors.items())
    assert (await journal(engine))["adapters"] == ["dry#3", "tone#2"]
    assert engine.adapters == ("dry", "tone")
    with pytest.raises(WeightsError, match="was not taken"):
        await engine.load_adapter("tone", {**LORA, "target_modules": ["none"]}, tensors.items())
    with pytest.raises(WeightsError, match="rank is 9"):
        await engine.load_adapter("tone", {**LORA, "r": 9}, tensors.items())
    assert (await engine.generate(with_it)).token_ids
    await engine.drop_adapter("tone")
    with pytest.raises(EngineError, match="no adapter named 'tone'"):
        await engine.drop_adapter("tone")
    assert (await journal(engine))["adapters"] == ["dry#3"]


async def test_without_a_rank_adapters_are_refused_by_name(start: Start) -> None:
    engine = await start(adapter_rank=0)
    with pytest.raises(EngineError, match="adapter_rank=16"):
        await engine.load_adapter("tone", LORA, ())


async def test_a_dead_server_is_told_to_all_who_wait_with_its_last_words(start: Start, folder: Path) -> None:
    """prime-rl PR#3020 (case 9): a child failed and its output was never shown."""
    engine = await start()
    tasks = [asyncio.create_task(engine.generate(ask(max_new_tokens=200))) for _ in range(6)]
    await asyncio.sleep(0.1)
    tasks.append(asyncio.create_task(engine.generate(ask((fake.DIE,)))))
    failures = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(failure, EngineDead) for failure in failures)
    said = str(failures[0])
    assert "ValueError: the tensor cores are out of luck" in said
    assert "the server ended with exit status 7" in said
    assert engine.version is None
    with pytest.raises(EngineDead):
        await engine.score((1, 2), SamplingParams())
    with pytest.raises(EngineDead):
        await engine.stage(*_staged(folder))
    manifest, tensors = version(folder, 1)
    await engine.start(manifest, tensors.items())
    assert (await engine.generate(ask())).versions == (1,) * 6


def _staged(folder: Path) -> tuple[Manifest, Any]:
    manifest, tensors = version(folder, 1)
    return manifest, tensors.items()


async def test_one_request_that_fails_fails_alone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "_DEATH_S", 0.05)
    engine = await start()
    if engine.kind == "SGLang":
        pytest.skip("the misfortunes in the stream are vLLM's fake's")
    with pytest.raises(Broken, match="broke"):
        await engine.generate(ask((fake.BREAK_OFF, 1)))
    with pytest.raises(Refused, match="a kernel slipped"):
        await engine.generate(ask((fake.FAIL, 1)))
    with pytest.raises(EngineError, match="spans with a gap"):
        await engine.generate(ask((fake.GAP, 1)))
    with pytest.raises(EngineError, match="after 5 of 6 tokens"):
        await engine.generate(ask((fake.SHORT, 1)))
    assert (await engine.generate(ask())).stop_reason is StopReason.LENGTH


async def test_a_server_that_falls_silent_is_ended(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo-RL PR#3589, #3470 (case 15): a client without timeouts parked for ever."""
    monkeypatch.setattr(life, "HEARTBEAT_S", 0.2)
    engine = await start(silent_s=0.5)
    task = asyncio.create_task(engine.generate(ask(max_new_tokens=200)))
    await asyncio.sleep(0.1)
    assert engine._life is not None
    group = engine._life._server.group
    os.kill(server_of(group), signal.SIGSTOP)
    with pytest.raises(EngineDead, match="has not answered for"):
        await asyncio.wait_for(task, 20)
    assert await gone(group)


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [("crash", "no kernel for this machine"), ("hang", "did not answer within 1 s of its start")],
)
async def test_a_server_that_does_not_come_up_says_why_and_leaves_nothing(
    start: Start, folder: Path, behaviour: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start(serve=False, startup_s=1.0 if behaviour == "hang" else 30.0)
    monkeypatch.setenv("FAKE_SERVER", behaviour)
    manifest, tensors = version(folder, 0)
    with pytest.raises(EngineDead, match=said):
        await engine.start(manifest, tensors.items())
    monkeypatch.delenv("FAKE_SERVER")
    engine._startup_s = 30.0
    await engine.start(manifest, tensors.items())
    assert (await engine.generate(ask())).versions == (0,) * 6


async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve(start: Start, folder: Path) -> None:
    engine = await start()
    manifest, tensors = version(folder, 1)
    some = next(iter(tensors))
    few = {name: t for name, t in tensors.items() if name != some}
    cases: list[tuple[Manifest, Any, str]] = [
        (manifest, few.items(), f"1 of {len(tensors)} tensors are missing, first {some}"),
        (manifest, [*tensors.items(), (some, tensors[some])], f"{some} was given twice"),
        (manifest, [*tensors.items(), ("model.extra", torch.ones(1))], "has no tensor named model.extra"),
        (manifest, {**tensors, some: tensors[some].double()}.items(), "is torch.float64"),
        (manifest, {**tensors, some: tensors[some] + 1}.items(), f"the bytes received for {some}"),
        (full_manifest(manifest.version, few.items()), few.items(), "tensors are missing"),
        (full_manifest(manifest.version, [("x", torch.ones(1))]), (), "the model has no tensor named x"),
        (full_manifest(manifest.version, {**tensors, some: torch.ones(2)}.items()), (), "has shape"),
    ]
    for announced, given, said in cases:
        with pytest.raises(WeightsError, match=said):
            await engine.stage(announced, given)
    with pytest.raises(WeightsError, match="nothing is staged"):
        await engine.commit(manifest.version)
    await engine.stage(manifest, tensors.items())
    with pytest.raises(WeightsError, match="run@1 is staged"):
        await engine.commit(Version("run", 2))
    assert engine.version == Version("run", 0)


async def test_a_commit_that_fails_ends_the_server_for_its_weights_are_unknown(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "_DEATH_S", 0.05)
    engine = await start()
    manifest, tensors = version(folder, 1)
    await engine.stage(manifest, tensors.items())
    assert engine._staged is not None
    engine._staged[1].unlink()
    task = asyncio.create_task(engine.generate(ask(max_new_tokens=200)))
    await asyncio.sleep(0.02)
    with pytest.raises(EngineDead, match="committing run@1 failed"):
        await engine.commit(manifest.version)
    with pytest.raises(EngineDead):
        await task
    assert engine.version is None


async def test_closing_ends_what_runs_and_leaves_no_process_and_no_file(start: Start, folder: Path) -> None:
    engine = await start()
    home, group = engine._home, engine._life._server.group  # type: ignore[union-attr]
    manifest, tensors = version(folder, 1)
    await engine.stage(manifest, tensors.items())
    staged = engine._staged[1]  # type: ignore[index]
    assert staged.stat().st_mode & 0o077 == 0 or staged.parent.stat().st_mode & 0o077 == 0
    task = asyncio.create_task(engine.generate(ask(max_new_tokens=200)))
    await asyncio.sleep(0.05)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineError, match="was closed"):
        await task
    with pytest.raises(EngineError, match="was closed"):
        await engine.generate(ask())
    assert home is not None
    assert not home.exists()
    assert not staged.parent.exists()
    assert await gone(group)


async def test_closing_while_it_comes_up_ends_the_start_at_once(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SERVER", "hang")
    engine = await start(serve=False, startup_s=600.0)
    manifest, tensors = version(folder, 0)
    task = asyncio.create_task(engine.start(manifest, tensors.items()))
    for _ in range(1000):
        if engine._life is not None:
            break
        await asyncio.sleep(0.01)
    home = engine._home
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await asyncio.wait_for(task, 10)
    assert home is not None
    assert not home.exists()


async def test_a_stage_or_a_pause_that_is_cancelled_leaves_nothing_behind(
    start: Start, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start()
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path / "none")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    manifest, tensors = version(folder, 1)
    staging = asyncio.create_task(engine.stage(manifest, tensors.items()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    staging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await staging
    for _ in range(200):
        await asyncio.sleep(0.02)
        if not list(tmp_path.glob("palestra-*")):
            break
    assert not list(tmp_path.glob("palestra-*"))
    running = asyncio.create_task(engine.generate(ask(max_new_tokens=200)))
    await asyncio.sleep(0.05)
    pausing = asyncio.create_task(engine.pause("drain"))
    await asyncio.sleep(0.05)
    pausing.cancel()
    await asyncio.gather(pausing, return_exceptions=True)
    assert len((await engine.generate(ask())).token_ids) == 6, "it is not paused"
    assert len((await running).token_ids) == 200


async def test_a_server_whose_guard_was_killed_is_ended_too(start: Start) -> None:
    engine = await start()
    assert engine._life is not None
    group = engine._life._server.group
    os.kill(group, signal.SIGKILL)
    with pytest.raises(EngineDead):
        await engine.generate(ask(max_new_tokens=200))
    assert await gone(group)
