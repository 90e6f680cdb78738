from __future__ import annotations

import asyncio

import pytest

from helpers.trajectories import trajectory
from palestra.loop.draws import draws_of_step
from palestra.loop.evaluate import evaluate
from palestra.loop.sampling import Wanted, run_all, sample_groups
from palestra.types import Abstain, Boundary, SamplingParams, Task, Trajectory

TASKS = [Task(prompt=f"question {i}") for i in range(5)]
SAMPLING = SamplingParams(max_new_tokens=4)


class Runner:
    """An episode runner that records what it was asked, and can hang on chosen ids."""

    def __init__(self, hang: str | None = None) -> None:
        self.hang = hang
        self.asked: list[tuple[str, str, int]] = []
        self.cancelled: list[str] = []

    async def __call__(self, task: Task, name: str, sampling: SamplingParams) -> Trajectory:
        self.asked.append((task.hash, name, sampling.seed))
        try:
            await asyncio.sleep(3600 if self.hang is not None and self.hang in name else 0)
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        return trajectory(name, float(len(self.asked) % 2), task=task)


async def groups_of_step(step: int, runner: Runner, deadline_s: float = 5.0) -> list:
    draws = draws_of_step(step, prompts_per_step=2, tasks=5, seed=3)
    return await sample_groups(
        draws, TASKS, runner, group_size=3, seed=3, sampling=SAMPLING, deadline_s=deadline_s, most_at_once=64
    )


async def test_all_members_of_a_group_answer_the_same_task() -> None:
    """prime-rl PR#600, tinker-cookbook PR#771 (case 19): members of one group got different problems."""
    groups = await groups_of_step(1, Runner())
    for group in groups:
        assert {t.task_hash for t in group.trajectories} == {group.task_hash}
        assert len(group.trajectories) == 3


async def test_a_group_of_mixed_tasks_cannot_be_built() -> None:
    """prime-rl PR#600 (case 19): the type itself refuses it."""
    from palestra.types import Group

    with pytest.raises(ValueError, match="answered task"):
        Group("g0", TASKS[0].hash, (trajectory("a", 1.0, task=TASKS[1]),))


async def test_group_ids_are_given_when_sampling_begins_and_never_repeat() -> None:
    """slime#1414 (case 18): groups found by stride mixed prompts when one was short."""
    first, second = await groups_of_step(1, Runner()), await groups_of_step(2, Runner())
    assert [g.id for g in first + second] == ["g0", "g1", "g2", "g3"]


async def test_the_same_step_asks_for_the_same_samples_again() -> None:
    one, two = Runner(), Runner()
    await groups_of_step(4, one)
    await groups_of_step(4, two)
    assert one.asked == two.asked
    assert len({seed for _, _, seed in one.asked}) == 6, "every member has its own seed"


async def test_an_episode_beyond_the_steps_deadline_abstains_and_is_cancelled() -> None:
    """SkyRL#1173 (case 20): a buffer waited 29 hours for three samples."""
    runner = Runner(hang="g0.1")
    groups = await groups_of_step(1, runner, deadline_s=0.2)
    late = groups[0].trajectories[1]
    assert isinstance(late.outcome, Abstain)
    assert late.outcome.boundary is Boundary.TASK
    assert "deadline of 0.2 s" in late.outcome.reason
    assert runner.cancelled == ["g0.1"]
    assert len(groups[0].rewarded) == 2


async def test_a_stop_cancels_everything_and_gives_no_result() -> None:
    runner, stop = Runner(hang="x"), asyncio.Event()
    wanted = [Wanted(TASKS[0], f"x{i}", SAMPLING) for i in range(4)]
    waiting = asyncio.ensure_future(run_all(wanted, runner, deadline_s=60, most_at_once=64, stop=stop))
    await asyncio.sleep(0.05)
    stop.set()
    assert await asyncio.wait_for(waiting, 5) is None
    assert sorted(runner.cancelled) == [w.id for w in wanted]


async def test_evaluation_keeps_greedy_and_sampled_apart() -> None:
    async def run(task: Task, name: str, sampling: SamplingParams) -> Trajectory:
        return trajectory(name, 1.0 if sampling.temperature == 0 else 0.0, task=task)

    result = await evaluate(
        TASKS, run, when="before", step=0, samples=2, greedy=True, seed=0, sampling=SAMPLING,
        reward_range=(0.0, 1.0), deadline_s=5, most_at_once=4, stop=asyncio.Event(),
    )  # fmt: skip
    assert result is not None
    assert result.sampled is not None
    assert result.greedy is not None
    assert (result.sampled.mean, result.greedy.mean) == (0.0, 1.0)
    assert len(result.trajectories) == 15
    assert result.to_json()["sampled"]["n"] == 5


async def test_evaluation_leaves_abstentions_out_and_counts_them() -> None:
    """OpenEnv PR#1025 (case 17): a missing verdict was scored 0."""

    async def run(task: Task, name: str, sampling: SamplingParams) -> Trajectory:
        return trajectory(name, None if task is TASKS[0] else 1.0, task=task)

    result = await evaluate(
        TASKS, run, when="after", step=9, samples=1, greedy=False, seed=0, sampling=SAMPLING,
        reward_range=(0.0, 1.0), deadline_s=5, most_at_once=4, stop=asyncio.Event(),
    )  # fmt: skip
    assert result is not None
    assert result.abstained == 1
    assert result.sampled is not None
    assert result.sampled.mean == 1.0
    assert result.sampled.n == 4
    assert result.greedy is None


async def test_evaluation_seeds_do_not_depend_on_when_it_runs() -> None:
    before, after = Runner(), Runner()
    for runner, when in ((before, "before"), (after, "after")):
        await evaluate(
            TASKS, runner, when=when, step=0, samples=2, greedy=False, seed=1, sampling=SAMPLING,
            reward_range=(0.0, 1.0), deadline_s=5, most_at_once=4, stop=asyncio.Event(),
        )  # fmt: skip
    assert before.asked == after.asked
