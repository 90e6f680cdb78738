from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from palestra.records.folder import RunFolder
from palestra.records.reader import RunReader
from palestra.records.writer import RunWriter
from palestra.ui.summary import summary_of, verdict_sentence


def measured(
    when: str, mean: float, half: float, *, tasks: str = "36 tasks, digest a", abstained: int = 0
) -> dict[str, Any]:
    sampled = {"mean": mean, "low": mean - half, "high": mean + half, "n": 36}
    greedy = {"mean": mean, "low": mean - half, "high": mean + half, "n": 36}
    return {
        "when": when,
        "step": 0,
        "sampled": sampled,
        "greedy": greedy,
        "tasks": tasks,
        "abstained": abstained,
    }


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ((0.2, 0.1), (0.8, 0.1), "rose, and its 95 % intervals do not overlap"),
        ((0.8, 0.1), (0.2, 0.1), "fell, and its 95 % intervals do not overlap"),
        ((0.5, 0.2), (0.6, 0.2), "overlap: no change is shown"),
        ((0.5, 0.1), (0.7, 0.1), "overlap: no change is shown"),
    ],
)
def test_the_sentence_claims_what_the_intervals_allow(
    before: tuple[float, float], after: tuple[float, float], says: str
) -> None:
    assert says in verdict_sentence(measured("before", *before), measured("after", *after))


def test_results_over_other_tasks_are_not_compared() -> None:
    before = measured("before", 0.2, 0.05)
    after = measured("after", 0.9, 0.05, tasks="3 tasks, digest b")
    assert verdict_sentence(before, after) == (
        "Not comparable: 36 tasks, digest a were scored before, 3 tasks, digest b after."
    )


def test_without_both_measurements_nothing_is_claimed() -> None:
    assert "not measured both" in verdict_sentence(None, measured("after", 0.9, 0.05))
    assert "not measured both" in verdict_sentence(
        measured("before", 0.9, 0.1) | {"sampled": None}, measured("after", 1, 0)
    )


def recorded(tmp_path: Path, evals: list[dict[str, Any]]) -> RunReader:
    folder = RunFolder.open(tmp_path / "run", create=True)
    folder.lock()
    folder.begin_attempt({}, {}, {})
    writer = RunWriter(folder)
    for step, reward in ((1, 0.25), (2, 0.75)):
        values = {
            "reward/mean": reward,
            "tokens/useful_fraction": 0.5,
            "time/step_s": 2.0,
            "tokens/sampled": 100.0,
        }
        writer.metrics(values, step=step, version=step)
    for entry in evals:
        writer.evaluation(entry)
    writer.close()
    folder.set_status("finished", "2 steps")
    folder.unlock()
    return RunReader(tmp_path / "run")


def test_a_summary_is_read_from_the_records(tmp_path: Path) -> None:
    text = summary_of(recorded(tmp_path, [measured("before", 0.2, 0.05), measured("after", 0.9, 0.05)]))
    assert "run run: finished (2 steps)" in text
    assert "sampled   0.200  [0.150, 0.250]    ->  0.900  [0.850, 0.950]" in text
    assert "reward 0.250 (step 1) -> 0.750 (step 2)" in text
    assert "200 sampled, 50 % useful a step, 50 tokens/s" in text
    assert "rose" in text
    assert "abstained" not in text


def test_abstentions_of_an_evaluation_are_shown(tmp_path: Path) -> None:
    evals = [measured("before", 0.2, 0.05, abstained=4), measured("after", 0.9, 0.05)]
    assert "abstained 4" in summary_of(recorded(tmp_path, evals))


def test_a_run_without_evaluations_says_nothing_about_held_out_tasks(tmp_path: Path) -> None:
    assert "held-out" not in summary_of(recorded(tmp_path, []))
