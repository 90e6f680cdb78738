"""The router: several scripted replicas answer as one engine, whatever some of them do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from palestra.errors import EngineError
from palestra.rollouts.base import (
    Engine,
    EngineDead,
    EngineStats,
    Pausable,
    Sleeper,
    VersionNotReady,
)
from palestra.rollouts.router import RESENDS, SLACK_TOKENS
from palestra.types import Completion, SamplingParams, Version
from rollouts.router_support import Replica, request, routed


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
    with pytest.raises(EngineError, match="other tokens") as caught:
        await router.generate(request(), lambda token, *_: heard.append(token))
    assert not isinstance(caught.value, EngineDead), "the engine that is left serves on"
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
