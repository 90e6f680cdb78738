"""A prompt, an answer, a reward: every way a reward can fail is an abstention that names it."""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import cloudpickle
import pytest
import pytest_asyncio

from helpers.fake_engine import FakeEngine
from helpers.templates import CHATML, make_tokenizer
from palestra.environments.base import validate_tasks
from palestra.environments.chat import Chat
from palestra.environments.runner import run_episode
from palestra.environments.single_turn import SingleTurn
from palestra.environments.worker import RewardWorkers
from palestra.errors import RewardError, TaskError
from palestra.sandboxes.base import SandboxSpec
from palestra.types import Abstain, Boundary, Outcome, Reward, SamplingParams, Task

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TASKS = [Task(prompt=f"What is {n} + 1?", secret={"answer": str(n + 1)}) for n in range(3)]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return Chat(make_tokenizer(tmp_path_factory.mktemp("chat"), CHATML))


@pytest_asyncio.fixture
async def workers() -> AsyncIterator[RewardWorkers]:
    pool = RewardWorkers(1)
    yield pool
    await pool.close()


async def outcome_of(
    environment: SingleTurn,
    chat: Chat,
    workers: RewardWorkers,
    *,
    reply: str = "1",
    reward_deadline_s: float = 60.0,
) -> Outcome:
    trajectory = await run_episode(
        environment,
        TASKS[0],
        id="g0.0",
        engine=FakeEngine(lambda prompt: reply, chat.tokenizer),
        chat=chat,
        sampling=SamplingParams(),
        workers=workers,
        deadline_s=90.0,
        reward_deadline_s=reward_deadline_s,
    )
    assert trajectory.sampled_count > len(reply)  # whatever the reward did, the tokens are kept
    return trajectory.outcome


def exact(task: Task, reply: str) -> float:
    return float(reply == task.secret["answer"])


async def later(task: Task, reply: str) -> bool:
    await asyncio.sleep(0)
    return reply == task.secret["answer"]


async def asks_again(task: Task, reply: str, ep: Any) -> Reward:
    second = await ep.say("Are you sure?")
    return Reward(float(second == reply), {"turns": len(ep.turns)})


class Judge:
    def __init__(self, answer: str) -> None:
        self.answer = answer

    def __call__(self, task: Task, reply: str) -> float:
        return float(reply == self.answer)


@pytest.mark.parametrize(
    "reward",
    [
        exact,
        later,
        asks_again,
        Judge("1"),
        functools.partial(exact),
        lambda t, r: exact(t, r),
        Judge("1").__call__,
    ],
)
async def test_every_kind_of_reward_judges(chat: Chat, workers: RewardWorkers, reward: Any) -> None:
    outcome = await outcome_of(SingleTurn(TASKS, reward), chat, workers)
    assert isinstance(outcome, Reward)
    assert outcome.value == 1.0


async def test_a_wrong_answer_is_a_zero(chat: Chat, workers: RewardWorkers) -> None:
    assert await outcome_of(SingleTurn(TASKS, exact), chat, workers, reply="5") == Reward(0.0)


async def test_a_reward_may_abstain(chat: Chat, workers: RewardWorkers) -> None:
    def unsure(task: Task, reply: str) -> Abstain:
        return Abstain("cannot tell")

    assert await outcome_of(SingleTurn(TASKS, unsure), chat, workers) == Abstain("cannot tell")


async def test_a_reward_that_raises_abstains_with_the_traceback_of_its_process(
    chat: Chat, workers: RewardWorkers
) -> None:
    """Cases 9 and 14 (prime-rl PR#3020, NeMo-Gym PR#2552)."""

    def broken(task: Task, reply: str) -> float:
        return float(reply.split("=")[1])

    outcome = await outcome_of(SingleTurn(TASKS, broken), chat, workers)
    assert isinstance(outcome, Abstain)
    assert "broken raised IndexError: list index out of range" in outcome.reason
    assert "test_single_turn.py:" in outcome.reason
    assert 'return float(reply.split("=")[1])' in outcome.detail
    assert outcome.boundary is Boundary.REWARD


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "None: no verdict"),
        ("correct", "a str: 'correct'"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (1.5, "1.5, outside the declared range"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_reward_that_returns_no_verdict_is_named(
    chat: Chat, workers: RewardWorkers, value: Any, said: str, is_async: bool
) -> None:
    """Case 17 (OpenEnv PR#1025, #1199, Repo2RLEnv#144): a missing verdict scored 0; nan and 1.5 passed."""

    def plain(task: Task, reply: str) -> Any:
        return value

    async def async_(task: Task, reply: str) -> Any:
        return value

    outcome = await outcome_of(SingleTurn(TASKS, async_ if is_async else plain), chat, workers)
    assert isinstance(outcome, Abstain)
    name = "async_" if is_async else "plain"
    assert f"{name} returned {said}" in outcome.reason
    assert "test_single_turn.py:" in outcome.reason
    assert "a finite number from 0 to 1" in outcome.detail
    assert outcome.boundary is Boundary.REWARD


async def test_a_reward_that_hangs_abstains_and_the_next_one_is_judged(
    chat: Chat, workers: RewardWorkers
) -> None:
    def endless(task: Task, reply: str) -> float:
        while True:
            time.sleep(0.01)

    outcome = await outcome_of(SingleTurn(TASKS, endless), chat, workers, reward_deadline_s=0.3)
    assert isinstance(outcome, Abstain)
    assert "endless did not return within 0.3 s" in outcome.reason
    assert outcome.boundary is Boundary.REWARD
    assert await outcome_of(SingleTurn(TASKS, exact), chat, workers) == Reward(1.0)


async def test_the_declared_range_is_the_environments(chat: Chat, workers: RewardWorkers) -> None:
    async def wide(task: Task, reply: str) -> float:
        return -5.0

    assert await outcome_of(SingleTurn(TASKS, wide, reward_range=(-5, 5)), chat, workers) == Reward(-5.0)
    assert isinstance(await outcome_of(SingleTurn(TASKS, wide), chat, workers), Abstain)


def test_tasks_may_be_lists_or_functions() -> None:
    assert validate_tasks(SingleTurn(TASKS[:2], exact, evaluation_tasks=TASKS[2:])) == tuple(TASKS[:2])
    lazy = SingleTurn(lambda: TASKS[:2], exact, evaluation_tasks=lambda: TASKS[1:])
    with pytest.raises(TaskError, match=r"is also tasks\(\)\[1\]"):
        validate_tasks(lazy)


def test_range_and_sandbox_are_the_environments_own() -> None:
    spec = SandboxSpec(memory_mb=9)
    environment = SingleTurn(TASKS, exact, reward_range=(-1, 1), sandbox=spec)
    assert (environment.reward_range, environment.sandbox) == ((-1, 1), spec)
    assert SingleTurn(TASKS, exact).sandbox is None


def takes_one(task: Task) -> float:
    return 1.0


def takes_four(task: Task, reply: str, ep: Any, more: Any) -> float:
    return 1.0


def needs_keyword(task: Task, reply: str, *, judge: Any) -> float:
    return 1.0


def plain_with_episode(task: Task, reply: str, ep: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (takes_one, "cannot be called as a reward"),
        (takes_four, "cannot be called as a reward"),
        (needs_keyword, "cannot be called as a reward"),
        (plain_with_episode, "takes the episode but is not async"),
        (lambda: 1.0, "cannot be called as a reward"),
    ],
)
def test_a_reward_of_another_shape_is_refused_when_the_environment_is_built(reward: Any, said: str) -> None:
    with pytest.raises(RewardError, match=said) as caught:
        SingleTurn(TASKS, reward)
    assert caught.value.what.startswith(reward.__name__)
    assert "test_single_turn.py:" in caught.value.where
    assert "async def reward(task, reply, ep)" in caught.value.expected


def test_a_reward_that_is_no_function_is_refused() -> None:
    with pytest.raises(RewardError, match="the reward is a float, not a function"):
        SingleTurn(TASKS, 1.0)  # type: ignore[arg-type]


async def test_an_optional_third_parameter_is_the_episode_only_by_its_name(
    chat: Chat, workers: RewardWorkers
) -> None:
    def strict_by_default(task: Task, reply: str, strict: bool = True) -> float:
        return float(strict is True)

    async def by_name(task: Task, reply: str, ep: Any = None) -> float:
        return float(ep is not None)

    for reward in (strict_by_default, by_name):
        assert await outcome_of(SingleTurn(TASKS, reward), chat, workers) == Reward(1.0)
