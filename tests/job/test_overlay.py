"""A command's layers over a user's file: every Job.train() inside resolves with them."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

import palestra.run
from helpers.declared import Declared
from palestra.errors import ConfigError
from palestra.job import Job
from palestra.settings import JobSeenError, Overlay, Resolved, active, overlay


class GuessNumber(Declared):
    pass


def job(**values: Any) -> Job:
    return Job(**{"model": "./m", "environment": GuessNumber(), **values})


class Started:
    """Stands in for `palestra.run.train`: keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Resolved, bool, bool | None]] = []

    def __call__(self, resolved: Resolved, *, wait: bool = True, panel: bool | None = None) -> str:
        self.asked.append((resolved, wait, panel))
        return f"run of {resolved.job.name}"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("PALESTRA_")]:
        monkeypatch.delenv(name)
    stand_in = Started()
    monkeypatch.setattr(palestra.run, "train", stand_in)
    return stand_in


def test_train_resolves_and_hands_over(started: Started) -> None:
    Path("palestra.toml").write_text("seed = 7")
    assert job(name="x").train(wait=False, panel=True) == "run of x"
    ((resolved, wait, panel),) = started.asked
    assert (resolved.job.seed, wait, panel) == (7, False, True)


def test_steps_of_train_count_as_written_in_python(started: Started) -> None:
    job(steps=3).train(5)
    with overlay(Overlay(sets=["steps=8"])):
        job().train(steps=5)
    first, second = (asked[0] for asked in started.asked)
    assert first.job.steps == 5
    assert first.provenance["steps"].source == "job file"
    assert "test_overlay.py:" in first.provenance["steps"].detail
    assert second.job.steps == 8
    assert second.provenance["steps"].overridden[0].value == 5


def test_wrong_steps_of_train_are_refused_with_the_line(started: Started) -> None:
    with pytest.raises(
        ConfigError, match=r"steps: expected a whole number >= 1, got 0 from .*test_overlay\.py:\d+"
    ):
        job().train(0)
    assert started.asked == []


def test_steps_of_train_leave_the_job_as_it_was(started: Started) -> None:
    built = job(steps=3)
    built.train(5)
    built.train()
    assert [asked[0].job.steps for asked in started.asked] == [5, 3]


def test_every_train_inside_an_overlay_resolves_with_its_layers(started: Started) -> None:
    Path("c.toml").write_text("seed = 3")
    layers = Overlay(files=[Path("c.toml")], sets=["steps=4"], job_file=Path("/x/mine.py"), panel=False)
    with overlay(layers):
        job().train()
        job(name="second").train(panel=True)
    first, second = started.asked
    assert (first[0].job.name, first[0].job.steps, first[0].job.seed) == ("mine", 4, 3)
    assert first[2] is second[2] is False
    assert layers.runs == ["run of mine", "run of second"]


def test_the_layers_end_with_the_block_also_after_an_error(started: Started) -> None:
    with pytest.raises(RuntimeError), overlay(Overlay(sets=["steps=4"])):
        raise RuntimeError
    job().train()
    assert started.asked[0][0].job.steps == 20
    assert active().sets == ()


def test_overlays_do_not_nest() -> None:
    with (
        overlay(Overlay()),
        pytest.raises(ConfigError, match="inside a file that palestra train runs"),
        overlay(Overlay()),
    ):
        pass


def test_a_job_trained_in_another_thread_sees_the_layers(started: Started) -> None:
    with overlay(Overlay(sets=["steps=4"])):
        thread = threading.Thread(target=job().train)
        thread.start()
        thread.join()
    assert started.asked[0][0].job.steps == 4


def test_looking_resolves_and_trains_nothing_even_past_a_users_except(started: Started) -> None:
    def file() -> None:
        try:
            job(steps=6).train()
        except Exception:
            pytest.fail("user code caught what ends a look")

    with pytest.raises(JobSeenError) as seen, overlay(Overlay(look_only=True)):
        file()
    assert seen.value.resolved.job.steps == 6
    assert started.asked == []
