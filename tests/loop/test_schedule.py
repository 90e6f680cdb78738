from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.loop.schedule import Schedule, learning_rate

schedules = st.sampled_from(["constant", "linear", "cosine"])


@given(schedule=schedules, steps=st.integers(1, 50), warmup=st.integers(0, 50))
def test_no_step_is_wasted_at_rate_zero_or_above_the_peak(
    schedule: Schedule, steps: int, warmup: int
) -> None:
    warmup = min(warmup, steps)
    rates = [
        learning_rate(s, steps=steps, peak=2.0, warmup_steps=warmup, schedule=schedule)
        for s in range(1, steps + 1)
    ]
    assert all(0 < rate <= 2.0 for rate in rates)
    assert max(rates) == 2.0


def test_warm_up_is_linear_and_decay_only_falls() -> None:
    warm = [learning_rate(s, steps=10, peak=1.0, warmup_steps=4, schedule="constant") for s in range(1, 6)]
    assert warm == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    for schedule in ("linear", "cosine"):
        tail = [learning_rate(s, steps=10, peak=1.0, warmup_steps=4, schedule=schedule) for s in range(4, 11)]
        assert tail == sorted(tail, reverse=True)
        assert tail[-1] < 0.2
