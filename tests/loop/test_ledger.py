from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.loop.draws import draws_of_step
from palestra.loop.ledger import Ledger, LedgerError

PER_STEP, TASKS = 3, 5


def draws_entry(step: int) -> dict[str, Any]:
    drawn = draws_of_step(step, prompts_per_step=PER_STEP, tasks=TASKS, seed=7)
    return {
        "kind": "draws",
        "step": step,
        "draws": [d.index for d in drawn],
        "tasks": [f"task{d.task_index}" for d in drawn],
    }


def step_entries(step: int) -> list[dict[str, Any]]:
    return [
        draws_entry(step),
        {"kind": "groups", "step": step},
        {"kind": "update", "step": step, "version": step, "applied": True},
    ]


def attempt(step: int) -> dict[str, Any]:
    return {"kind": "attempt", "step": step}


def test_a_ledger_that_says_nothing_proves_nothing() -> None:
    """NeMo-RL PR#3480 (case 28): a resumed run executed zero steps and reported success."""
    assert not Ledger(PER_STEP).audit().ok
    assert not Ledger(PER_STEP).replay([attempt(0)]).audit().ok
    begun = Ledger(PER_STEP).replay([attempt(0), step_entries(1)[0]]).audit()
    assert not begun.ok, "drawn, and never updated"


def test_an_undisturbed_run_audits_clean() -> None:
    entries = [attempt(0), *step_entries(1), *step_entries(2), {"kind": "checkpoint", "step": 2}]
    audit = Ledger(PER_STEP).replay(entries).audit()
    assert audit.ok
    assert (audit.steps, audit.draws, audit.attempts, audit.undone_steps) == (2, 6, 1, 0)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), kills=st.integers(0, 6), every=st.integers(1, 4))
def test_over_random_kills_no_prompt_is_skipped_or_repeated(seed: int, kills: int, every: int) -> None:
    """NeMo-RL PR#3599, PR#3480, TRL PR#7294 (case 28): resume skipped about 30 % of the prompts."""
    rng = random.Random(seed)
    entries: list[dict[str, Any]] = []
    checkpoint, steps = 0, 12
    for kill in range(kills + 1):
        alive = rng.randint(1, 3 * steps) if kill < kills else 10**9
        entries.append(attempt(checkpoint))
        for step in range(checkpoint + 1, steps + 1):
            for entry in step_entries(step):
                if alive > 0:
                    entries.append(entry)
                    alive -= 1
            if alive > 0 and step % every == 0:
                checkpoint = step
                entries.append({"kind": "checkpoint", "step": step})
    audit = Ledger(PER_STEP).replay(entries).audit()
    assert audit.ok
    assert audit.steps == steps
    assert audit.draws == steps * PER_STEP
    assert audit.attempts == kills + 1


def test_a_skipped_prompt_is_found() -> None:
    entry = draws_entry(1)
    entry["draws"], entry["tasks"] = entry["draws"][:-1], entry["tasks"][:-1]
    rest = step_entries(1)[1:]
    audit = Ledger(PER_STEP).replay([attempt(0), entry, *rest]).audit()
    assert not audit.ok
    assert audit.skipped == 1


def test_a_repeated_prompt_is_found() -> None:
    again = draws_entry(1) | {"step": 2}
    audit = Ledger(PER_STEP).replay([attempt(0), *step_entries(1), again, *step_entries(2)[1:]]).audit()
    assert not audit.ok
    assert audit.repeated == 3
    assert audit.skipped == 3


def test_a_draw_that_names_another_task_after_a_restart_is_found() -> None:
    changed = draws_entry(1)
    changed["tasks"] = ["other", *changed["tasks"][1:]]
    audit = (
        Ledger(PER_STEP)
        .replay([attempt(0), draws_entry(1), attempt(0), changed, *step_entries(1)[1:]])
        .audit()
    )
    assert not audit.ok
    assert audit.changed == 1


def test_work_undone_by_a_restart_is_counted() -> None:
    entries = [attempt(0), *step_entries(1), *step_entries(2), attempt(1), *step_entries(2)]
    audit = Ledger(PER_STEP).replay(entries).audit()
    assert audit.ok
    assert audit.undone_steps == 1


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"kind": "groups", "step": 1}], "without its draws"),
        ([draws_entry(1), {"kind": "update", "step": 1, "version": 1}], "before its groups"),
        ([*step_entries(1), {"kind": "update", "step": 1, "version": 2}], "updated twice"),
        ([draws_entry(2)], "after step 0"),
        ([draws_entry(1), draws_entry(1)], "after step 0"),
        (
            [draws_entry(1), {"kind": "groups", "step": 1}, {"kind": "checkpoint", "step": 1}],
            "before its update",
        ),
        ([attempt(3)], "resumed from step 3"),
        ([draws_entry(1) | {"tasks": []}], "3 draws and 0 tasks"),
    ],
)
def test_an_entry_that_could_not_have_happened_is_refused(
    entries: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(LedgerError, match=message):
        Ledger(PER_STEP).replay(entries)


def test_an_unknown_kind_of_entry_is_refused() -> None:
    for entry in (
        {"kind": "invented", "step": 1},
        {"step": 1},
        {"kind": "draws"},
        {"kind": "draws", "step": "x"},
    ):
        with pytest.raises(LedgerError, match="not an entry"):
            Ledger(PER_STEP).add(entry)
