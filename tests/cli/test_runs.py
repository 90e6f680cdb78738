"""`palestra runs`: what the records say, for people and for programs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from palestra.cli.main import main
from palestra.records.folder import RunFolder
from palestra.records.writer import RunWriter


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("PALESTRA_")]:
        monkeypatch.delenv(name)


def make_run(path: Path, rewards: list[float], *, model: str = "./m", status: str = "finished") -> Path:
    folder = RunFolder.open(path, create=True)
    folder.lock()
    folder.update(model=model, steps=len(rewards))
    folder.begin_attempt({}, {"steps": len(rewards)}, {})
    writer = RunWriter(folder)
    for step, reward in enumerate(rewards, start=1):
        writer.metrics({"reward/mean": reward, "time/step_s": 1.0}, step=step, version=step)
    interval = {"mean": 0.25, "low": 0.2, "high": 0.3, "n": 10}
    writer.evaluation({"when": "before", "step": 0, "sampled": interval, "greedy": None, "abstained": 0})
    writer.close()
    folder.set_status(status, "all done")
    folder.unlock()
    return path


def test_an_empty_folder_has_no_runs_and_says_what_makes_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "list"]) == 0
    assert capsys.readouterr().out == "no runs in runs; palestra quickstart makes the first one\n"
    assert main(["runs", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"runs_dir": "runs", "runs": []}


def test_list_shows_each_run_with_its_state_and_reward(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("runs/first"), [0.1, 0.5])
    make_run(Path("runs/second"), [0.25], status="stopped")
    assert main(["runs", "list"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["name", "state", "step", "reward", "model", "created"]
    first = next(row.split() for row in rows if row.startswith("first"))
    assert first[:5] == ["first", "finished", "2/2", "0.500", "./m"]
    assert any(row.startswith("second") and "stopped" in row and "1/1" in row for row in rows)


def test_list_json_is_data(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("runs/first"), [0.1, 0.5])
    main(["runs", "list", "--json"])
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["name"], run["state"], run["step"], run["steps"], run["reward"]) == (
        "first",
        "finished",
        2,
        2,
        0.5,
    )
    assert (run["path"], run["attempts"]) == ("runs/first", 1)
    assert run["created"] > 1.7e9


def test_a_run_that_cannot_be_read_is_listed_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/broken").mkdir(parents=True)
    Path("runs/broken/run.json").write_text('{"schema": 99}')
    make_run(Path("runs/good"), [0.5])
    assert main(["runs", "list"]) == 0
    shown = capsys.readouterr().out
    assert "broken" in shown
    assert "good" in shown


def test_the_folder_is_the_one_a_job_would_use(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(Path("elsewhere/one"), [0.5])
    make_run(Path("flagged/two"), [0.5])
    Path("palestra.toml").write_text('runs_dir = "elsewhere"\n')
    main(["runs", "list"])
    assert "one" in capsys.readouterr().out
    monkeypatch.setenv("PALESTRA_RUNS_DIR", "flagged")
    main(["runs", "list"])
    assert "two" in capsys.readouterr().out
    main(["runs", "list", "--runs-dir", "elsewhere"])
    assert "one" in capsys.readouterr().out


def test_a_wrong_configuration_file_does_not_keep_runs_from_being_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("palestra.toml").write_text("runs_dir = [")
    make_run(Path("runs/one"), [0.5])
    assert main(["runs", "list"]) == 0
    assert "one" in capsys.readouterr().out


def test_show_tells_how_a_run_stands(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("runs/first"), [0.1, 0.3, 0.9])
    assert main(["runs", "show", "first"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "run first: finished (all done)",
        "runs/first",
        "./m",
        "attempts  1",
        "0.100",
        "0.900",
        "▁",
        "█",
    ):
        assert words in shown
    assert "0.250" in shown


def test_show_takes_a_path_too_and_gives_json(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("copied/first"), [0.1, 0.9])
    assert main(["runs", "show", "copied/first", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["name"], shown["state"], shown["reason"]) == ("first", "finished", "all done")
    assert shown["reward"] == [[1, 0.1], [2, 0.9]]
    assert shown["evaluations"][0]["sampled"]["mean"] == 0.25
    assert shown["checkpoints"] == []
    assert shown["attempts"] == 1


def test_json_stays_strict_where_a_metric_is_not_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("runs/first"), [0.1, float("nan"), 0.9])
    for words in (["runs", "show", "first", "--json"], ["runs", "list", "--json"]):
        assert main(words) == 0
        json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert main(["runs", "show", "first"]) == 0


def test_an_unknown_run_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("runs/quickstart"), [0.5])
    assert main(["runs", "show", "quickstrat"]) == 2
    shown = capsys.readouterr().err
    assert "there is no run 'quickstrat' in runs" in shown
    assert "nearest: quickstart" in shown
    assert "next: palestra runs list" in shown


def test_a_runs_text_cannot_drive_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Helicone#5588 (case 34): stored text from elsewhere is only ever text."""
    make_run(Path("runs/first"), [0.5], model="evil\x1b[2J\x07\u202emodel\nnext line")
    main(["runs", "list"])
    main(["runs", "show", "first"])
    shown = capsys.readouterr().out
    assert "evil" in shown
    assert not any(c in shown for c in "\x1b\x07\u202e")
    assert len([line for line in shown.splitlines() if line.startswith("first ")]) == 1
