"""Curves and shares."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.ui.sparkline import apportion, duration, resample, sparkline


def test_a_rising_curve_rises() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([7, 0], 8) == "█▁"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8, ascii_only=True) == "_.-=+*#@"


def test_a_flat_curve_is_flat_and_in_the_middle() -> None:
    assert sparkline([0.5] * 4, 10) == "▄▄▄▄"


def test_more_values_than_columns_become_means() -> None:
    assert resample([0, 2, 4, 6], 2) == [1.0, 5.0]
    assert len(sparkline(list(range(1000)), 17)) == 17


def test_what_is_not_finite_is_a_gap() -> None:
    assert sparkline([0.0, math.nan, 1.0], 3) == "▁ █"
    assert sparkline([math.nan], 3) == " "
    assert sparkline([], 3) == ""
    assert sparkline([1.0], 0) == ""


@settings(deadline=None)
@given(st.lists(st.floats(), max_size=50), st.integers(-3, 30))
def test_a_curve_is_never_wider_than_asked(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(len(values), max(0, width))


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1e9), min_size=1, max_size=8), st.integers(1, 200))
def test_shares_sum_to_the_whole_exactly(amounts: dict[str, float], total: int) -> None:
    shares = apportion(amounts, total)
    assert shares.keys() == amounts.keys()
    assert sum(shares.values()) == (total if sum(amounts.values()) > 0 else 0)
    whole = sum(amounts.values())
    assert all(abs(shares[n] - a / whole * total) < 1 + 1e-6 for n, a in amounts.items() if whole > 0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1:00"),
        (245, "4:05"),
        (7439, "2:03:59"),
        (90_061, "1 d 1:01:01"),
        (200_000, "2 d 7 h"),
        (-5, "0 s"),
        (math.nan, "0 s"),
        (math.inf, "0 s"),
    ],
)
def test_durations_read_as_people_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
