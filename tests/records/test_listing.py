"""``palestra runs list``: every run, also the broken ones, without reading them whole."""

from __future__ import annotations

import json
from pathlib import Path

from palestra.records.folder import RunFolder
from palestra.records.listing import list_runs
from palestra.records.writer import RunWriter


def make(path: Path, created: float, *, steps: int = 0, status: str = "finished") -> None:
    run = RunFolder.open(path, create=True)
    run.begin_attempt({}, {"model": "from-config", "steps": 20}, {})
    writer = RunWriter(run)
    for step in range(1, steps + 1):
        writer.metrics({"reward/mean": step / 10, "time/step_s": 1.0}, step=step, version=step)
    writer.metrics({"time/checkpoint_s": 1.0}, step=99, version=0)
    writer.close()
    run.set_status(status)
    run.unlock()
    info = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(info | {"created": created}))


def test_runs_are_listed_newest_first_with_their_last_step(tmp_path: Path) -> None:
    make(tmp_path / "old", 100.0, steps=3)
    make(tmp_path / "new", 200.0, steps=5, status="stopped")
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "a-file").touch()
    new, old = list_runs(tmp_path)
    assert (new.name, new.state, new.step, new.reward) == ("new", "stopped", 5, 0.5)
    assert (old.name, old.steps, old.model, old.attempts) == ("old", 20, "from-config", 1)
    assert old.path == tmp_path / "old"


def test_what_run_json_says_wins_over_the_configuration(tmp_path: Path) -> None:
    make(tmp_path / "a", 1.0)
    RunFolder.open(tmp_path / "a", create=False).update(model="org/name", steps=7)
    (run,) = list_runs(tmp_path)
    assert (run.model, run.steps, run.step, run.reward) == ("org/name", 7, 0, None)


def test_a_restarted_run_without_a_step_yet_shows_the_last_one_it_has(tmp_path: Path) -> None:
    make(tmp_path / "a", 1.0, steps=4)
    run = RunFolder.open(tmp_path / "a", create=False)
    run.begin_attempt({}, {}, {})
    RunWriter(run).close()
    run.unlock()
    (summary,) = list_runs(tmp_path)
    assert (summary.step, summary.reward, summary.attempts) == (4, 0.4, 2)


def test_a_run_that_cannot_be_read_is_listed_with_the_reason(tmp_path: Path) -> None:
    make(tmp_path / "good", 1.0)
    for name, content in (("future", '{"schema": 9}'), ("broken", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(content)
    (tmp_path / "broken" / "config").mkdir()
    found = {run.name: run for run in list_runs(tmp_path)}
    assert found["future"].state == "unreadable"
    assert "newer" in found["future"].reason
    assert found["broken"].state == "lost"
    assert found["good"].state == "finished"


def test_no_runs_folder_is_no_run(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "none") == []
    assert list_runs(tmp_path) == []
