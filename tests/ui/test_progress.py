"""The fold over records: phases that sum, restarts that do not double, odd records that do no harm."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.ui.progress import PHASES, RunProgress


def test_every_second_is_in_exactly_one_phase(story: Any) -> None:
    tale, progress = story(), RunProgress(steps=10)
    for record in tale.whole(10):
        progress.feed(record)
    phases = progress.phases()
    assert phases == pytest.approx(
        {
            "generate": 30.0,
            "reward": 10.0,
            "train": 20.0,
            "sync": 0.0,
            "checkpoint": 0.0,
            "eval": 3.0,
            "other": 10.0,
        }
    )
    assert sum(phases.values()) == pytest.approx(progress.elapsed_s()) == pytest.approx(73.0)


def test_a_phase_counts_while_it_is_open(story: Any) -> None:
    """miles#1965: a long evaluation was invisible until it ended."""
    tale, progress = story(), RunProgress()
    progress.feed(next(tale.span("eval", 0.0)))
    assert progress.phases(now_m=1042.0)["eval"] == pytest.approx(42.0)
    assert progress.phases(now_m=1042.0)["other"] == 0.0


def test_a_restart_continues_the_sum_with_another_clock(story: Any) -> None:
    first, second, progress = story(), story(), RunProgress(steps=4)
    for record in [*first.step(1, 0.1), *first.step(2, 0.2), next(first.span("train", 5.0))]:
        progress.feed(record)
    progress.begin_attempt()
    second.m = 3.0  # rebooted: the monotonic clock began again
    for record in [*second.step(2, 0.25), *second.step(3, 0.3)]:
        progress.feed(record)
    assert progress.rewards == {1: 0.1, 2: 0.25, 3: 0.3}
    assert progress.elapsed_s() == pytest.approx(28.0)
    assert sum(progress.phases().values()) == pytest.approx(28.0)
    assert progress.phases()["train"] == pytest.approx(8.0)


def test_a_restart_forgets_the_steps_it_undoes(story: Any) -> None:
    tale, progress = story(), RunProgress()
    for step in (1, 2, 3, 4, 2):
        for record in tale.step(step, step / 10):
            progress.feed(record)
    assert progress.rewards == {1: 0.1, 2: 0.2}
    assert progress.step == 2


def test_the_rest_of_the_time_follows_the_recent_pace(story: Any) -> None:
    tale, progress = story(), RunProgress(steps=50)
    assert progress.eta_s is None
    for step in range(1, 21):
        if step <= 5:
            tale.m += 100.0  # a slow start is no prophecy
        for record in tale.step(step):
            progress.feed(record)
    assert progress.eta_s == pytest.approx(30 * 7.0)
    assert progress.tokens_per_s == pytest.approx(200.0)


def test_a_step_is_finished_once_and_knows_its_abstentions(story: Any) -> None:
    tale, progress = story(), RunProgress()
    progress.feed(tale.event("abstain", 1, boundary="sandbox", reason="boot", count=3))
    progress.feed(tale.event("abstain", 1, boundary="reward", reason="nan", count=1))
    finished = [line for record in tale.step(1) if (line := progress.feed(record)) is not None]
    assert [(f.step, f.abstained, f.abstain_reason) for f in finished] == [(1, 4, "reward: nan")]
    assert progress.feed(tale.metrics(1, time__checkpoint_s=1.0)) is None
    assert progress.abstained == 4
    second = [line for record in tale.step(2) if (line := progress.feed(record)) is not None]
    assert (second[0].abstained, second[0].abstain_reason) == (0, "")


def test_a_step_without_a_reward_is_a_step(story: Any) -> None:
    tale, progress = story(), RunProgress()
    line = progress.feed(tale.metrics(1, time__step_s=1.0, abstained=8.0))
    assert line is not None
    assert line.abstained == 8
    assert progress.rewards == {}


def test_other_processes_clocks_are_left_out(story: Any) -> None:
    tale, progress = story(), RunProgress()
    progress.feed({**tale.metrics(7, time__step_s=1.0), "process": "trainer-3", "m": 9e9})
    assert progress.step == 0
    assert progress.elapsed_s() == 0.0


def test_held_out_results_are_kept_by_moment(story: Any) -> None:
    progress = RunProgress()
    for record in story().whole(2):
        progress.feed(record)
    assert progress.evals["before"]["sampled"].mean == 0.1234
    assert progress.evals["after"]["greedy"].high == 0.68


odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
fields = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["metrics", "span", "event", "rollout", "new"]),
        "m": st.floats(0, 1e6) | odd,
        "kind": st.sampled_from(["state", "notice", "abstain", "eval", "dropped", "new"]),
        "step": st.integers() | odd,
        "phase": st.sampled_from(["open", "close"]),
        "name": st.sampled_from(PHASES) | odd,
        "id": odd,
        "values": st.dictionaries(st.sampled_from(["reward/mean", "time/step_s", "abstained", "x"]), odd)
        | odd,
        "fields": st.dictionaries(
            st.sampled_from(["count", "reason", "boundary", "when", "sampled", "state"]), odd
        )
        | odd,
    },
)


@settings(deadline=None, max_examples=60)
@given(st.lists(fields, max_size=12))
def test_no_record_whatever_breaks_the_fold(records: list[dict[str, Any]]) -> None:
    progress = RunProgress(steps=3)
    for record in records:
        progress.feed(record)
    assert all(seconds >= 0 for seconds in progress.phases().values() if not math.isnan(seconds))
