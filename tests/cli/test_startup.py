"""Starting the command is cheap, and every wrong word is answered with the nearest right one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from palestra import __version__
from palestra.cli.codes import EXIT_CODES
from palestra.cli.main import VERBS, main

HEAVY = ("torch", "numpy", "pydantic", "rich", "transformers", "tokenizers", "cloudpickle")


def command(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "palestra.cli.main", *words],
        capture_output=True, text=True, cwd=cwd, check=False, timeout=60,
    )  # fmt: skip


def loaded_by(*words: str, cwd: Path) -> set[str]:
    script = (
        "import sys\nfrom palestra.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        f"print('loaded:', *sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=True,
        timeout=60,
    )
    return set(done.stdout.splitlines()[-1].removeprefix("loaded:").split())


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("--version",),
        ("trian",),
        ("runs", "list"),
        ("runs", "list", "--json"),
        ("runs", "show", "nothing"),
        *((*verb.split(), "--help") for verb in VERBS),
    ],
    ids=" ".join,
)
def test_looking_around_loads_nothing_heavy(words: tuple[str, ...], tmp_path: Path) -> None:
    assert loaded_by(*words, cwd=tmp_path) == set()


def test_configuration_is_shown_without_a_tensor_library(tmp_path: Path) -> None:
    assert loaded_by("config", "schema", cwd=tmp_path) <= {"pydantic"}


def test_help_and_version_load_nothing_of_ours_but_the_verb_table() -> None:
    script = (
        "import sys\nfrom palestra.cli.main import main\nmain(['--version'])\n"
        "print(*sorted(m for m in sys.modules if m.startswith('palestra')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split()[2:] == ["palestra", "palestra.cli", "palestra.cli.codes", "palestra.cli.main"]


def test_the_installed_command_runs() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "palestra", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"palestra {__version__}\n")


def test_help_lists_every_verb_and_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in VERBS)
    assert EXIT_CODES in shown


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*verb.split(), "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: palestra {verb}" in shown
    assert EXIT_CODES in shown


def test_no_words_at_all_is_wrong_usage_and_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "start here: palestra quickstart" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], ["there is no command 'palestra trian'", "nearest: palestra train"]),
        (["docter", "--debug"], ["nearest: palestra doctor"]),
        (["runs", "lst"], ["there is no command 'palestra runs lst'", "nearest: palestra runs list"]),
        (["config", "schem"], ["nearest: palestra config schema"]),
        (["qqqq"], ["expected: quickstart, train"]),
        (["train", "x.py", "--stesp", "3"], ["train: there is no flag --stesp", "nearest: --steps"]),
        (["runs", "list", "--jsn"], ["nearest: --json"]),
        (["runs", "list", "extra"], ["runs list: one word too many: 'extra'"]),
        (["runs", "show"], ["runs show: the following arguments are required: NAME|PATH"]),
        (["runs", "list", "--", "x"], ["runs list: takes no words after --"]),
        (["quickstart", "--task", "pyton"], ["invalid choice: 'pyton'", "'expressions'"]),
        (["train", "x.py", "--step", "3"], ["there is no flag --step", "nearest: --steps"]),
    ],
)
def test_wrong_words_are_refused_with_the_nearest(
    words: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    for text in said:
        assert text in streams.err
    assert "next: palestra" in streams.err
    assert "Traceback" not in streams.err


@pytest.mark.parametrize(
    "words", [["trian", "--json"], ["runs", "list", "--jsonn", "--json"], ["train", "--json"]]
)
def test_usage_errors_are_json_where_json_was_asked_for(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    streams = capsys.readouterr()
    error = json.loads(streams.out)["error"]
    assert error["kind"] == "UsageError"
    assert error["exit_code"] == 2
    assert error["next"].startswith("palestra")
    assert streams.err == ""


def test_a_group_of_verbs_lists_its_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 2
    assert main(["runs", "--help"]) == 0
    assert capsys.readouterr().out.count("palestra runs show") == 2


def test_a_closed_pipe_ends_the_command_quietly(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "palestra.cli.main", "config", "schema"],
        stdout=write, stderr=subprocess.PIPE, text=True, cwd=tmp_path, check=False, timeout=60,
    )  # fmt: skip
    os.close(write)
    assert done.returncode == 0
    assert done.stderr == ""


def test_exit_codes_and_streams_hold_for_the_real_process(tmp_path: Path) -> None:
    wrong = command("train", "gone.py", cwd=tmp_path)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("palestra: there is no file gone.py\n")
    assert command("runs", "list", cwd=tmp_path).returncode == 0
