"""What the verbs share: printing that cannot be abused, errors as data, and the quick start's words."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.cli import codes
from palestra.cli.command import Command, UsageError, error_json, execute, print_json, report, safe, table
from palestra.cli.main import main
from palestra.errors import ConfigError, MissingExtraError, RewardError, RunStopped, TrainerError


def raising(error: BaseException) -> Command:
    def run(args: argparse.Namespace) -> int:
        raise error

    return Command("Raises.", lambda parser: None, run)


@given(st.text())
def test_safe_text_keeps_lines_and_drops_what_drives_a_terminal(text: str) -> None:
    shown = safe(text)
    assert len(shown) == len(text)
    assert all(c.isprintable() or c in "\n\t" for c in shown)
    if text.isprintable():
        assert shown == text


@given(st.lists(st.lists(st.text(max_size=10), min_size=2, max_size=2), max_size=5))
def test_a_table_has_one_printable_line_for_each_row(rows: list[list[str]]) -> None:
    lines = table(("one", "two"), rows).split("\n")
    assert len(lines) == len(rows) + 1
    assert all(line.isprintable() for line in lines)


def test_columns_are_aligned() -> None:
    assert table(("a", "b"), [("long cell", "1"), ("x", "2")]) == "a          b\nlong cell  1\nx          2"


def test_error_json_leaves_out_what_is_not_known() -> None:
    assert error_json(RewardError("bad")) == {
        "kind": "RewardError", "what": "bad", "boundary": "reward", "exit_code": 2,
    }  # fmt: skip
    config = error_json(ConfigError(["one", "two"]))
    assert (config["problems"], config["exit_code"]) == (["one", "two"], 2)


def test_json_output_is_strict_and_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"number": float("inf"), "path": Path("é"), "nested": [float("nan")]})
    text = capsys.readouterr().out
    assert text.isascii()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["path"] == "é"


@pytest.mark.parametrize(
    ("error", "code"),
    [(UsageError("x"), codes.USAGE), (ConfigError(["x"]), codes.USAGE), (RewardError("x"), codes.USAGE),
     (TrainerError("x"), codes.FAILED),
     (MissingExtraError("torch", "torch"), codes.MISSING), (KeyboardInterrupt(), codes.INTERRUPTED)],
)  # fmt: skip
def test_every_known_failure_leaves_as_a_message_and_its_exit_code(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute("palestra x", raising(error), []) == code
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("palestra: ")
    assert "Traceback" not in streams.err


def test_a_defect_of_ours_is_not_dressed_up_as_the_users_mistake() -> None:
    with pytest.raises(ZeroDivisionError):
        execute("palestra x", raising(ZeroDivisionError()), [])


def test_a_missing_extra_names_the_command_that_installs_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(MissingExtraError("torch", "torch"), as_json=False, debug=False) == 3
    assert "-m pip install 'palestra[torch]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ([], {"task": None, "new": False, "sets": [], "panel": None}),
        (
            ["--task", "expressions", "--new", "--set", "steps=3", "--set", "seed=1", "--no-panel"],
            {"task": "expressions", "new": True, "sets": ["steps=3", "seed=1"], "panel": False},
        ),
    ],
)
def test_quickstart_hands_its_words_to_the_recipe(
    words: list[str], asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from palestra.recipes import quickstart

    got: list[dict[str, Any]] = []

    def stand_in(*, task: str | None, new: bool, sets: Sequence[str], panel: bool | None) -> int:
        got.append({"task": task, "new": new, "sets": list(sets), "panel": panel})
        return 4

    monkeypatch.setattr(quickstart, "main", stand_in)
    assert main(["quickstart", *words]) == 4
    assert got == [asked]


def test_a_word_too_many_behind_set_suggests_the_equals_sign(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "job.py", "--set", "steps", "5"]) == codes.USAGE
    said = capsys.readouterr().err
    assert "one word too many: '5'" in said
    assert "nearest: --set steps=5" in said
    assert main(["train", "job.py", "more"]) == codes.USAGE
    assert "nearest" not in capsys.readouterr().err


def test_a_misspelt_top_level_flag_has_a_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--verison"]) == codes.USAGE
    assert "nearest: palestra --version" in capsys.readouterr().err


def test_the_traceback_behind_a_stopped_run_is_shown_only_where_it_was_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stopped = RunStopped("no reward", where="job.py:3", detail="Traceback ...\n  inner frame")
    assert report(stopped, as_json=False, debug=False) == codes.FAILED
    said = capsys.readouterr().err
    assert (
        said
        == "palestra: no reward\n  where: job.py:3\n  traceback: with --debug, and in the run's records\n"
    )
    report(stopped, as_json=False, debug=True)
    assert "inner frame" in capsys.readouterr().err
    report(stopped, as_json=True, debug=False)
    assert "inner frame" in capsys.readouterr().out
