"""What a newcomer types in the first hour: wrong files, lost runs, and runs that take up room."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from palestra.cli.main import main
from palestra.records.folder import RunFolder
from palestra.records.writer import RunWriter

JOB = """\
import palestra as pa
job = pa.Job(model="./m", environment=pa.SingleTurn([], lambda task, reply: 1.0))
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("PALESTRA_")]:
        monkeypatch.delenv(name)


def make_run(name: str, status: str = "stopped", argv: list[str] | None = None) -> RunFolder:
    folder = RunFolder.open(Path("runs") / name, create=True)
    folder.begin_attempt({"argv": argv} if argv else {}, {}, {})
    RunWriter(folder).close()
    folder.set_status(status, "because")
    (folder.path / "checkpoints" / "2").mkdir(parents=True)
    (folder.path / "checkpoints" / "2" / "model.safetensors").write_bytes(bytes(3_000_000))
    return folder


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    return capsys.readouterr().err


# --- files --------------------------------------------------------------------------------------------


def test_a_folder_as_file_is_called_a_folder_and_its_files_are_suggested(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("jobs").mkdir()
    assert "jobs is a folder, not a file" in refused(capsys, "train", "jobs")
    Path("jobs/guess.py").write_text(JOB)
    said = refused(capsys, "train", "jobs")
    assert "nearest: jobs/guess.py" in said
    assert "next: palestra train jobs/guess.py" in said


def test_the_next_command_is_of_the_verb_that_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "next: palestra config show FILE.py" in refused(capsys, "config", "show", "nope.py")
    assert "next: palestra train FILE.py" in refused(capsys, "train", "nope.py")


def test_a_file_with_nul_bytes_is_named_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("binary.py").write_bytes(b"x = 1\ny = \0\0\n")
    said = refused(capsys, "train", "binary.py")
    assert "binary.py is not Python text: it holds NUL bytes" in said
    assert "binary.py:2" in said
    assert "None" not in said


def test_a_syntax_error_and_an_unknown_import_are_wrong_usage_with_a_next_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("wrong.py").write_text("x = = 1\n")
    assert "next: correct that line" in refused(capsys, "train", "wrong.py")
    Path("imports.py").write_text("import no_such_module_of_mine\n")
    assert "raised ModuleNotFoundError" in refused(capsys, "train", "imports.py")


def test_two_jobs_in_one_file_say_which_line_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    Path("two.py").write_text(JOB + "other = pa.Job(model='n', environment=job.environment)\n")
    said = refused(capsys, "train", "two.py")
    assert "nearest: job.train()" in said
    assert "next: write that line at the end of two.py" in said


def test_an_environment_without_an_episode_is_refused_before_any_model_is_looked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("half.py").write_text(
        "import palestra as pa\n"
        "class Half(pa.Environment):\n"
        "    def tasks(self):\n"
        "        return [pa.Task(prompt='a')]\n"
        "pa.Job(model='no/model', environment=Half()).train()\n"
    )
    said = refused(capsys, "train", "half.py")
    assert "environment: Half defines no episode (half.py:2); expected async def episode" in said


def test_a_wrong_reward_signature_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    Path("wrong.py").write_text("import palestra as pa\npa.SingleTurn([], lambda: 1.0)\n")
    said = refused(capsys, "train", "wrong.py")
    assert "cannot be called as a reward" in said
    assert "wrong.py:2" in said
    assert "next: correct it there" in said


def test_a_task_with_an_answer_says_where_answers_go(capsys: pytest.CaptureFixture[str]) -> None:
    Path("tasks.py").write_text("import palestra as pa\npa.Task(prompt='2 + 1', answer=3)\n")
    said = refused(capsys, "train", "tasks.py")
    assert "it takes prompt, messages, data, secret, id" in said
    assert "where: " in said
    assert "tasks.py:2" in said


def test_line_breaks_in_a_setting_are_shown_as_one_writes_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--set", 'sampling.stop=["\\n```\\n"]']) == 0
    assert 'stop = ["\\n```\\n"]' in capsys.readouterr().out


# --- runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["/somewhere/.venv/bin/palestra", "train", "my job.py", "--steps", "9"],
         "palestra train 'my job.py' --steps 9"),
        (["/lib/palestra/__main__.py", "quickstart"], "palestra quickstart"),
        (["examples/guess.py", "word"], "python examples/guess.py word"),
        (None, "palestra train FILE.py"),
    ],
)  # fmt: skip
def test_a_run_that_can_go_on_shows_the_command_that_continues_it(
    argv: list[str] | None, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run("first", argv=argv).unlock()
    assert main(["runs", "show", "first"]) == 0
    assert f"next      the same command continues it: {shown}\n" in capsys.readouterr().out


def test_a_lost_run_is_one_that_can_go_on_and_a_finished_one_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_run("done", "finished").unlock()
    main(["runs", "show", "done"])
    assert "continues it" not in capsys.readouterr().out
    gone = make_run("gone", "running")
    gone.unlock()
    info = json.loads((gone.path / "run.json").read_text())
    info["owner"]["pid"] = 2**22 + 1  # no process has this number
    (gone.path / "run.json").write_text(json.dumps(info))
    main(["runs", "show", "gone"])
    shown = capsys.readouterr().out
    assert "run gone: lost" in shown
    assert "the same command continues it" in shown


def test_rm_asks_and_names_the_size(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("first")
    run.unlock()
    monkeypatch.setattr("sys.stdin", io.StringIO("no\n"))
    assert main(["runs", "rm", "first"]) == 0
    said = capsys.readouterr().err
    assert "remove runs/first (3 MB, its checkpoints too)? [y/N]" in said
    assert run.path.is_dir()
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert main(["runs", "rm", "first"]) == 0
    assert "removed runs/first (3 MB)" in capsys.readouterr().out
    assert not run.path.exists()


def test_rm_where_nobody_can_answer_keeps_the_run_and_names_the_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("first")
    run.unlock()
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "next: palestra runs rm first --yes" in refused(capsys, "runs", "rm", "first")
    assert run.path.is_dir()
    assert main(["runs", "rm", "first", "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] == "runs/first"
    assert not run.path.exists()


def test_rm_refuses_a_run_that_a_process_holds(capsys: pytest.CaptureFixture[str]) -> None:
    live = make_run("live", "running")
    assert main(["runs", "rm", "live", "--yes"]) != 0
    assert "is in use by process" in capsys.readouterr().err
    assert live.path.is_dir()
    live.unlock()


def test_rm_takes_no_folder_that_is_no_run_and_no_link(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/precious").mkdir(parents=True)
    assert "there is no run 'precious'" in refused(capsys, "runs", "rm", "precious", "--yes")
    make_run("first").unlock()
    Path("runs/other").symlink_to(Path("runs/first").absolute())
    assert "is a link" in refused(capsys, "runs", "rm", "other", "--yes")
    assert Path("runs/first/run.json").is_file()


def test_show_says_what_the_records_lack(capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run("first")
    run.update(lost_records=[{"attempt": 1, "dropped": 12, "why": "No space left on device"}])
    run.unlock()
    main(["runs", "show", "first"])
    shown = capsys.readouterr().out
    assert "records   incomplete: 12 dropped in attempt 1: No space left on device" in shown


def test_show_says_what_a_killed_attempt_could_only_say_in_its_events(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = RunFolder.open(Path("runs/killed"), create=True)
    folder.begin_attempt({}, {}, {})
    writer = RunWriter(folder)
    writer.event("dropped", count=3, reason="the queue was full")
    writer.event("dropped", count=5, reason="the queue was full")
    writer.close()
    folder.unlock()
    main(["runs", "show", "killed"])
    shown = capsys.readouterr().out
    assert shown.count("incomplete") == 1
    assert "incomplete: 5 dropped in attempt 1: the queue was full" in shown
