"""Native engines in processes of their own, alone and behind the router: whole, killed and frozen."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_lora import make_lora
from palestra.errors import EngineError, WeightsError
from palestra.rollouts.base import (
    AdapterHost,
    EngineDead,
    GenerateRequest,
    Pausable,
    Sleeper,
    VersionNotReady,
)
from palestra.rollouts.router import Proof, Router
from palestra.rollouts.served import life
from palestra.rollouts.served.child import ChildServer
from palestra.rollouts.served.http import Gone
from palestra.rollouts.served.replica import ReplicaEngine
from palestra.types import Completion, Manifest, SamplingParams, StopReason, Version
from rollouts.conftest import Start
from rollouts.support import Tiny, manifest_of, ragged_prompts

pytestmark = pytest.mark.timeout(240)
PROBE = (5, 6, 7, 8, 9)


def replica(tiny: Tiny, **options: Any) -> ReplicaEngine:
    return ReplicaEngine(tiny.folder, **{"dtype": "fp32", "threads": 1, "max_running": 8} | options)


@pytest.fixture
async def one(tiny: Tiny) -> AsyncIterator[ReplicaEngine]:
    engine = replica(tiny)
    await engine.start(manifest_of(tiny.tensors), tiny.tensors.items())
    yield engine
    await engine.close()


def request(prompt: list[int], **params: Any) -> GenerateRequest:
    settings: dict[str, Any] = {"max_new_tokens": 12} | params
    return GenerateRequest(tuple(prompt), SamplingParams(**settings))


async def running(engine: ReplicaEngine, tokens: int = 250) -> asyncio.Task[Completion]:
    """A request of ``tokens`` tokens that has begun, none of them an end token."""
    begun = asyncio.Event()
    asked = GenerateRequest((1, 2), SamplingParams(max_new_tokens=tokens), logit_bias={258: -100.0})
    job = asyncio.create_task(engine.generate(asked, lambda *_: begun.set()))
    await asyncio.wait_for(begun.wait(), 30)
    return job


def kill(engine: ReplicaEngine, number: int = signal.SIGKILL) -> None:
    """The server itself, not the shells that guard it."""
    assert engine._life is not None
    group = engine._life._server.group
    for pid in Path(f"/proc/{group}/task/{group}/children").read_text().split():
        if Path(f"/proc/{pid}/exe").resolve().name.startswith("python"):
            os.kill(int(pid), number)


async def test_a_replica_says_what_the_engine_says(tiny: Tiny, one: ReplicaEngine, serve: Start) -> None:
    """All of one life: tokens, scores, versions, adapters, pausing, a sync, sleep."""
    here = await serve()
    assert isinstance(one, Pausable)
    assert isinstance(one, Sleeper)
    assert isinstance(one, AdapterHost)
    prompts = ragged_prompts(6, seed=50)
    asked = [request(p, seed=i, top_k=20, temperature=0.8) for i, p in enumerate(prompts)]
    heard: list[int] = []
    listen: list[Any] = [lambda token, *_: heard.append(token), *[None] * 5]
    theirs = await asyncio.gather(*map(one.generate, asked, listen))
    ours = await asyncio.gather(*(here.generate(a) for a in asked))
    assert [c.token_ids for c in theirs] == [c.token_ids for c in ours]
    assert [c.stop_reason for c in theirs] == [c.stop_reason for c in ours]
    for a, b in zip(ours, theirs, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-6)
    assert heard == list(theirs[0].token_ids)
    assert await one.score(PROBE, SamplingParams(top_k=3)) == pytest.approx(
        await here.score(PROBE, SamplingParams(top_k=3)), abs=1e-6
    )
    with pytest.raises(EngineError, match="holds token 999999"):
        await one.generate(request([999_999]))
    with pytest.raises(VersionNotReady):
        await one.generate(GenerateRequest((1,), SamplingParams(), exact_version=3))

    changed = tiny.changed(seed=1)
    manifest = manifest_of(changed, 1)
    assert await one.stage(manifest, changed.items()) == manifest.digest
    swapped = await running(one)
    await one.commit(Version("test", 1))
    assert one.version == Version("test", 1)
    await here.stage(manifest, changed.items())
    await here.commit(Version("test", 1))
    assert await one.score(PROBE, SamplingParams()) == pytest.approx(
        await here.score(PROBE, SamplingParams()), abs=1e-6
    )
    versions = (await swapped).versions
    assert versions == tuple(sorted(versions))
    assert set(versions) == {0, 1}
    with pytest.raises(WeightsError, match="cannot be committed"):
        await one.commit(Version("test", 5))

    config, parts = make_lora(tiny.tensors)
    await one.load_adapter("maths", config, parts.items())
    await here.load_adapter("maths", config, parts.items())
    with_adapter = GenerateRequest((5, 6), SamplingParams(max_new_tokens=8, seed=3), adapter="maths")
    assert (await one.generate(with_adapter)).token_ids == (await here.generate(with_adapter)).token_ids
    with pytest.raises(EngineError, match="no adapter named 'math'"):
        await one.generate(GenerateRequest((5,), SamplingParams(), adapter="math"))

    await one.pause("abort")
    await one.resume()
    await one.sleep()
    assert one.version is None
    await one.start(manifest_of(changed, 2), changed.items())
    assert one.version == Version("test", 2)
    assert set((await one.generate(request([1]))).versions) == {2}


async def test_a_cancelled_request_is_cancelled_in_the_process(one: ReplicaEngine) -> None:
    job = await running(one)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    state: dict[str, Any] = {"running": -1}
    for _ in range(400):
        state = await one._http.get("/v1/palestra/state", timeout_s=5)
        if state["running"] == state["waiting"] == 0:
            break
        await asyncio.sleep(0.01)
    assert (state["running"], state["waiting"]) == (0, 0)
    assert state["generated_tokens"] < 250, "it was ended, not awaited"


async def test_a_killed_process_fails_what_waits_with_its_last_words(one: ReplicaEngine) -> None:
    """prime-rl PR#3020: a child failed and its traceback was never shown."""
    job = await running(one)
    kill(one)
    with pytest.raises(EngineDead, match="the replica server ended") as caught:
        await job
    assert "exit status" in caught.value.detail
    assert one.version is None
    with pytest.raises(EngineDead):
        await one.generate(request([1]))


async def test_asleep_what_ran_and_what_waited_in_the_process_has_ended(tiny: Tiny) -> None:
    """A pause ends what runs; requests beyond ``max_running`` wait in the process and must end too."""
    engine = replica(tiny, max_running=2)
    try:
        await engine.start(manifest_of(tiny.tensors), tiny.tensors.items())
        begun = asyncio.Event()
        endless = [
            GenerateRequest((i, 2), SamplingParams(max_new_tokens=250, seed=i), logit_bias={258: -100.0})
            for i in range(12)
        ]
        jobs = [asyncio.create_task(engine.generate(asked, lambda *_: begun.set())) for asked in endless]
        await begun.wait()
        await asyncio.wait_for(engine.sleep(), 20)
        done = await asyncio.gather(*jobs)
        assert {c.stop_reason for c in done[4:]} == {StopReason.ABORTED}
        assert any(not c.token_ids for c in done), "some of them waited"
        await engine.start(manifest_of(tiny.tensors, 1), tiny.tensors.items())
        assert engine.version == Version("test", 1)
    finally:
        await engine.close()


FATAL = 66
FRAGILE = f"""
import sys
from palestra.cli.main import main
from palestra.rollouts.native.batch import DecodeBatch
submit = DecodeBatch.submit
def fragile(self, rows):
    if any(row.request.prompt_ids[0] == {FATAL} for row in rows):
        raise RuntimeError("the cache is torn")
    submit(self, rows)
DecodeBatch.submit = fragile
sys.exit(main(sys.argv[1:]))
"""
"""A server whose decode thread dies of one prompt, while the process lives on."""


@pytest.fixture
async def fragile(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ReplicaEngine]:
    launch = ChildServer.launch

    async def launched(command: list[str], *more: Any, **named: Any) -> ChildServer:
        assert command[1:3] == ["-m", "palestra"]
        return await launch([command[0], "-c", FRAGILE, *command[3:]], *more, **named)

    monkeypatch.setattr(ChildServer, "launch", launched)
    engine = replica(tiny)
    await engine.start(manifest_of(tiny.tensors), tiny.tensors.items())
    yield engine
    await engine.close()


async def test_a_replica_whose_decode_thread_died_is_dead_though_its_process_answers(
    fragile: ReplicaEngine,
) -> None:
    """A server that computes nothing and answers its heartbeat would be a router's idlest for ever."""
    assert len((await fragile.generate(request([1]))).token_ids) > 0
    with pytest.raises(EngineDead, match="the cache is torn"):
        await asyncio.wait_for(fragile.generate(request([FATAL])), 3)
    assert fragile.version is None


async def test_a_heartbeat_tells_that_the_engine_in_a_living_process_is_dead(
    fragile: ReplicaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "HEARTBEAT_S", 0.1)
    body = {"prompt_ids": [FATAL], "sampling": {"max_new_tokens": 2}}
    with pytest.raises(Gone):  # past the engine here: only the heartbeat can find it
        await fragile._http.post("/v1/palestra/generate", body, timeout_s=5)
    for _ in range(1000):
        if fragile.version is None:
            break
        await asyncio.sleep(0.01)
    with pytest.raises(EngineDead, match="the cache is torn"):
        await fragile.generate(request([1]))


async def test_weights_that_are_not_the_manifests_never_serve(tiny: Tiny, one: ReplicaEngine) -> None:
    """verl#7495, slime#1673: what the engine holds is what was published."""
    before = await one.score(PROBE, SamplingParams())
    other = tiny.changed(seed=2)
    wrong = dict(other)
    wrong["model.norm.weight"] = wrong["model.norm.weight"] + 1
    with pytest.raises(WeightsError, match="not those its manifest announced"):
        await one.stage(manifest_of(other, 1), wrong.items())
    assert one.version == Version("test", 0)
    assert await one.score(PROBE, SamplingParams()) == before
    assert set((await one.generate(request([1], max_new_tokens=2))).versions) == {0}


async def test_behind_the_router_a_killed_replica_loses_no_request_and_joins_again_when_proven(
    tiny: Tiny, serve: Start
) -> None:
    """A dead replica is found in seconds, its requests are sent again, a new one proves its version first."""
    here = await serve()
    router = Router({"a": replica(tiny), "b": replica(tiny)})
    manifest: Manifest = manifest_of(tiny.tensors)
    try:
        await router.start(manifest, tiny.tensors.items())
        logprobs = await router.score(PROBE, SamplingParams())
        assert logprobs == pytest.approx(await here.score(PROBE, SamplingParams()), abs=1e-6)
        prompts, begun = ragged_prompts(40, seed=51), asyncio.Event()
        jobs = [
            asyncio.create_task(router.generate(request(p, seed=i, max_new_tokens=60), hear))
            for (i, p), hear in zip(enumerate(prompts), [lambda *_: begun.set(), *[None] * 39], strict=True)
        ]
        victim = router.replicas[0]
        await asyncio.wait_for(begun.wait(), 30)
        assert victim.outstanding > 0
        kill(victim.engine)  # type: ignore[arg-type]
        done = await asyncio.gather(*jobs)
        ours = await asyncio.gather(
            *(here.generate(request(p, seed=i, max_new_tokens=60)) for i, p in enumerate(prompts))
        )
        assert [c.token_ids for c in done] == [c.token_ids for c in ours]
        assert router.resent > 0
        assert not victim.alive
        await router.remove("a").close()
        proof = Proof(manifest, PROBE, logprobs, 1e-4)
        unproven, off = replica(tiny), tuple(value - 1 for value in logprobs)
        with pytest.raises(WeightsError, match="did not prove"):
            await router.join("a", unproven, Proof(manifest, PROBE, off, 1e-4), tiny.tensors.items())
        await unproven.close()
        await router.join("a", replica(tiny), proof, tiny.tensors.items())
        assert sorted(r.name for r in router.replicas if r.alive) == ["a", "b"]
    finally:
        await router.close()


@pytest.mark.slow
@pytest.mark.parametrize("guards", [False, True], ids=["server", "server and its guards"])
async def test_a_frozen_process_is_found_and_ended(tiny: Tiny, guards: bool) -> None:
    """A process that is stopped answers nothing and ends nothing: silence alone must be enough."""
    engine = replica(tiny, silent_s=3)
    await engine.start(manifest_of(tiny.tensors), tiny.tensors.items())
    job = await running(engine)
    kill(engine, signal.SIGSTOP)
    if guards:
        os.killpg(engine._life._server.group, signal.SIGSTOP)  # type: ignore[union-attr]
    try:
        with pytest.raises(EngineDead, match="has not answered for 3 s"):
            await asyncio.wait_for(job, 60)
    finally:
        await engine.close()
