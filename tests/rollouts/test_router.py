"""The router: several scripted replicas behave as one engine, whatever some of them do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from palestra.errors import EngineError, WeightsError
from palestra.rollouts.base import (
    AdapterHost,
    Engine,
    EngineDead,
    EngineStats,
    GenerateRequest,
    OnToken,
    Pausable,
    PauseMode,
    Sleeper,
    VersionNotReady,
)
from palestra.rollouts.router import RESENDS, SLACK_TOKENS, Proof, Router, keep_replicas
from palestra.types import Completion, Manifest, SamplingParams, StopReason, TensorEntry, Version


def manifest(number: int, digest: str = "ab" * 16) -> Manifest:
    return Manifest(Version("r", number), "full", None, (TensorEntry("w", "F32", (1,), 4, digest),))


class Replica:
    """Answers token by token when told to, and dies when told to."""

    def __init__(self, name: str = "", offset: float = 0.0) -> None:
        self.name = name
        self.offset = offset
        self.asked: list[GenerateRequest] = []
        self.dead = ""
        self.gate = asyncio.Event()
        self.gate.set()
        self.die_after: int | None = None
        self.tokens = [1, 2, 3]
        self.fail_stage: Exception | None = None
        self.wrong_digest = False
        self.paused: list[str] = []
        self.closed = False
        self.scores = 0
        self.commit_gate: asyncio.Event | None = None
        self.commit_error: Exception | None = None
        self.score_gate: asyncio.Event | None = None
        self.loaded: dict[str, list[str]] = {}
        self._version: Version | None = None
        self._staged: Version | None = None
        self._death = asyncio.Event()

    def kill(self) -> None:
        self.dead = "killed"
        self._death.set()

    async def start(self, manifest: Manifest, tensors: Iterable[tuple[str, Any]]) -> str:
        digest = await self.stage(manifest, tensors)
        self._version = manifest.version
        return digest

    async def generate(self, request: GenerateRequest, on_token: OnToken | None = None) -> Completion:
        self.asked.append(request)
        self._check()
        waiter, death = asyncio.ensure_future(self.gate.wait()), asyncio.ensure_future(self._death.wait())
        await asyncio.wait([waiter, death], return_when=asyncio.FIRST_COMPLETED)
        self._check()
        assert self._version is not None
        for at, token in enumerate(self.tokens):
            if at == self.die_after:
                self.kill()
            self._check()
            if on_token:
                on_token(token, -0.5, self._version.number)
        n = len(self.tokens)
        return Completion(tuple(self.tokens), (-0.5,) * n, (self._version.number,) * n, StopReason.EOS)

    async def score(self, token_ids: Sequence[int], sampling: SamplingParams) -> tuple[float, ...]:
        self._check()
        self.scores += 1
        if self.score_gate is not None:
            await self.score_gate.wait()
        return (-0.5 - self.offset,) * (len(token_ids) - 1)

    async def stage(self, manifest: Manifest, tensors: Iterable[tuple[str, Any]]) -> str:
        self._check()
        self.received = [name for name, _ in tensors]
        if self.fail_stage:
            raise self.fail_stage
        self._staged = manifest.version
        return "wrong" if self.wrong_digest else manifest.digest

    async def commit(self, version: Version) -> None:
        self._check()
        if self._staged != version:
            raise WeightsError(f"{version} is not staged")
        if self.commit_gate is not None:
            await self.commit_gate.wait()
        if self.commit_error is not None:
            raise self.commit_error
        self._version = version

    @property
    def version(self) -> Version | None:
        return self._version

    def stats(self) -> EngineStats:
        return EngineStats(1, 2, 3, 4, 0.5, 6)

    async def pause(self, mode: PauseMode = "keep") -> None:
        self.paused.append(mode)

    async def resume(self) -> None:
        self.paused.append("resume")

    async def sleep(self) -> None:
        self._version = None

    async def load_adapter(self, name: str, config: Any, tensors: Iterable[tuple[str, Any]]) -> None:
        self._check()
        self.loaded[name] = [tensor for tensor, _ in tensors]

    async def drop_adapter(self, name: str) -> None:
        del self.loaded[name]

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(sorted(self.loaded))

    async def close(self) -> None:
        self.closed = True

    def _check(self) -> None:
        if self.dead:
            raise EngineDead(f"{self.name} {self.dead}")


def request(prompt: Sequence[int] = (5, 6), *, most: int = 10, **fields: Any) -> GenerateRequest:
    return GenerateRequest(tuple(prompt), SamplingParams(max_new_tokens=most), **fields)


async def routed(*replicas: Replica, prove: bool = True, **settings: Any) -> Router:
    for index, replica in enumerate(replicas):
        replica.name = replica.name or "abc"[index]
    router = Router({replica.name: replica for replica in replicas}, **settings)
    await router.start(manifest(1), [("w", None)])  # type: ignore[list-item]
    if prove:
        await router.score((1, 2), SamplingParams())
    return router


async def test_it_is_an_engine_that_pauses_and_sleeps() -> None:
    a, b = Replica(), Replica()
    router = await routed(a, b)
    engine: Engine = router
    assert isinstance(router, Pausable)
    assert isinstance(router, Sleeper)
    assert engine.version == Version("r", 1)
    assert router.stats() == EngineStats(2, 4, 6, 8, 1.0, 12)
    await router.pause("drain")
    await router.resume()
    assert a.paused == b.paused == ["drain", "resume"]
    await router.close()
    assert a.closed
    assert b.closed


async def test_requests_go_where_the_fewest_tokens_are_outstanding() -> None:
    a, b = Replica(), Replica()
    router = await routed(a, b)
    a.gate.clear()
    b.gate.clear()
    big = asyncio.create_task(router.generate(request((1,), most=100)))
    await asyncio.sleep(0)
    small = [asyncio.create_task(router.generate(request((2 + i,), most=20))) for i in range(4)]
    await asyncio.sleep(0)
    assert [len(a.asked), len(b.asked)] == [1, 4]
    a.gate.set()
    b.gate.set()
    await asyncio.gather(big, *small)
    assert [replica.outstanding for replica in router.replicas] == [0, 0]
    assert not any(replica.prompts for replica in router.replicas)


async def test_a_session_stays_on_its_replica_and_a_group_shares_one() -> None:
    a, b = Replica(), Replica()
    router = await routed(a, b)
    await router.generate(request((1,), session="s"))
    first = a if a.asked else b
    other = b if first is a else a
    first.gate.clear()
    busy = [asyncio.create_task(router.generate(request((9,), session=f"g{i}"))) for i in range(3)]
    await asyncio.sleep(0)
    assert len(first.asked) == 4, "one prompt is computed on one replica"
    turn = asyncio.create_task(router.generate(request((1, 2), session="s")))
    await asyncio.sleep(0)
    assert first.asked[-1].session == "s"
    assert not other.asked
    first.gate.set()
    await asyncio.gather(*busy, turn)


async def test_a_session_leaves_a_replica_that_is_far_busier_than_another() -> None:
    a, b = Replica(), Replica()
    router = await routed(a, b)
    await router.generate(request((1,), session="s"))
    held = a if a.asked else b
    held.gate.clear()
    load = asyncio.create_task(router.generate(request((1,), most=SLACK_TOKENS + 1, session="s")))
    await asyncio.sleep(0)
    await router.generate(request((1, 2), session="s"))
    assert len(held.asked) == 2
    held.gate.set()
    await load


async def test_versions_asked_for_are_honoured_or_refused_as_retryable() -> None:
    router = await routed(Replica(), Replica())
    for fields in ({"min_version": 2}, {"exact_version": 0}):
        with pytest.raises(VersionNotReady, match="no replica serves"):
            await router.generate(request(**fields))
    done = await router.generate(request(min_version=1, exact_version=1))
    assert done.versions == (1, 1, 1)


async def test_what_a_dead_replica_held_is_answered_by_another() -> None:
    """A replica that dies takes no request with it."""
    a, b = Replica(), Replica()
    router = await routed(a, b)
    a.gate.clear()
    b.gate.clear()
    jobs = [asyncio.create_task(router.generate(request((i,)))) for i in range(6)]
    await asyncio.sleep(0)
    assert len(a.asked) == len(b.asked) == 3
    a.kill()
    b.gate.set()
    done = await asyncio.gather(*jobs)
    assert len(done) == 6
    assert router.resent == 3
    assert [(r.name, r.alive) for r in router.replicas] == [("a", False), ("b", True)]
    assert "killed" in router.replicas[0].lost
    await router.generate(request())
    assert len(a.asked) == 3, "nothing goes to a lost replica"


async def test_a_stream_goes_on_after_a_death_without_telling_a_token_twice() -> None:
    a, b = Replica(), Replica()
    router = await routed(a, b)
    a.die_after = b.die_after = None
    heard: list[int] = []
    target = a
    a.die_after = 2
    while target.dead == "":
        heard.clear()
        await router.generate(request(), lambda token, *_: heard.append(token))
    assert heard == [1, 2, 3]
    assert router.resent == 1


async def test_a_stream_that_would_go_on_with_other_tokens_ends_with_an_error() -> None:
    a, b = Replica(), Replica()
    router = await routed(a, b)
    a.die_after, b.tokens = 2, [1, 7, 8]
    heard: list[int] = []
    with pytest.raises(EngineDead, match="other tokens"):
        await router.generate(request(), lambda token, *_: heard.append(token))
    assert heard == [1, 2]


async def test_a_request_that_kills_what_it_meets_stops_before_it_has_killed_all() -> None:
    replicas = [Replica(str(i)) for i in range(RESENDS + 2)]
    router = await routed(*replicas)
    for replica in replicas:
        replica.die_after = 0
    with pytest.raises(EngineDead, match="killed"):
        await router.generate(request())
    assert sum(replica.alive for replica in router.replicas) == 1


async def test_when_every_replica_is_gone_the_error_names_each_reason() -> None:
    a, b = Replica(), Replica()
    router = await routed(a, b)
    a.kill()
    b.kill()
    with pytest.raises(EngineDead, match="every replica is gone") as caught:
        await router.generate(request())
    assert "a: " in str(caught.value)
    assert "b: " in str(caught.value)
    with pytest.raises(EngineDead, match="every replica is gone"):
        await router.score((1, 2), SamplingParams())


async def test_an_error_of_the_request_itself_is_not_a_death() -> None:
    a = Replica()
    router = await routed(a)

    async def refuse(*_: Any) -> Completion:
        raise EngineError("the prompt is empty")

    a.generate = refuse  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="the prompt is empty"):
        await router.generate(request())
    assert router.replicas[0].alive
    assert router.resent == 0


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


PROOF = Proof(manifest(1), (1, 2, 3), (-0.5, -0.5), 1e-3)


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
