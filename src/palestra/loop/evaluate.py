"""Evaluation on held-out tasks: the training environment, other tasks, no training.

Sampled and greedy passes are measured apart, because much of what RL gains is
sharpening: a model that could already answer greedily learns to answer when
sampled. Abstentions are left out and counted, never scored. Seeds name the
task and the sample, not the moment, so two evaluations differ only by the
weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from palestra.loop.draws import derive_seed
from palestra.loop.sampling import EpisodeRunner, Wanted, run_all
from palestra.loop.statistics import Interval, mean_interval
from palestra.types import Reward, SamplingParams, Task, Trajectory

When = Literal["before", "during", "after"]


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Held-out reward. An interval is None where nothing was measured."""

    when: When
    step: int
    sampled: Interval | None
    greedy: Interval | None
    abstained: int
    tokens: int
    trajectories: tuple[Trajectory, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "when": self.when,
            "step": self.step,
            "sampled": asdict(self.sampled) if self.sampled else None,
            "greedy": asdict(self.greedy) if self.greedy else None,
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
    stop: asyncio.Event,
) -> EvalResult | None:
    """Measure; None if ``stop`` was set meanwhile (a partial evaluation is no evaluation)."""
    wanted = _wanted(tasks, samples=samples, greedy=greedy, seed=seed, sampling=sampling)
    trajectories = await run_all(wanted, run, deadline_s=deadline_s, stop=stop)
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
        abstained=sum(not isinstance(t.outcome, Reward) for t in trajectories),
        tokens=sum(t.sampled_count for t in trajectories),
        trajectories=tuple(trajectories),
    )
