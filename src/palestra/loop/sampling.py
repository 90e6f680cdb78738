"""One step's episodes: every draw becomes one group, whatever happens to its members.

A group's id is its draw's number, given before anything is sampled; all members
get the same task. An episode that fails is a trajectory that abstains, and one
that outlives the step's deadline is cancelled and abstains too: nothing here
waits without an end, and no failure is ever a number. The same step of the same
run always asks for the same samples, in the same order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from palestra.loop.draws import Draw, derive_seed
from palestra.types import Abstain, Boundary, Group, SamplingParams, Task, Trajectory

EpisodeRunner = Callable[[Task, str, SamplingParams], Awaitable[Trajectory]]
"""Runs one episode of a task under an id; always returns, except when cancelled."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One episode to run."""

    task: Task
    id: str
    sampling: SamplingParams


def group_id(draw: Draw) -> str:
    return f"g{draw.index}"


def wanted_of_draw(
    draw: Draw, task: Task, *, group_size: int, seed: int, sampling: SamplingParams
) -> list[Wanted]:
    """The members of one group; each has its own seed, named by run seed, draw and member."""
    return [
        Wanted(
            task,
            f"{group_id(draw)}.{member}",
            replace(sampling, seed=derive_seed(seed, "train", draw.index, member)),
        )
        for member in range(group_size)
    ]


async def run_all(
    wanted: Sequence[Wanted],
    run: EpisodeRunner,
    *,
    deadline_s: float,
    most_at_once: int,
    stop: asyncio.Event | None = None,
) -> list[Trajectory] | None:
    """Run every wanted episode, ``most_at_once`` at a time; results in the order asked.

    They begin in the order asked, so an episode's own deadline starts when it does.

    What is unfinished after ``deadline_s`` seconds is cancelled and abstains. If
    ``stop`` is set meanwhile, everything is cancelled and the answer is None.
    """
    places = asyncio.Semaphore(most_at_once)

    async def one(asked: Wanted) -> Trajectory:
        async with places:
            return await run(asked.task, asked.id, asked.sampling)

    tasks = [asyncio.ensure_future(one(w)) for w in wanted]
    stopper = asyncio.ensure_future(stop.wait()) if stop is not None else None
    try:
        finished = asyncio.ensure_future(asyncio.wait(tasks, timeout=deadline_s))
        watched = {finished} | ({stopper} if stopper is not None else set())
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if not finished.done():
            finished.cancel()
            return None
    finally:
        if stopper is not None:
            stopper.cancel()
        late = [task for task in tasks if not task.done()]
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=30.0)
    return [_result(task, w, deadline_s) for task, w in zip(tasks, wanted, strict=True)]


def _result(task: asyncio.Future[Trajectory], wanted: Wanted, deadline_s: float) -> Trajectory:
    if task.done() and not task.cancelled():
        return task.result()
    reason = f"the step's deadline of {deadline_s:g} s passed before the episode ended"
    return Trajectory(wanted.id, wanted.task.hash, (), Abstain(reason, Boundary.TASK))


async def sample_groups(
    draws: Sequence[Draw],
    tasks: Sequence[Task],
    run: EpisodeRunner,
    *,
    group_size: int,
    seed: int,
    sampling: SamplingParams,
    deadline_s: float,
    most_at_once: int,
) -> list[Group]:
    """One group per draw, in order. Two members of a group never see different tasks."""
    wanted = [
        w
        for d in draws
        for w in wanted_of_draw(d, tasks[d.task_index], group_size=group_size, seed=seed, sampling=sampling)
    ]
    trajectories = await run_all(wanted, run, deadline_s=deadline_s, most_at_once=most_at_once)
    assert trajectories is not None  # without a stop event there is always an answer
    return [
        Group(
            group_id(d),
            tasks[d.task_index].hash,
            tuple(trajectories[place * group_size : (place + 1) * group_size]),
        )
        for place, d in enumerate(draws)
    ]
