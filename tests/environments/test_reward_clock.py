"""A reward's deadline counts the reward's own time, never what it waits for in another room."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from helpers.fake_engine import FakeEngine
from helpers.played import FakeHost, abstained, run
from helpers.templates import CHATML, make_tokenizer
from palestra.environments.chat import Chat
from palestra.environments.episode import Episode
from palestra.environments.single_turn import SingleTurn
from palestra.types import Boundary, Reward, Task

DEADLINE_S = 0.3
"""Of the rewards here; a wait for another room is longer than it."""


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return Chat(make_tokenizer(tmp_path_factory.mktemp("chat"), CHATML))


async def judged(reward: Any, chat: Chat, **options: Any) -> Any:
    environment = SingleTurn([Task(prompt="x")], reward)
    options = {"script": lambda prompt: "7", "reward_deadline_s": DEADLINE_S, **options}
    return await run(None, options.pop("script"), chat, environment=environment, **options)  # type: ignore[arg-type]


async def in_a_sandbox(task: Task, reply: str, ep: Episode) -> float:
    async with ep.sandbox() as box:
        return float((await box.python(reply)).ok)


async def test_waiting_for_a_sandboxs_slot_is_not_the_rewards_time(chat: Chat) -> None:
    """Under load, candidates would abstain for the length of the queue alone."""
    host = FakeHost(slots=1, exec_s=0.15)
    trajectories = await asyncio.gather(*(judged(in_a_sandbox, chat, sandbox_host=host) for _ in range(6)))
    assert [t.outcome for t in trajectories] == [Reward(0.0)] * 6


async def test_a_program_under_its_own_limit_is_not_the_rewards_time(chat: Chat) -> None:
    """A candidate that loops is a 0 by its sandbox's limit, not an abstention by the reward's."""
    trajectory = await judged(in_a_sandbox, chat, sandbox_host=FakeHost(exec_s=3 * DEADLINE_S))
    assert trajectory.outcome == Reward(0.0)


async def test_programs_side_by_side_stop_the_clock_once(chat: Chat) -> None:
    async def reward(task: Task, reply: str, ep: Episode) -> float:
        async with ep.sandbox() as box:
            await asyncio.gather(*(box.python(str(n)) for n in range(3)))
        return 1.0

    host = FakeHost(slots=1, exec_s=0.2)
    assert (await judged(reward, chat, sandbox_host=host)).outcome == Reward(1.0)


async def test_a_further_turn_and_an_inner_reward_are_not_the_rewards_time(chat: Chat) -> None:
    async def inner() -> float:
        await asyncio.sleep(0.6 * DEADLINE_S)
        return 0.5

    async def reward(task: Task, reply: str, ep: Episode) -> Any:
        await ep.say("Sure?")
        return sum([await ep.grade(inner), await ep.grade(inner)])  # type: ignore[list-item]

    assert (await judged(reward, chat, delay_s=2 * DEADLINE_S)).outcome == Reward(1.0)


async def test_the_rewards_own_time_is_counted_before_and_after_a_sandbox(chat: Chat) -> None:
    async def reward(task: Task, reply: str, ep: Episode) -> float:
        await asyncio.sleep(0.6 * DEADLINE_S)
        async with ep.sandbox() as box:
            await box.python(reply)
        await asyncio.sleep(0.6 * DEADLINE_S)
        return 1.0

    outcome = abstained(await judged(reward, chat, sandbox_host=FakeHost()))
    assert "did not return within 0.3 s" in outcome.reason
    assert outcome.boundary is Boundary.REWARD


async def test_a_reward_may_use_a_sandbox_while_it_is_being_ended(chat: Chat) -> None:
    async def reward(task: Task, reply: str, ep: Episode) -> float:
        async with ep.sandbox() as box:
            try:
                await asyncio.sleep(3600)
            finally:
                await box.python("clean up")
        return 1.0

    outcome = abstained(await judged(reward, chat, sandbox_host=FakeHost(exec_s=0.05)))
    assert "did not return within 0.3 s" in outcome.reason


async def test_a_program_that_a_reward_left_running_ends_as_usual(chat: Chat) -> None:
    left: list[Any] = []

    async def reward(box: Any) -> float:
        async def two() -> bool:
            return [(await box.python(str(n))).exit_code for n in range(2)] == [1, 1]

        left.append(asyncio.create_task(two()))
        await asyncio.sleep(0)
        return 1.0

    async def play(task: Task, ep: Episode) -> Any:
        await ep.say()
        async with ep.sandbox() as box:
            value = await ep.grade(reward, box)
            assert await left[0]
        return value

    assert (await run(play, ["7"], chat, sandbox_host=FakeHost(exec_s=0.05))).outcome == Reward(1.0)


async def test_rewards_side_by_side_have_a_clock_each(chat: Chat) -> None:
    async def endless() -> float:
        await asyncio.sleep(3600)
        return 1.0

    async def play(task: Task, ep: Episode) -> Any:
        await ep.say()
        await asyncio.gather(ep.grade(endless), ep.grade(endless))
        return 1.0

    outcome = abstained(await run(play, ["7"], chat, reward_deadline_s=DEADLINE_S))
    assert "endless did not return within 0.3 s" in outcome.reason


async def test_the_episodes_deadline_bounds_what_the_reward_waits_for(chat: Chat) -> None:
    """Case 20 (SkyRL#1173): no wait is without an end."""
    trajectory = await judged(
        in_a_sandbox, chat, sandbox_host=FakeHost(exec_s=3600), deadline_s=2 * DEADLINE_S
    )
    outcome = abstained(trajectory)
    assert "the episode did not end within 0.6 s" in outcome.reason
    assert outcome.boundary is Boundary.SANDBOX
    assert trajectory.sampled_count == 2


@pytest.mark.parametrize("last", ["sandbox", "reward"])
async def test_tokens_sampled_before_the_episodes_deadline_are_kept(chat: Chat, last: str) -> None:
    """Case 15 (NeMo-RL PR#3589): whatever ends an episode, its sampled turns stay."""

    async def endless() -> float:
        await asyncio.sleep(3600)
        return 1.0

    async def play(task: Task, ep: Episode) -> Any:
        await ep.say("a")
        await ep.say("b")
        if last == "reward":
            return await ep.grade(endless)
        async with ep.sandbox() as box:
            return float((await box.python("loop")).ok)

    engine = FakeEngine(["12", "345"], chat.tokenizer)  # type: ignore[arg-type]
    trajectory = await run(
        play, None, chat, engine=engine, sandbox_host=FakeHost(exec_s=3600), deadline_s=0.2
    )
    assert abstained(trajectory).boundary is Boundary(last)
    assert trajectory.token_ids == engine.seen[-1]
    assert trajectory.sampled_count == 3 + 4
