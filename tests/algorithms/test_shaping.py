"""Which groups and completions count, and for what."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.forest import TASK, trajectory
from palestra.algorithms.shaping import (
    informative,
    is_truncated,
    overlong_penalty,
    penalized,
    says_nothing,
)
from palestra.types import Abstain, Group, Reward, StopReason, Trajectory


def group(name: str, *rewards: float | None, length: int = 2) -> Group:
    members = (
        trajectory(f"{name}.{n}", [((1,), False), (range(2, 2 + length), True)], reward)
        for n, reward in enumerate(rewards)
    )
    return Group(name, TASK, tuple(members))


def stopped(reason: StopReason) -> Trajectory:
    made = trajectory("t", [((1,), False), ((2, 3), True)])
    return replace(made, turns=(made.turns[0], replace(made.turns[1], stop_reason=reason)))


def test_dynamic_sampling_keeps_what_differs_counts_what_it_drops_and_asks_for_the_rest() -> None:
    groups = [
        group("a", 1.0, 0.0),
        group("b", 1.0, 1.0),
        group("c", 0.0, None),
        group("d", None),
        group("e", 0, 1, 1),
    ]
    found = informative(groups, 4)
    assert [g.id for g in found.keep] == ["a", "e"]
    assert [g.id for g in found.drop] == ["b", "c", "d"]
    assert (found.refill, found.zero_variance, found.uncomparable) == (2, 1, 2)


def test_a_surplus_of_informative_groups_asks_for_nothing_and_loses_nothing() -> None:
    groups = [group("a", 1.0, 0.0), group("b", 0.0, 1.0)]
    found = informative(groups, 1)
    assert (found.keep, found.refill) == (tuple(groups), 0)
    assert informative([], 3).refill == 3


def test_rewards_that_differ_by_rounding_only_say_nothing() -> None:
    assert says_nothing(group("a", 0.1 + 0.2, 0.3))
    assert not says_nothing(group("a", 0.1, 0.1 + 1e-6))


@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0, None]), min_size=1, max_size=4), max_size=6),
    st.integers(0, 8),
)
def test_every_group_is_kept_or_dropped_and_the_counts_add_up(
    rows: list[list[float | None]], wanted: int
) -> None:
    groups = [group(f"g{n}", *row) for n, row in enumerate(rows)]
    found = informative(groups, wanted)
    assert sorted(g.id for g in (*found.keep, *found.drop)) == sorted(g.id for g in groups)
    assert found.zero_variance + found.uncomparable == len(found.drop)
    assert found.refill == max(0, wanted - len(found.keep))
    assert all(len(set(g.rewards)) > 1 for g in found.keep)


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (1000, -1.0)]
)
def test_the_overlong_penalty_by_hand(length: int, penalty: float) -> None:
    """DAPO (arXiv:2503.14476), eq. 13, with 100 tokens at most and a buffer of 20."""
    assert overlong_penalty(length, 100, 20) == pytest.approx(penalty)


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_a_buffer_that_makes_no_sense_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match="buffer"):
        overlong_penalty(5, 100, buffer)


def test_a_penalty_lowers_the_reward_and_leaves_the_rollout_as_it_was() -> None:
    long = group("a", 1.0, None, length=9)
    found = penalized(long, 10, 2)
    assert found.rewards == (0.5,)
    assert long.rewards == (1.0,)
    assert isinstance(found.trajectories[1].outcome, Abstain)
    assert found.trajectories[0].turns == long.trajectories[0].turns


def test_what_is_short_enough_is_the_same_object_and_parts_are_kept() -> None:
    short = group("a", 1.0, length=3)
    assert penalized(short, 10, 2).trajectories[0] is short.trajectories[0]
    parted = replace(short.trajectories[0], outcome=Reward(1.0, {"format": 0.5}))
    found = penalized(replace(short, trajectories=(parted,)), 3, 1).trajectories[0].outcome
    assert isinstance(found, Reward)
    assert (found.value, dict(found.parts)) == (0.0, {"format": 0.5})


def test_of_several_turns_the_longest_is_what_counts() -> None:
    made = trajectory("t", [((1,), False), (range(9), True), ((1,), False), ((2,), True)], 1.0)
    assert penalized(Group("g", TASK, (made,)), 10, 2).rewards == (0.5,)


@pytest.mark.parametrize("reason", StopReason)
def test_a_reply_is_truncated_where_there_was_no_room(reason: StopReason) -> None:
    assert is_truncated(stopped(reason)) == (reason in (StopReason.LENGTH, StopReason.CONTEXT))
