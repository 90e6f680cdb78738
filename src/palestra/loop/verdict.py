"""What a step's groups are worth: a pure verdict before anything is trained.

Every sampled token falls into exactly one bin. A step that can teach nothing
(all abstained, or no group whose rewards differ) is named as such with its
reason: it is a visible state, not a wait and not an update.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from palestra.algorithms.registry import Advantage
from palestra.algorithms.shaping import is_truncated, says_nothing
from palestra.errors import RunStopped
from palestra.types import Abstain, Group, Trajectory


class Signal(StrEnum):
    """Whether a step can teach."""

    USEFUL = "useful"
    ZERO_VARIANCE = "zero_variance"
    """Every group's rewards are equal: all advantages are 0."""
    ABSTAINED = "abstained"
    """No group has two rewarded members, because episodes abstained."""
    SINGLETONS = "singletons"
    """No group has two rewarded members, and nothing abstained."""


@dataclass(frozen=True, slots=True)
class Verdict:
    signal: Signal
    reason: str
    advantages: dict[str, float]
    """By trajectory id, for every rewarded trajectory; the mean where each token has its own."""
    zero_variance_groups: int
    abstentions: tuple[Abstain, ...]
    tokens_trained: int
    tokens_zero_advantage: int
    tokens_abstained: int

    @property
    def tokens_sampled(self) -> int:
        return self.tokens_trained + self.tokens_zero_advantage + self.tokens_abstained


def nothing_rewarded(doing: str, expected: str, abstentions: Sequence[Abstain]) -> RunStopped:
    """The end of a run whose first episodes all abstained: the commonest reason, with the user's own line."""
    counts = Counter((a.boundary, a.reason) for a in abstentions)
    commonest = counts.most_common(1)[0][0]
    first = next(a for a in abstentions if (a.boundary, a.reason) == commonest)
    where = first.where or f"the {first.boundary} boundary"
    return RunStopped(
        f"no episode of {doing} got a reward: {first.reason.removesuffix(f' ({first.where})')}",
        where=where,
        expected=first.expected or expected,
        next_command="mend it and run the same command",
        detail=first.detail,
    )


def judge(groups: Sequence[Group], advantages: Mapping[str, Advantage]) -> Verdict:
    """The bins of every token and the step's signal, from the advantage of every rewarded trajectory."""
    comparable = [group for group in groups if len(group.rewards) > 1]
    everyone = [t for group in groups for t in group.trajectories]
    abstentions = tuple(t.outcome for t in everyone if isinstance(t.outcome, Abstain))
    trains = {name for name, advantage in advantages.items() if _any(advantage)}
    bins = Counter[str]()
    for trajectory in everyone:
        bins[_bin(trajectory, advantages, trains)] += trajectory.sampled_count
    signal = _signal(bool(trains), len(comparable), abstentions)
    return Verdict(
        signal=signal,
        reason=_reason(signal, groups, abstentions),
        advantages={name: _mean(advantage) for name, advantage in advantages.items()},
        zero_variance_groups=sum(map(says_nothing, comparable)),
        abstentions=abstentions,
        tokens_trained=bins["trained"],
        tokens_zero_advantage=bins["zero_advantage"],
        tokens_abstained=bins["abstained"],
    )


def _any(advantage: Advantage) -> bool:
    return bool(advantage) if isinstance(advantage, (int, float)) else any(advantage)


def _mean(advantage: Advantage) -> float:
    return float(advantage) if isinstance(advantage, (int, float)) else statistics.fmean(advantage)


def _bin(trajectory: Trajectory, advantages: Mapping[str, Advantage], trains: set[str]) -> str:
    if trajectory.id not in advantages:
        return "abstained"
    return "trained" if trajectory.id in trains else "zero_advantage"


def _signal(useful: bool, comparable: int, abstentions: Sequence[Abstain]) -> Signal:
    if useful:
        return Signal.USEFUL
    if comparable:
        return Signal.ZERO_VARIANCE
    return Signal.ABSTAINED if abstentions else Signal.SINGLETONS


def _reason(signal: Signal, groups: Sequence[Group], abstentions: Sequence[Abstain]) -> str:
    if signal is Signal.USEFUL:
        return ""
    if signal is Signal.ABSTAINED:
        (boundary, reason), count = Counter((a.boundary, a.reason) for a in abstentions).most_common(1)[0]
        total = len(abstentions)
        head = f"{total} episodes abstained, {count} of them" if total > 1 else "1 episode abstained,"
        return f"{head} at the {boundary} boundary: {reason}"
    if signal is Signal.SINGLETONS:
        return "no group has two members to compare"
    levels = sorted({round(reward, 6) for group in groups for reward in group.rewards})
    shown = ", ".join(f"{level:g}" for level in levels[:4]) + (", ..." if len(levels) > 4 else "")
    return f"in each of {len(groups)} groups all rewards are equal (values {shown}): every advantage is 0"


def step_metrics(groups: Sequence[Group], verdict: Verdict) -> dict[str, float]:
    """The step's numbers that come from its rollouts; names are documented in docs/records.md."""
    everyone = [t for group in groups for t in group.trajectories]
    rewards = [reward for group in groups for reward in group.rewards]
    lengths = [t.sampled_count for t in everyone if t.sampled_count]
    cut = sum(map(is_truncated, everyone))
    metrics = {
        "groups/total": float(len(groups)),
        "groups/zero_variance": float(verdict.zero_variance_groups),
        "abstained": float(len(verdict.abstentions)),
        "tokens/sampled": float(verdict.tokens_sampled),
        "tokens/trained": float(verdict.tokens_trained),
        "tokens/zero_advantage": float(verdict.tokens_zero_advantage),
        "tokens/abstained": float(verdict.tokens_abstained),
        "tokens/useful_fraction": verdict.tokens_trained / max(1, verdict.tokens_sampled),
        "completion/length_mean": statistics.fmean(lengths) if lengths else 0.0,
        "completion/truncated_fraction": cut / max(1, len(everyone)),
    }
    if rewards:
        metrics["reward/mean"] = statistics.fmean(rewards)
        metrics["reward/std"] = statistics.pstdev(rewards)
    return metrics
