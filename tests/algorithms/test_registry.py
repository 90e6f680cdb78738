"""Names of algorithms: what they stand for, and what a user may add."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest

from helpers.forest import TASK, trajectory
from palestra.algorithms import registry
from palestra.algorithms.registry import Advantage, advantage_rule, loss_rule, register_algorithm
from palestra.batches import LossSpec
from palestra.types import Group


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    registry._added.clear()
    registry._added_losses.clear()


def group(name: str, *rewards: float | None, length: int = 1) -> Group:
    members = (
        trajectory(f"{name}{n}", [((1,), False), ([2] * length, True)], reward)
        for n, reward in enumerate(rewards)
    )
    return Group(name, TASK, tuple(members))


GROUPS = [group("a", 1.0, 0.0), group("b", 1.0, None, 1.0, 4.0)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mean", {"a0": 0.5, "a1": -0.5, "b0": -1.0, "b2": -1.0, "b3": 2.0}),
        ("rloo", {"a0": 1.0, "a1": -1.0, "b0": -1.5, "b2": -1.5, "b3": 3.0}),
        ("maxrl", {"a0": 1.0, "a1": -1.0, "b0": -0.5, "b2": -0.5, "b3": 1.0}),
        ("grpo", {"a0": 0.5**0.5, "a1": -(0.5**0.5), "b0": -1 / 3**0.5, "b2": -1 / 3**0.5, "b3": 2 / 3**0.5}),
        ("pass@2", {"a0": 2.0, "a1": 0.0, "b0": 0.0, "b2": 0.0, "b3": 6.0}),
        ("distill", dict.fromkeys(("a0", "a1", "b0", "b2", "b3"), 1.0)),
    ],
)
def test_a_name_gives_each_rewarded_trajectory_its_advantage(name: str, expected: dict[str, float]) -> None:
    assert advantage_rule(name).compute(GROUPS) == pytest.approx(expected, rel=1e-5)


def test_reinforce_plus_plus_compares_with_the_whole_batch_and_its_baseline_form_with_the_group_first() -> (
    None
):
    groups = [group("a", 1.0, length=3), group("b", 0.0)]
    plain = advantage_rule("reinforce++").compute(groups)
    assert plain == pytest.approx({"a0": 0.5, "b0": -1.5}, rel=1e-6)
    based = advantage_rule("reinforce++baseline").compute([group("a", 1.0, 0.0), group("b", 5.0, 5.0)])
    deviation = ((0.25 + 0.25) / 3) ** 0.5
    assert based == pytest.approx({"a0": 0.5 / deviation, "a1": -0.5 / deviation, "b0": 0, "b1": 0}, rel=1e-6)


def test_batch_std_keeps_the_groups_apart_and_divides_by_one_deviation() -> None:
    found = advantage_rule("batch-std").compute(GROUPS)
    values = [1.0, 0.0, 1.0, 1.0, 4.0]
    mean = sum(values) / 5
    std = (sum((v - mean) ** 2 for v in values) / 4) ** 0.5
    assert found == pytest.approx(
        {"a0": 0.5 / std, "a1": -0.5 / std, "b0": -1 / std, "b2": -1 / std, "b3": 2 / std}, rel=1e-5
    )


@pytest.mark.parametrize("name", ["grpo", "mean", "rloo", "batch-std", "reinforce++", "reinforce++baseline",
                                  "maxrl", "pass@3", "distill"])  # fmt: skip
def test_no_rule_minds_a_step_of_abstentions(name: str) -> None:
    assert advantage_rule(name).compute([group("a", None, None)]) == {}
    assert advantage_rule(name).compute([]) == {}


def test_each_rule_says_how_large_a_group_must_be() -> None:
    """Case 30 (training-gym tutorial 002)."""
    least = {name: advantage_rule(name).least_group for name in ("grpo", "reinforce++", "pass@4", "distill")}
    assert least == {"grpo": 2, "reinforce++": 1, "pass@4": 4, "distill": 1}


def test_losses_take_their_clips() -> None:
    assert loss_rule("ppo")(0.1, 0.3) == LossSpec("policy", 0.1, 0.3)
    assert loss_rule("gspo")(0.1, 0.3) == LossSpec("policy", 0.1, 0.3, ratio="sequence")
    assert loss_rule("rloo")(0.1, 0.3) == LossSpec("policy", 0.1, 0.3, ratio="product")
    assert loss_rule("cispo")(1.0, 4.0) == LossSpec("cispo", 1.0, 4.0)
    assert loss_rule("sapo")(0.1, 0.3).kind == "sapo"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gropo", "nearest: grpo"),
        ("pass@1", "pass@K with K >= 2"),
        ("pass@x", "pass@K"),
        ("", "expected one of"),
    ],
)
def test_an_unknown_advantage_is_refused_with_what_there_is(name: str, said: str) -> None:
    with pytest.raises(ValueError, match="expected one of grpo, mean") as caught:
        advantage_rule(name)
    assert said in str(caught.value)


def test_an_unknown_loss_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="expected one of ppo, gspo, rloo, cispo, sapo; nearest: cispo"):
        loss_rule("cisp")


def best_only(groups: Sequence[Group]) -> Mapping[str, Advantage]:
    return {
        t.id: float(r == max(g.rewards)) for g in groups for t, r in zip(g.rewarded, g.rewards, strict=True)
    }


def test_a_user_adds_an_advantage_and_a_loss_under_one_name() -> None:
    register_algorithm(
        "best-only", advantages=best_only, loss=lambda low, high: LossSpec(dual_clip=3.0), least_group=3
    )
    rule = advantage_rule("best-only")
    assert (rule.least_group, rule.least_reward, rule.distils) == (3, None, False)
    assert rule.compute(GROUPS) == {"a0": 1.0, "a1": 0.0, "b0": 0.0, "b2": 0.0, "b3": 1.0}
    assert loss_rule("best-only")(0.2, 0.2).dual_clip == 3.0


def test_only_what_was_given_is_added_and_giving_it_again_replaces_it() -> None:
    register_algorithm("mine", advantages=best_only)
    with pytest.raises(ValueError, match="expected one of"):
        loss_rule("mine")
    register_algorithm("mine", advantages=lambda groups: {})
    assert advantage_rule("mine").compute(GROUPS) == {}
    with pytest.raises(ValueError, match=r"pass@K with K >= 2, mine"):
        advantage_rule("x")


@pytest.mark.parametrize("name", ["grpo", "cispo", "distill"])
def test_a_built_in_name_always_means_the_same_thing(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is built in"):
        register_algorithm(name, advantages=best_only)


@pytest.mark.parametrize("name", ["", "My", "pass@2", "a b", "-x"])
def test_a_name_is_written_like_the_others(name: str) -> None:
    with pytest.raises(ValueError, match="an algorithm's name is lower-case"):
        register_algorithm(name, advantages=best_only)


def test_an_algorithm_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="needs advantages=, loss= or both"):
        register_algorithm("mine")
