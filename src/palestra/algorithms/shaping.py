"""Which groups and completions an update uses, and what their rewards count for.

Decisions over finished groups, made before advantages or after them, never inside
a loss. What was sampled and rewarded is not touched: shaped groups are new
objects, and the records keep the environment's own verdicts. Pure Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from palestra.algorithms.advantages import group_advantages
from palestra.types import Group, Reward, StopReason, Trajectory


@dataclass(frozen=True, slots=True)
class Selection:
    """Dynamic sampling's decision (DAPO, arXiv:2503.14476): what to train on, and how much is lacking."""

    keep: tuple[Group, ...]
    drop: tuple[Group, ...]
    refill: int
    """How many more informative groups a full batch needs."""
    zero_variance: int
    """Of the dropped: at least two rewards, all of them equal."""
    uncomparable: int
    """Of the dropped: fewer than two rewards."""


def says_nothing(group: Group) -> bool:
    """Whether no member did better than another: fewer than two rewards, or equal ones but for rounding."""
    return not any(group_advantages(group.rewards, normalize_std=False))


def informative(groups: Sequence[Group], wanted: int) -> Selection:
    """Keep the groups whose rewards differ, in order; ask for what is lacking to ``wanted`` of them."""
    keep = tuple(group for group in groups if not says_nothing(group))
    drop = tuple(group for group in groups if says_nothing(group))
    zero_variance = sum(len(group.rewards) > 1 for group in drop)
    return Selection(keep, drop, max(0, wanted - len(keep)), zero_variance, len(drop) - zero_variance)


def is_truncated(trajectory: Trajectory) -> bool:
    """Whether the last turn ended because there was no room, and not because the model ended it."""
    return trajectory.stop_reason in (StopReason.LENGTH, StopReason.CONTEXT)


def overlong_penalty(length: int, longest: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), between -1 and 0.

    0 up to ``longest - buffer`` tokens, falling linearly to -1 at ``longest`` and beyond.
    """
    if not 1 <= buffer <= longest:
        raise ValueError(f"the buffer must be in [1, {longest}], got {buffer}")
    return -min(1.0, max(0.0, (length - (longest - buffer)) / buffer))


def penalized(group: Group, longest: int, buffer: int) -> Group:
    """The group with each reward lowered by the penalty of its trajectory's longest turn."""
    return replace(group, trajectories=tuple(_penalized(t, longest, buffer) for t in group.trajectories))


def _penalized(trajectory: Trajectory, longest: int, buffer: int) -> Trajectory:
    outcome = trajectory.outcome
    length = max((sum(turn.sampled_mask) for turn in trajectory.turns), default=0)
    penalty = overlong_penalty(length, longest, buffer)
    if not isinstance(outcome, Reward) or not penalty:
        return trajectory
    return replace(trajectory, outcome=Reward(outcome.value + penalty, outcome.parts))
