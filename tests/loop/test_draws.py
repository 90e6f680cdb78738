from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.loop.draws import derive_seed, draw, draws_of_step, epoch_order

tasks_counts = st.integers(1, 40)
seeds = st.integers(0, 2**31)


@given(tasks=tasks_counts, seed=seeds, epochs=st.integers(1, 4))
def test_every_epoch_draws_every_task_exactly_once(tasks: int, seed: int, epochs: int) -> None:
    drawn = [draw(i, tasks=tasks, seed=seed) for i in range(tasks * epochs)]
    counts = Counter((d.epoch, d.task_index) for d in drawn)
    assert counts == Counter((e, t) for e in range(epochs) for t in range(tasks))


@given(tasks=tasks_counts, seed=seeds, per_step=st.integers(1, 9), steps=st.integers(1, 8))
def test_steps_own_consecutive_draws_without_gap_or_overlap(
    tasks: int, seed: int, per_step: int, steps: int
) -> None:
    """NeMo-RL PR#3599 (case 28): a resumed run skipped prompts because a data-loader's place was lost."""
    indexes = [
        d.index
        for step in range(1, steps + 1)
        for d in draws_of_step(step, prompts_per_step=per_step, tasks=tasks, seed=seed)
    ]
    assert indexes == list(range(steps * per_step))


@given(seed=seeds)
def test_epochs_are_ordered_differently_and_repeatably(seed: int) -> None:
    assert epoch_order(30, seed, 0) == epoch_order(30, seed, 0)
    assert epoch_order(30, seed, 0) != epoch_order(30, seed, 1)
    assert epoch_order(30, seed, 0) != epoch_order(30, seed + 1, 0)


def test_seeds_are_named_by_their_parts_and_stay_what_they_were() -> None:
    assert derive_seed(0, "train", 3, 1) == derive_seed(0, "train", 3, 1)
    assert derive_seed(0, "train", 3, 1) != derive_seed(0, "train", 31)
    assert derive_seed("a", 1) == 6431086039603022688, "a change would give resumed runs other samples"
    assert all(0 <= derive_seed(i) < 2**63 for i in range(100))


@pytest.mark.parametrize(("index", "tasks"), [(-1, 3), (0, 0)])
def test_a_draw_that_cannot_be_is_refused(index: int, tasks: int) -> None:
    with pytest.raises(ValueError, match="no draw"):
        draw(index, tasks=tasks, seed=0)
