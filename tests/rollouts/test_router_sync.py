"""The router: a sync reaches every replica, nothing serves unproven, members come and go between syncs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from palestra.errors import EngineError, WeightsError
from palestra.rollouts.base import (
    AdapterHost,
    EngineDead,
    VersionNotReady,
)
from palestra.rollouts.router import Proof, Router, keep_replicas
from palestra.types import SamplingParams, Version
from rollouts.router_support import PROOF, Replica, manifest, request, routed


async def test_a_sync_reaches_every_replica_and_produces_the_tensors_once() -> None:
    a, b = Replica(), Replica()
    router = await routed(a, b)
    produced: list[str] = []

    def tensors() -> Iterable[tuple[str, Any]]:
        for name in ("w", "v"):
            produced.append(name)
            yield name, None

    assert await router.stage(manifest(2), tensors()) == manifest(2).digest
    assert a.received == b.received == produced == ["w", "v"]
    assert router.version == Version("r", 1), "staged is not served"
    await router.commit(Version("r", 2))
    assert router.version == Version("r", 2)
    with pytest.raises(WeightsError, match="not staged"):
        await router.commit(Version("r", 3))


async def test_nothing_serves_between_a_commit_and_its_proof() -> None:
    """verl#7495: a version serves once it is proven."""
    a, b = Replica(), Replica()
    router = await routed(a, b)
    await router.stage(manifest(2), [])
    await router.commit(Version("r", 2))
    job = asyncio.create_task(router.generate(request()))
    await asyncio.sleep(0.01)
    assert not a.asked
    assert not b.asked
    await router.score((1, 2), SamplingParams())
    assert (await job).versions == (2, 2, 2)
    assert a.scores == b.scores == 2


async def test_nothing_serves_while_some_have_committed_and_others_have_not() -> None:
    a, b = Replica(), Replica()
    router = await routed(a, b)
    b.commit_gate = asyncio.Event()
    await router.stage(manifest(2), [])
    commit = asyncio.create_task(router.commit(Version("r", 2)))
    await asyncio.sleep(0.01)
    assert a.version == Version("r", 2)
    job = asyncio.create_task(router.generate(request()))
    await asyncio.sleep(0.01)
    assert not a.asked
    assert not b.asked
    b.commit_gate.set()
    await commit
    await router.score((1, 2), SamplingParams())
    assert (await job).versions == (2, 2, 2)


async def test_a_cancelled_commit_is_finished_everywhere_before_it_says_so() -> None:
    a, b = Replica(), Replica()
    router = await routed(a, b)
    b.commit_gate = asyncio.Event()
    await router.stage(manifest(2), [])
    commit = asyncio.create_task(router.commit(Version("r", 2)))
    await asyncio.sleep(0.01)
    commit.cancel()
    await asyncio.sleep(0.01)
    assert not commit.done()
    b.commit_gate.set()
    with pytest.raises(asyncio.CancelledError):
        await commit
    assert router.version == Version("r", 2)
    assert all(replica.alive for replica in router.replicas)


async def test_a_commit_that_raises_anything_at_all_puts_that_replica_out() -> None:
    a, b = Replica(), Replica()
    router = await routed(a, b)
    b.commit_error = RuntimeError("out of memory")
    await router.stage(manifest(2), [])
    await router.commit(Version("r", 2))
    assert "out of memory" in router.replicas[1].lost
    await router.score((1, 2), SamplingParams())
    assert (await router.generate(request())).versions == (2, 2, 2)
    a.commit_error = RuntimeError("too")
    await router.stage(manifest(3), [])
    with pytest.raises(EngineDead, match="RuntimeError: too"):
        await router.commit(Version("r", 3))


async def test_a_proof_of_the_last_version_proves_nothing_of_the_next() -> None:
    a = Replica()
    router = await routed(a, prove=False, proof_s=0.05)
    a.score_gate = asyncio.Event()
    proving = asyncio.create_task(router.score((1, 2), SamplingParams()))
    await asyncio.sleep(0.01)
    await router.stage(manifest(2), [])
    await router.commit(Version("r", 2))
    a.score_gate.set()
    await proving
    with pytest.raises(VersionNotReady, match="no version was proven"):
        await router.generate(request())


async def test_nobody_joins_between_a_stage_and_its_commit() -> None:
    a, fresh = Replica(), Replica()
    router = await routed(a)
    await router.stage(manifest(2), [])
    with pytest.raises(WeightsError, match="r@2 is staged on the others"):
        await router.join("new", fresh, PROOF, [])
    await router.commit(Version("r", 2))
    assert [replica.name for replica in router.replicas] == ["a"]


async def test_nobody_joins_in_the_middle_of_a_commit() -> None:
    a, fresh = Replica(), Replica()
    router = await routed(a)
    a.commit_gate = asyncio.Event()
    await router.stage(manifest(2, "cd" * 16), [])
    commit = asyncio.create_task(router.commit(Version("r", 2)))
    joining = asyncio.create_task(router.join("new", fresh, PROOF, []))
    await asyncio.sleep(0.01)
    a.commit_gate.set()
    await commit
    with pytest.raises(WeightsError, match="the replicas serve"):
        await joining
    await router.score((1, 2), SamplingParams())
    assert (await router.generate(request())).versions == (2, 2, 2)


async def test_without_a_proof_a_request_gives_up_and_says_what_is_missing() -> None:
    router = await routed(Replica(), prove=False, proof_s=0.01)
    with pytest.raises(VersionNotReady, match="no version was proven"):
        await router.generate(request())


async def test_replicas_that_disagree_on_the_probe_do_not_serve() -> None:
    a, b = Replica(), Replica(offset=0.01)
    router = await routed(a, b, prove=False, proof_s=0.01)
    with pytest.raises(WeightsError, match=r"replica b disagrees with a by 0\.01"):
        await router.score((1, 2), SamplingParams())
    with pytest.raises(VersionNotReady):
        await router.generate(request())


async def test_a_score_that_is_not_a_number_agrees_with_nothing() -> None:
    a, b = Replica(), Replica(offset=float("nan"))
    router = await routed(a, b, prove=False)
    with pytest.raises(WeightsError, match="disagrees"):
        await router.score((1, 2), SamplingParams())


async def test_a_proven_router_scores_once_and_elsewhere_if_that_replica_dies() -> None:
    a, b = Replica(), Replica()
    router = await routed(a, b)
    await router.score((1, 2), SamplingParams())
    assert a.scores + b.scores == 3
    a.kill()
    assert await router.score((1, 2), SamplingParams()) == (-0.5,)


@pytest.mark.parametrize("how", ["raises", "digest"])
async def test_a_replica_that_fails_a_sync_is_out_and_the_others_serve_on(how: str) -> None:
    a, b = Replica(), Replica()
    router = await routed(a, b)
    a.fail_stage = WeightsError("the disk is full") if how == "raises" else None
    a.wrong_digest = how == "digest"
    await router.stage(manifest(2), [])
    await router.commit(Version("r", 2))
    await router.score((1, 2), SamplingParams())
    assert [replica.alive for replica in router.replicas] == [False, True]
    assert (await router.generate(request())).versions == (2, 2, 2)


async def test_a_sync_that_fails_everywhere_raises_and_loses_nobody() -> None:
    a, b = Replica(), Replica()
    router = await routed(a, b)
    a.fail_stage = b.fail_stage = WeightsError("w has shape [2]")
    with pytest.raises(WeightsError, match="shape"):
        await router.stage(manifest(2), [])
    assert all(replica.alive for replica in router.replicas)
    assert (await router.generate(request())).versions == (1, 1, 1)


async def test_a_new_replica_joins_after_it_proved_the_version() -> None:
    a, fresh = Replica(), Replica()
    router = await routed(a)
    a.kill()
    with pytest.raises(EngineDead):
        await router.generate(request())
    await router.join("a", fresh, PROOF, [("w", None)])  # type: ignore[list-item]
    assert (await router.generate(request())).token_ids == (1, 2, 3)
    assert fresh.scores == 1


@pytest.mark.parametrize(
    ("fresh", "proof", "message"),
    [
        (Replica(offset=0.1), PROOF, "did not prove"),
        (Replica(offset=float("nan")), PROOF, "did not prove"),
        (Replica(), Proof(manifest(0, "cd" * 16), (1, 2), (-0.5,), 1e-3), "replicas serve"),
    ],
    ids=["other numbers", "no numbers", "another version"],
)
async def test_a_replica_that_does_not_prove_the_serving_version_is_no_member(
    fresh: Replica, proof: Proof, message: str
) -> None:
    """DESIGN: a new engine gets no traffic before it proved its version."""
    router = await routed(Replica())
    with pytest.raises(WeightsError, match=message):
        await router.join("new", fresh, proof, [])
    assert [replica.name for replica in router.replicas] == ["a"]
    assert not fresh.asked


async def test_a_replica_that_was_proven_while_a_sync_went_by_is_no_member() -> None:
    router = await routed(Replica())
    fresh = Replica()
    scored = fresh.score

    async def slow(*arguments: Any) -> tuple[float, ...]:
        await router.stage(manifest(2, "cd" * 16), [])
        await router.commit(Version("r", 2))
        return await scored(*arguments)

    fresh.score = slow  # type: ignore[method-assign]
    with pytest.raises(WeightsError, match="the replicas serve"):
        await router.join("new", fresh, PROOF, [])
    assert len(router.replicas) == 1


async def test_a_living_name_is_not_replaced_and_an_unknown_one_not_removed() -> None:
    a = Replica()
    router = await routed(a)
    with pytest.raises(EngineError, match="replica a is alive"):
        await router.join("a", Replica(), PROOF, [])
    with pytest.raises(EngineError, match="there is no replica z"):
        router.remove("z")
    assert router.remove("a") is a
    with pytest.raises(EngineDead):
        await router.generate(request())


async def test_asleep_nothing_serves_until_it_is_started_and_proven_again() -> None:
    """trl#5312: weights are verified across sleep and wake."""
    a = Replica()
    router = await routed(a, proof_s=0.01)
    await router.sleep()
    assert router.version is None
    with pytest.raises(VersionNotReady):
        await router.generate(request())
    await router.start(manifest(2), [])
    await router.score((1, 2), SamplingParams())
    assert (await router.generate(request())).versions == (2, 2, 2)


async def test_a_replica_that_cannot_pause_is_refused_by_name() -> None:
    class Plain:
        version = Version("r", 1)

    router = Router({"plain": Plain()})  # type: ignore[dict-item]
    with pytest.raises(EngineError, match="replica plain cannot be paused"):
        await router.pause()
    with pytest.raises(EngineError, match="replica plain cannot sleep"):
        await router.sleep()
    with pytest.raises(EngineError, match="at least one"):
        Router({})


async def test_cancelling_a_request_cancels_it_on_its_replica_and_frees_its_share() -> None:
    a = Replica()
    router = await routed(a)
    a.gate.clear()
    job = asyncio.create_task(router.generate(request()))
    await asyncio.sleep(0)
    assert router.replicas[0].outstanding == 12
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert router.replicas[0].outstanding == 0


async def test_an_adapter_is_served_once_every_living_replica_has_it() -> None:
    a, b = Replica(), Replica()
    router = await routed(a, b)
    assert isinstance(router, AdapterHost)
    await router.load_adapter("maths", {}, iter([("A", None), ("B", None)]))  # type: ignore[list-item]
    assert a.loaded == b.loaded == {"maths": ["A", "B"]}
    b.loaded["other"] = []
    assert router.adapters == ("maths",)
    await router.drop_adapter("maths")
    assert router.adapters == ()


async def test_lost_replicas_are_replaced_by_ones_that_prove_themselves() -> None:
    a, b = Replica(), Replica()
    router = await routed(a, b)
    made = [Replica(offset=1.0), Replica(), Replica()]
    waiting = list(made)
    keeping = asyncio.create_task(keep_replicas(router, lambda: waiting.pop(0), PROOF, list, every_s=0.001))
    a.kill()
    while not a.asked:
        await router.generate(request())
    for _ in range(1000):
        await asyncio.sleep(0.001)
        if all(replica.alive for replica in router.replicas):
            break
    assert {replica.name: replica.engine for replica in router.replicas} == {"a": made[1], "b": b}
    assert made[0].closed, "the one that proved nothing is closed"
    assert a.closed
    assert not made[1].closed
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    assert len(waiting) == 1


async def test_a_death_that_no_request_has_met_yet_hides_no_version() -> None:
    a, b = Replica(), Replica()
    router = await routed(a, b)
    a.kill()
    a._version = None
    assert router.version == Version("r", 1)
    assert (await router.generate(request())).versions == (1, 1, 1)
