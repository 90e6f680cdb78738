from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.trajectories import TASK, group, trajectory
from palestra.loop.verdict import Signal, Verdict, judge, nothing_rewarded, step_metrics
from palestra.types import Abstain, Boundary, Group, StopReason


def centred(rewards: Sequence[float]) -> list[float]:
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    return [r - mean for r in rewards]


def judged(groups: Sequence[Group]) -> Verdict:
    return judge(groups, {
        t.id: a for g in groups for t, a in zip(g.rewarded, centred(g.rewards), strict=True)
    })  # fmt: skip


outcomes = st.lists(st.sampled_from([None, 0.0, 1.0, 0.5]), min_size=1, max_size=6)


@given(st.lists(outcomes, min_size=1, max_size=5))
def test_every_sampled_token_is_in_exactly_one_bin(rows: list[list[float | None]]) -> None:
    groups = [group(f"g{i}", row) for i, row in enumerate(rows)]
    verdict = judged(groups)
    sampled = sum(t.sampled_count for g in groups for t in g.trajectories)
    assert verdict.tokens_sampled == sampled
    assert verdict.tokens_abstained == 4 * sum(o is None for row in rows for o in row)


@given(st.lists(outcomes, min_size=1, max_size=5))
def test_abstentions_leave_every_baseline_unmoved(rows: list[list[float | None]]) -> None:
    """NeMo-Gym PR#2552 (case 14): failed resets entered as reward 0 trained the run away."""
    with_failures = judged([group(f"g{i}", row) for i, row in enumerate(rows)])
    scored = [[o for o in row if o is not None] for row in rows]
    for i, row in enumerate(scored):
        kept = [j for j, o in enumerate(rows[i]) if o is not None]
        expected = centred(row)
        assert [with_failures.advantages[f"g{i}.{j}"] for j in kept] == expected
    assert len(with_failures.advantages) == sum(map(len, scored))


def test_a_step_without_any_difference_is_zero_variance_and_says_which_rewards() -> None:
    verdict = judged([group("a", [1.0, 1.0]), group("b", [0.0, 0.0, 0.0])])
    assert verdict.signal is Signal.ZERO_VARIANCE
    assert verdict.zero_variance_groups == 2
    assert "all rewards are equal (values 0, 1)" in verdict.reason


def test_a_step_of_failures_names_the_boundary_and_the_commonest_reason() -> None:
    verdict = judged([group("a", [None, None]), group("b", [None, 1.0])])
    assert verdict.signal is Signal.ABSTAINED
    assert "3 episodes abstained, 3 of them at the" in verdict.reason
    assert "engine" in verdict.reason
    assert "the engine broke" in verdict.reason


def test_one_group_with_a_difference_makes_the_step_useful() -> None:
    verdict = judged([group("a", [1.0, 0.0]), group("b", [None, None])])
    assert verdict.signal is Signal.USEFUL
    assert verdict.reason == ""
    assert verdict.tokens_trained == 8


def test_singletons_alone_are_named_as_such() -> None:
    assert judge([group("a", [1.0]), group("b", [0.0])], {"a.0": 0.0, "b.0": 0.0}).signal is Signal.SINGLETONS


def test_metrics_count_abstentions_apart_from_rewards() -> None:
    groups = [group("a", [1.0, 0.0, None, None])]
    metrics = step_metrics(groups, judged(groups))
    assert metrics["reward/mean"] == pytest.approx(0.5)
    assert metrics["abstained"] == 2
    assert metrics["tokens/useful_fraction"] == pytest.approx(0.5)


def test_without_any_reward_there_is_no_mean_reward() -> None:
    groups = [group("a", [None, None])]
    assert "reward/mean" not in step_metrics(groups, judged(groups))


def test_truncation_counts_completions_cut_by_length_or_context() -> None:
    members = tuple(
        trajectory(f"t{i}", 1.0, stop_reason=reason)
        for i, reason in enumerate([StopReason.EOS, StopReason.LENGTH, StopReason.CONTEXT, StopReason.STOP])
    )
    groups = [Group("g", TASK.hash, members)]
    assert step_metrics(groups, judged(groups))["completion/truncated_fraction"] == pytest.approx(0.5)


def test_one_abstention_is_said_in_the_singular() -> None:
    assert judged([group("a", [None])]).reason.startswith("1 episode abstained, at the engine boundary")


def test_a_run_without_any_reward_ends_with_the_commonest_cause_and_the_users_line() -> None:
    late = Abstain("too late", Boundary.REWARD)
    wrong = Abstain(
        "reward returned 7, outside the declared range 0 to 1 (job.py:12)", Boundary.REWARD, "Traceback ...",
        where="job.py:12", expected="a finite number from 0 to 1",
    )  # fmt: skip
    error = nothing_rewarded("the first step", "a reward", [late, wrong, wrong])
    assert error.brief().splitlines()[:3] == [
        "no episode of the first step got a reward: reward returned 7, outside the declared range 0 to 1",
        "  where: job.py:12",
        "  expected: a finite number from 0 to 1",
    ]
    assert error.detail == "Traceback ..."
    unplaced = nothing_rewarded("the first step", "a reward", [late])
    assert (unplaced.where, unplaced.expected) == ("the reward boundary", "a reward")


def test_tokens_with_advantages_of_their_own_train_even_where_their_mean_is_zero() -> None:
    groups = [group("a", [1.0, 1.0])]
    verdict = judge(groups, {"a.0": [1.0, -1.0, 0.0, 0.0], "a.1": [0.0] * 4})
    assert verdict.signal is Signal.USEFUL
    assert verdict.advantages == {"a.0": 0.0, "a.1": 0.0}
    assert (verdict.tokens_trained, verdict.tokens_zero_advantage) == (4, 4)
    assert verdict.zero_variance_groups == 1


def test_a_single_sample_compared_with_the_batch_makes_the_step_useful() -> None:
    verdict = judge([group("a", [1.0]), group("b", [0.0])], {"a.0": 1.0, "b.0": -1.0})
    assert verdict.signal is Signal.USEFUL
    assert verdict.zero_variance_groups == 0
