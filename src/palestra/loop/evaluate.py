"""Evaluation on held-out tasks: the training environment, other tasks, no training.

Sampled and greedy passes are measured apart, because much of what RL gains is
sharpening: a model that could already answer greedily learns to answer when
sampled. Abstentions are left out and counted, never scored. Seeds name the
task and the sample, not the moment, so two evaluations differ only by the
weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from palestra.loop.draws import derive_seed
from palestra.loop.sampling import EpisodeRunner, Wanted, run_all
from palestra.loop.statistics import Interval, mean_interval
from palestra.types import Abstain, Reward, SamplingParams, Task, Trajectory

When = Literal["before", "during", "after"]


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Held-out reward. An interval is None where nothing was measured."""

    when: When
    step: int
    sampled: Interval | None
    greedy: Interval | None
    tasks: str
    """How many tasks were scored and which: equal texts mean comparable results."""
    abstained: int
    tokens: int
    trajectories: tuple[Trajectory, ...]

    @property
    def scored(self) -> bool:
        return self.sampled is not None or self.greedy is not None

    @property
    def first_abstention(self) -> Abstain:
        """Of the first episode that abstained; only asked where none was scored."""
        return next(t.outcome for t in self.trajectories if isinstance(t.outcome, Abstain))

    def to_json(self) -> dict[str, Any]:
        return {
            "when": self.when,
            "step": self.step,
            "sampled": asdict(self.sampled) if self.sampled else None,
            "greedy": asdict(self.greedy) if self.greedy else None,
            "tasks": self.tasks,
            "abstained": self.abstained,
            "tokens": self.tokens,
        }


def _wanted(
    tasks: Sequence[Task], *, samples: int, greedy: bool, seed: int, sampling: SamplingParams
) -> list[Wanted]:
    wanted: list[Wanted] = []
    for task in tasks:
        for sample in range(samples):
            named = derive_seed(seed, "eval", task.hash, sample)
            wanted.append(Wanted(task, f"e-{task.id}.{sample}", replace(sampling, seed=named)))
        if greedy:
            wanted.append(Wanted(task, f"e-{task.id}.greedy", replace(sampling, temperature=0.0)))
    return wanted


def _scored_tasks(values_by_task: dict[str, list[float]]) -> str:
    scored = [name for name, values in values_by_task.items() if values]
    digest = hashlib.sha256("".join(scored).encode()).hexdigest()[:12]
    return f"{len(scored)} tasks, digest {digest}"


def _interval(values_by_task: list[list[float]], reward_range: tuple[float, float]) -> Interval | None:
    scored = [values for values in values_by_task if values]
    return mean_interval(scored, *reward_range) if scored else None


async def evaluate(
    tasks: Sequence[Task],
    run: EpisodeRunner,
    *,
    when: When,
    step: int,
    samples: int,
    greedy: bool,
    seed: int,
    sampling: SamplingParams,
    reward_range: tuple[float, float],
    deadline_s: float,
    most_at_once: int,
    stop: asyncio.Event,
) -> EvalResult | None:
    """Measure; None if ``stop`` was set meanwhile (a partial evaluation is no evaluation).

    ``deadline_s`` seconds are allowed for every ``most_at_once`` episodes.
    """
    wanted = _wanted(tasks, samples=samples, greedy=greedy, seed=seed, sampling=sampling)
    whole_s = deadline_s * math.ceil(len(wanted) / most_at_once)
    trajectories = await run_all(wanted, run, deadline_s=whole_s, most_at_once=most_at_once, stop=stop)
    if trajectories is None:
        return None
    sampled: dict[str, list[float]] = {task.hash: [] for task in tasks}
    best: dict[str, list[float]] = {task.hash: [] for task in tasks}
    for trajectory, asked in zip(trajectories, wanted, strict=True):
        if isinstance(trajectory.outcome, Reward):
            into = best if asked.sampling.temperature == 0 else sampled
            into[asked.task.hash].append(trajectory.outcome.value)
    return EvalResult(
        when=when,
        step=step,
        sampled=_interval(list(sampled.values()), reward_range),
        greedy=_interval(list(best.values()), reward_range) if greedy else None,
        tasks=_scored_tasks(sampled if samples else best),
        abstained=sum(not isinstance(t.outcome, Reward) for t in trajectories),
        tokens=sum(t.sampled_count for t in trajectories),
        trajectories=tuple(trajectories),
    )
