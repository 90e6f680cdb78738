"""What a user returned is a verdict or an error that names who returned what; it is never guessed."""

from __future__ import annotations

import functools
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.environments.rewards import name_of, place_of, verdict_of
from palestra.errors import RewardError
from palestra.types import Abstain, Reward

RANGE = (-1.0, 2.0)


def my_reward(task: object, reply: str) -> float:
    return 1.0


class Judge:
    def __call__(self, task: object, reply: str) -> float:
        return 1.0


@given(st.floats(min_value=-1.0, max_value=2.0) | st.integers(min_value=-1, max_value=2) | st.booleans())
def test_numbers_in_range_are_rewards(value: float) -> None:
    assert verdict_of(value, RANGE, my_reward) == Reward(float(value))


@pytest.mark.parametrize("value", [Decimal("0.5"), Fraction(1, 2)])
def test_other_real_numbers_are_rewards(value: Any) -> None:
    assert verdict_of(value, RANGE, my_reward) == Reward(0.5)


def test_framework_scalars_are_rewards() -> None:
    numpy = pytest.importorskip("numpy")
    assert verdict_of(numpy.float32(0.5), RANGE, my_reward) == Reward(0.5)
    assert verdict_of(numpy.bool_(True), RANGE, my_reward) == Reward(1.0)


def test_rewards_and_abstentions_pass_through() -> None:
    reward, abstain = Reward(2.0, {"style": 7.0}), Abstain("the judge was away")
    assert verdict_of(reward, RANGE, my_reward) is reward
    assert verdict_of(abstain, RANGE, my_reward) is abstain


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "None: no verdict"),
        ("1.0", "a str: '1.0'"),
        (b"1", "a bytes: b'1'"),
        ([1.0], "a list"),
        (1j, "a complex"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        (2.5, "2.5, outside the declared range"),
        (-1.01, "-1.01, outside the declared range"),
        (Reward(3.0), "3, outside the declared range"),
        (10**400, "a int"),
        ("x" * 500, "..."),
    ],
)
def test_anything_else_is_refused_with_name_place_value_and_expectation(value: Any, said: str) -> None:
    """Case 17 (OpenEnv PR#1025, #1199, Repo2RLEnv#144): absent verdicts, nan and 1.5 passed as rewards."""
    with pytest.raises(RewardError) as caught:
        verdict_of(value, RANGE, my_reward)
    error = caught.value
    assert error.what.startswith("my_reward returned ")
    assert said in error.what
    assert "test_rewards.py:" in error.where
    assert "a finite number from -1 to 2" in error.expected
    assert len(error.what) < 200


def test_functions_partials_methods_and_objects_have_names_and_places() -> None:
    line = my_reward.__code__.co_firstlineno
    assert (name_of(my_reward), place_of(my_reward)) == ("my_reward", f"{__file__}:{line}")
    partial = functools.partial(my_reward, reply="x")
    assert (name_of(partial), place_of(partial)) == ("partial of my_reward", place_of(my_reward))
    assert name_of(Judge()) == "Judge"
    assert place_of(Judge()).startswith(__file__)
    assert place_of(Judge().__call__).startswith(__file__)
    assert place_of(len) == ""
