"""`palestra config`: what is set and why, and everything that could be set."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from palestra.cli.config import schema_rows, toml_lines
from palestra.cli.main import main
from palestra.fields import leaves, toml_text
from palestra.job import Job
from palestra.settings import resolve_values

JOB_FILE = """\
import palestra as pa
class Guess(pa.SingleTurn):
    __init__ = lambda self: pa.SingleTurn.__init__(self, [], lambda task, reply: 1.0)
print("noise")
job = pa.Job(model='./m', environment=Guess(), steps=7, optimizer={"beta1": 0.5})
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("PALESTRA_")]:
        monkeypatch.delenv(name)
    Path("guess.py").write_text(JOB_FILE)


def test_show_prints_the_layers_as_toml(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--set", "optimizer.beta1=0.25"]) == 0
    shown = tomllib.loads(capsys.readouterr().out)
    assert shown["steps"] == 20
    assert shown["optimizer"]["beta1"] == 0.25
    assert "environment" not in shown
    assert "model" not in shown


def test_show_of_a_file_resolves_its_job_and_trains_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Path("guess.py").write_text(JOB_FILE + "job.train(steps=8)\nraise RuntimeError('not reached')\n")
    assert main(["config", "show", "guess.py", "--set", "seed=3"]) == 0
    streams = capsys.readouterr()
    shown = tomllib.loads(streams.out)
    assert (shown["name"], shown["model"], shown["steps"], shown["seed"]) == ("guess", "./m", 8, 3)
    assert "# environment: Guess" in streams.out
    assert "noise" in streams.err
    assert not Path("runs").exists()


def test_show_of_a_file_that_only_defines_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "guess.py"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["optimizer"]["beta1"] == 0.5


def test_origin_says_where_each_value_comes_from_and_what_it_overrode(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("palestra.toml").write_text("seed = 1\nsteps = 9\n")
    monkeypatch.setenv("PALESTRA_SEED", "2")
    assert main(["config", "show", "guess.py", "--origin", "--set", "steps=10"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "seed = 2  # PALESTRA_SEED, over 1 from palestra.toml:1" in lines
    assert "steps = 10  # --set steps=10, over 9 from palestra.toml:2, 7 from guess.py:5" in lines
    assert "beta1 = 0.5  # guess.py:5" in lines
    assert "beta2 = 0.95  # default" in lines


def test_show_json_holds_values_and_provenance(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "guess.py", "--json", "--set", "steps=10"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["values"]["optimizer"]["beta1"] == 0.5
    assert shown["provenance"]["steps"]["detail"] == "--set steps=10"
    assert shown["provenance"]["steps"]["overridden"][0]["value"] == 7


def test_what_show_prints_gives_the_same_values_again(capsys: pytest.CaptureFixture[str]) -> None:
    main(["config", "show", "guess.py", "--origin", "--set", 'sampling.stop=["a\\n", "\\"", "\\u0007", "é"]'])
    first = capsys.readouterr().out
    Path("palestra.toml").write_text(first)
    main(["config", "show", "guess.py"])
    assert tomllib.loads(capsys.readouterr().out) == tomllib.loads(first)
    assert tomllib.loads(first)["sampling"]["stop"] == ["a\n", '"', "\x07", "é"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(st.lists(st.text(min_size=1, max_size=8), max_size=3), st.text(min_size=1, max_size=8))
def test_any_text_in_a_setting_survives_being_shown(stops: list[str], model: str) -> None:
    sets = [f"sampling.stop={toml_text(stops)}", f"model={toml_text(model)}"]
    found = resolve_values(files=(), environ={}, sets=sets)
    for origins in (False, True):
        lines = list(toml_lines(found, origins=origins))
        shown = tomllib.loads("\n".join(lines))
        assert (shown["sampling"]["stop"], shown["model"]) == (stops, model)
        assert all(line.lstrip("\n").isprintable() for line in lines)


def test_wrong_settings_are_refused_without_a_job_file_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--set", "optimizer.warmup_steps=30", "--set", "stepz=1"]) == 2
    shown = capsys.readouterr().err
    assert "warmup_steps at most 20" in shown
    assert "stepz: no such setting" in shown


def test_schema_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    shown = capsys.readouterr().out
    for key, leaf in leaves(Job).items():
        (line,) = [line for line in shown.splitlines() if line.startswith(f"{key} ")]
        assert f"[{leaf.unit}]" in line
    assert "PALESTRA_SECTION__SETTING=value" in shown


def test_schema_json_is_complete_and_matches_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema", "--json"]) == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)["fields"]}
    assert list(rows) == list(leaves(Job))
    assert rows["steps"] == {
        "key": "steps",
        "type": "a whole number >= 1",
        "unit": "steps",
        "about": "Optimiser updates in the whole run [steps]",
        "default": 20,
    }
    assert rows["trainer.dtype"]["choices"] == ["auto", "fp32", "bf16"]
    assert "default" not in rows["model"]
    assert "default" not in rows["environment"]
    assert all("default" in row for key, row in rows.items() if key not in ("model", "environment"))


def test_the_documentation_lists_every_setting_with_its_default() -> None:
    """docs/configuration.md is written by people; this keeps its table true."""
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    for row in schema_rows():
        default = toml_text(row["default"]) if "default" in row else "required"
        about = row["about"].rpartition(" [")[0]
        assert f"| `{row['key']}` | {row['type']} | `{default}` | {row['unit']} | {about} |" in page
