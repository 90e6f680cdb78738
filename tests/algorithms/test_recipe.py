"""From groups to a prepared batch: who counts, what a target weighs, and which model is asked."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.forest import TASK, random_groups, trajectory
from palestra.algorithms import registry
from palestra.algorithms.recipe import Recipe
from palestra.algorithms.registry import register_algorithm
from palestra.batches import Batch
from palestra.types import Group, SamplingParams, StopReason, Trajectory

SAMPLING = SamplingParams(max_new_tokens=10)
REWARDS = {"a": (1.0, 0.0), "b": (1.0, 1.0)}


def member(name: str, reward: float | None, length: int = 2, stop: StopReason = StopReason.EOS) -> Trajectory:
    made = trajectory(name, [((1, 2), False), (range(3, 3 + length), True)], reward)
    return replace(made, turns=(made.turns[0], replace(made.turns[1], stop_reason=stop)))


def groups(**rewards: Sequence[float | None]) -> list[Group]:
    return [
        Group(name, TASK, tuple(member(f"{name}{n}", r, n + 1) for n, r in enumerate(row)))
        for name, row in (rewards or REWARDS).items()
    ]


def packed(recipe: Recipe, made: Sequence[Group]) -> Batch | None:
    return recipe.pack(made, recipe.weigh(made, SAMPLING), SAMPLING)


class Asked:
    """A model that says the same of every token, and counts how often it is asked."""

    def __init__(self, value: float) -> None:
        self.value, self.times = value, 0

    def __call__(self, batch: Batch) -> Sequence[float]:
        self.times += 1
        return [self.value] * batch.target_count


def test_grpo_weighs_every_token_of_the_batch_and_trains_those_with_an_advantage() -> None:
    batch = packed(Recipe.named(advantage="mean"), groups())
    assert batch is not None
    assert list(batch.weights_N) == pytest.approx(
        [0.5 / 6] + [-0.5 / 6] * 2
    )  # b's three tokens count in the six
    assert batch.kl_weights_N is None


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        ("token", [0.5 / 6, -0.5 / 6, -0.5 / 6]),
        ("sequence", [0.5 / 4, -0.5 / 8, -0.5 / 8]),
        ("constant", [0.5 / 40, -0.5 / 40, -0.5 / 40]),
        ("sum", [0.5 / 4, -0.5 / 4, -0.5 / 4]),
    ],
)
def test_the_aggregate_decides_what_a_token_weighs(aggregate, expected: list[float]) -> None:
    batch = packed(Recipe.named(advantage="mean", aggregate=aggregate), groups())
    assert batch is not None
    assert list(batch.weights_N) == pytest.approx(expected)


def test_dynamic_sampling_leaves_a_group_out_of_the_normaliser_too() -> None:
    recipe = Recipe.named(advantage="mean", dynamic_sampling=True)
    weighing = recipe.weigh(groups(), SAMPLING)
    assert weighing.left_out == {"b0", "b1"}
    assert weighing.advantages == {"a0": 0.5, "a1": -0.5, "b0": 0.0, "b1": 0.0}
    assert weighing.metrics == {"groups/dropped": 1.0, "groups/refill": 1.0}
    batch = recipe.pack(groups(), weighing, SAMPLING)
    assert batch is not None
    assert list(batch.weights_N) == pytest.approx([0.5 / 3] + [-0.5 / 3] * 2)


def test_a_masked_reply_stays_in_the_baseline_and_leaves_batch_and_normaliser() -> None:
    made = [Group("a", TASK, (member("x", 1.0), member("y", 0.0, 3, StopReason.LENGTH), member("z", 0.0)))]
    recipe = Recipe.named(advantage="mean", truncated="mask")
    weighing = recipe.weigh(made, SAMPLING)
    assert weighing.advantages == pytest.approx({"x": 2 / 3, "y": 0.0, "z": -1 / 3})
    assert weighing.left_out == {"y"}
    assert weighing.metrics == {"completion/masked": 1.0}
    batch = recipe.pack(made, weighing, SAMPLING)
    assert batch is not None
    assert list(batch.weights_N) == pytest.approx([2 / 12] * 2 + [-1 / 12] * 2)


def test_a_batch_of_which_everything_is_masked_is_no_batch() -> None:
    made = [Group("a", TASK, tuple(member(f"m{n}", n, 2, StopReason.LENGTH) for n in range(2)))]
    assert packed(Recipe.named(truncated="mask", kl_coef=0.1), made) is None
    assert packed(Recipe.named(dynamic_sampling=True), groups(b=(1.0, 1.0))) is None


def test_a_long_reply_is_penalized_and_its_group_is_judged_by_the_rewards_it_got() -> None:
    """DAPO (arXiv:2503.14476): a buffer of a fifth, and groups are filtered by the rewards they got."""
    made = [
        Group("a", TASK, (member("x", 1.0, 9), member("y", 0.0, 2))),
        Group("b", TASK, (member("z", 1.0, 10), member("w", 1.0, 1))),
    ]
    weighing = Recipe.named(advantage="mean", truncated="penalize").weigh(made, SAMPLING)
    assert weighing.advantages == pytest.approx({"x": 0.25, "y": -0.25, "z": -0.5, "w": 0.5})
    assert weighing.metrics == {"groups/penalized": 2.0}
    both = Recipe.named(advantage="mean", truncated="penalize", dynamic_sampling=True).weigh(made, SAMPLING)
    assert both.left_out == {"z", "w"}
    assert [t.outcome.value for g in made for t in g.rewarded] == [1.0, 0.0, 1.0, 1.0]  # type: ignore[union-attr]


def test_with_a_kl_term_what_has_no_advantage_is_trained_towards_the_reference() -> None:
    recipe = Recipe.named(advantage="mean", kl_coef=0.1)
    batch = packed(recipe, groups())
    assert batch is not None
    assert batch.target_count == 6
    assert batch.kl_weights_N is not None
    assert list(batch.kl_weights_N) == pytest.approx([1 / 6] * 6)
    assert recipe.loss.kl_coef == 0.1
    ready = recipe.prepare(batch, Asked(-1.0), Asked(-2.0)).batch
    assert ready.ref_logprobs_N == array("f", [-2.0] * 6)
    with pytest.raises(ValueError, match="needs a reference"):
        recipe.prepare(batch, Asked(-1.0))


def test_one_update_without_correction_asks_no_model() -> None:
    batch, policy = packed(Recipe.named(), groups()), Asked(-1.0)
    assert batch is not None
    ready = Recipe.named().prepare(batch, policy)
    assert (ready.batch, ready.metrics, policy.times) == (batch, {}, 0)


def test_from_the_second_update_on_the_ratio_is_to_the_policy_before_the_first() -> None:
    recipe, policy = Recipe.named(updates_per_step=2, correction="tis:2"), Asked(-1.5)
    batch = packed(recipe, groups())
    assert batch is not None
    ready = recipe.prepare(batch, policy)
    assert policy.times == 1
    assert ready.batch.old_logprobs_N == array("f", [-1.5] * 3)


def test_a_correction_multiplies_weights_and_leaves_the_kl_term_alone() -> None:
    """TRL's convention: the mismatch of the samples is the policy term's alone."""
    recipe = Recipe.named(advantage="mean", correction="tis:2", kl_coef=0.1)
    batch = packed(recipe, groups())
    assert batch is not None
    policy = Asked(-1.0 + math.log(1.5))  # the sampler said -1 of every token
    ready = recipe.prepare(batch, policy, Asked(-1.0))
    assert list(ready.batch.weights_N) == pytest.approx([1.5 * w for w in batch.weights_N])
    assert ready.batch.kl_weights_N == batch.kl_weights_N
    assert ready.batch.old_logprobs_N is None  # one update: the ratio is 1 by definition
    assert ready.metrics == {"correction/capped_fraction": 0.0, "correction/masked_fraction": 0.0}
    capped = recipe.prepare(batch, Asked(0.0), Asked(-1.0))
    assert capped.metrics["correction/capped_fraction"] == 1.0
    assert list(capped.batch.weights_N) == pytest.approx([2 * w for w in batch.weights_N])


def test_distillation_weighs_by_the_teacher_and_asks_no_reward() -> None:
    recipe = Recipe.named(advantage="distill")
    made = groups(a=(0.0, 0.0), b=(1.0,))
    batch = packed(recipe, made)
    assert batch is not None
    assert batch.target_count == 4
    ready = recipe.prepare(batch, Asked(-2.0), Asked(-1.0)).batch
    assert list(ready.weights_N) == pytest.approx([1 / 4] * 4)
    other = recipe.prepare(batch, Asked(-1.0), Asked(-3.0)).batch
    assert list(other.weights_N) == pytest.approx([-2 / 4] * 4)


def test_a_reward_that_the_rule_cannot_take_is_refused() -> None:
    with pytest.raises(ValueError, match="takes rewards >= 0, and one is -1"):
        Recipe.named(advantage="maxrl").weigh(groups(a=(1.0, -1.0)), SAMPLING)


def test_an_algorithm_that_forgets_a_trajectory_is_refused_by_its_name() -> None:
    register_algorithm("forgetful", advantages=lambda groups: {"a0": 1.0})
    try:
        with pytest.raises(ValueError, match="no advantage to trajectory a1"):
            Recipe.named(advantage="forgetful").weigh(groups(), SAMPLING)
    finally:
        registry._added.clear()


@given(st.integers(0, 10_000), st.sampled_from(["token", "sequence", "constant", "sum"]), st.randoms())
def test_neither_the_order_of_groups_nor_that_of_members_changes_what_a_target_weighs(
    seed: int, aggregate, shuffle
) -> None:
    """Case 11 (verl#2996) and case 18 (slime#1414): ragged groups, in any order."""
    recipe = Recipe.named(aggregate=aggregate, kl_coef=0.1)
    made = random_groups(seed)
    turned = [
        replace(g, trajectories=tuple(shuffle.sample(g.trajectories, len(g.trajectories)))) for g in made
    ]
    shuffle.shuffle(turned)

    def weights(batch: Batch | None) -> list[tuple[int, float, float]]:
        assert batch is not None
        assert batch.kl_weights_N is not None
        rows = zip(batch.targets_N, batch.weights_N, batch.kl_weights_N, strict=True)
        return sorted((target, round(w, 6), round(k, 6)) for target, w, k in rows)

    left, right = weights(packed(recipe, made)), weights(packed(recipe, turned))
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a == pytest.approx(b, abs=2e-6)


@given(st.integers(0, 10_000))
def test_groups_without_variance_weigh_exactly_nothing(seed: int) -> None:
    made = random_groups(seed)
    flat = [
        replace(
            g,
            trajectories=tuple(trajectory(t.id, [((1,), False), ((2,), True)], 0.3) for t in g.trajectories),
        )
        for g in made
    ]
    for advantage in (
        "grpo",
        "mean",
        "rloo",
        "batch-std",
        "reinforce++",
        "reinforce++baseline",
        "maxrl",
        "pass@2",
    ):
        recipe = Recipe.named(advantage=advantage)
        assert set(recipe.weigh(flat, SAMPLING).advantages.values()) <= {0.0}
        assert packed(recipe, flat) is None
