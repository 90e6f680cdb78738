"""`palestra train FILE.py`: the file runs as __main__ under the command's layers; its end is an exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import palestra.run
from palestra.cli.main import main
from palestra.errors import EngineError, RunStopped
from palestra.settings import Resolved

ENVIRONMENT = """\
import palestra as pa
class Guess(pa.SingleTurn):
    __init__ = lambda self: pa.SingleTurn.__init__(self, [], lambda task, reply: 1.0)
"""
ONE_JOB = ENVIRONMENT + "job = pa.Job(model='./m', environment=Guess(), steps=7)\n"


class FakeRecords:
    def __init__(self, state: str) -> None:
        self._state = state

    def state(self) -> tuple[str, str]:
        return self._state, "because"


class FakeRun:
    def __init__(self, resolved: Resolved, status: str) -> None:
        self.path = resolved.job.runs_dir / resolved.job.name
        self.id, self.status, self.waited = resolved.job.name, status, False
        self.records = FakeRecords(status)

    def wait(self) -> FakeRun:
        self.waited = True
        return self

    def checkpoints(self) -> list[Path]:
        return [self.path / "checkpoints" / "step_7"]


class FakeTrain:
    """Stands in for `palestra.run.train`: no engine, no trainer, only what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Resolved, bool, bool | None]] = []
        self.runs: list[FakeRun] = []
        self.statuses: list[str] = []
        self.error: BaseException | None = None
        self.main_files: list[str] = []

    def __call__(self, resolved: Resolved, *, wait: bool = True, panel: bool | None = None) -> FakeRun:
        if self.error is not None:
            raise self.error
        self.main_files.append(str(sys.modules["__main__"].__file__))
        self.asked.append((resolved, wait, panel))
        run = FakeRun(resolved, self.statuses.pop(0) if self.statuses else "finished")
        self.runs.append(run)
        return run

    @property
    def job(self) -> Any:
        ((resolved, _, _),) = self.asked
        return resolved.job


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeTrain:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("PALESTRA_")]:
        monkeypatch.delenv(name)
    stand_in = FakeTrain()
    monkeypatch.setattr(palestra.run, "train", stand_in)
    return stand_in


def write(text: str, name: str = "guess.py") -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return name


# --- which job is trained ---------------------------------------------------------------------------


def test_a_file_that_trains_is_simply_run(fake: FakeTrain) -> None:
    file = write(
        ENVIRONMENT
        + "if __name__ == '__main__':\n    pa.Job(model='m', environment=Guess()).train(steps=3)\n"
    )
    assert main(["train", file]) == 0
    assert (fake.job.steps, fake.job.name) == (3, "guess")


def test_a_file_with_one_job_that_does_not_train_has_it_trained(fake: FakeTrain) -> None:
    assert main(["train", write(ONE_JOB + "same = job\n")]) == 0
    assert fake.job.steps == 7


def test_the_layers_of_the_command_lie_over_the_files_job(fake: FakeTrain) -> None:
    Path("c.toml").write_text("seed = 5\nsteps = 6\n")
    words = ["--config", "c.toml", "--set", "optimizer.learning_rate=3e-5", "--steps", "9", "--name", "mine",
             "--runs-dir", "out", "--set", "sampling.stop=['a']"]  # fmt: skip
    assert main(["train", write(ONE_JOB), *words]) == 0
    job = fake.job
    assert (job.seed, job.steps, job.name, job.runs_dir) == (5, 9, "mine", Path("out"))
    assert (job.optimizer.learning_rate, job.sampling.stop) == (3e-5, ("a",))


def test_two_trainings_in_one_file_are_both_waited_for(fake: FakeTrain) -> None:
    two = "for name in 'ab':\n    pa.Job(model='m', environment=Guess(), name=name).train(wait=False)\n"
    assert main(["train", write(ENVIRONMENT + two)]) == 0
    assert [run.id for run in fake.runs] == ["a", "b"]
    assert all(run.waited for run in fake.runs)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ENVIRONMENT,
         ["guess.py has no palestra.Job and never called Job.train()", "expected: a line such as: job ="]),
        (ONE_JOB + "other = pa.Job(model='n', environment=Guess())\n",
         ["guess.py defines 2 jobs (job, other) and trains none", "nearest: job.train()"]),
        ("jobs = [1]\n", ["has no palestra.Job"]),
    ],
)  # fmt: skip
def test_a_file_without_a_job_to_train_is_told_what_was_found(
    fake: FakeTrain, text: str, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", write(text)]) == 2
    shown = capsys.readouterr().err
    for words in said:
        assert words in shown
    assert fake.asked == []


def test_a_missing_file_is_answered_with_the_nearest_one(
    fake: FakeTrain, capsys: pytest.CaptureFixture[str]
) -> None:
    write(ONE_JOB, "jobs/guess.py")
    assert main(["train", "jobs/gues.py"]) == 2
    assert "nearest: jobs/guess.py" in capsys.readouterr().err


# --- how the file runs ------------------------------------------------------------------------------


def test_the_file_sees_itself_as_python_would_have_started_it(fake: FakeTrain) -> None:
    file = write(
        ONE_JOB + "import sys, json, pathlib\nimport neighbour\n"
        "seen = [__name__, sys.argv, sys.modules['__main__'].job is job, neighbour.x, __file__]\n"
        "pathlib.Path('seen.json').write_text(json.dumps(seen))\n",
        "jobs/guess.py",
    )
    write("x = 5\n", "jobs/neighbour.py")
    before = (sys.argv, list(sys.path), sys.modules["__main__"])
    assert main(["train", file, "--steps", "2", "--", "--own", "word"]) == 0
    path = str(Path(file).absolute())
    assert json.loads(Path("seen.json").read_text()) == ["__main__", [path, "--own", "word"], True, 5, path]
    assert fake.main_files == [path]
    assert (sys.argv, list(sys.path), sys.modules["__main__"]) == before


def test_what_the_file_defines_can_be_pickled_by_value_while_it_trains(fake: FakeTrain) -> None:
    file = write(
        ENVIRONMENT + "import cloudpickle, pathlib\n"
        "def reward(x):\n    return helper(x)\n"
        "def helper(x):\n    return x + 1\n"
        "pathlib.Path('reward.pickle').write_bytes(cloudpickle.dumps(reward))\n"
        "job = pa.Job(model='m', environment=Guess())\n"
    )
    assert main(["train", file]) == 0
    script = "import pickle; print(pickle.load(open('reward.pickle', 'rb'))(4))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "5\n"


def test_a_file_that_ends_itself_well_counts_as_ended(fake: FakeTrain) -> None:
    assert main(["train", write(ONE_JOB + "job.train()\nraise SystemExit(0)\n")]) == 0
    with pytest.raises(SystemExit) as ended:
        main(["train", write(ONE_JOB + "raise SystemExit(9)\n")])
    assert ended.value.code == 9


def test_an_error_of_the_file_shows_the_files_own_frames_only(
    fake: FakeTrain, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write("def f():\n    return 1 / 0\n\nf()\n")
    assert main(["train", file]) == 2, "nothing was trained: the file is no use of palestra yet"
    shown = capsys.readouterr().err
    assert "palestra: guess.py raised ZeroDivisionError: division by zero" in shown
    assert "guess.py:2" in shown
    assert "    f()" in shown
    assert "job_file.py" not in shown


def test_a_file_that_is_not_python_is_named_with_the_line(
    fake: FakeTrain, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", write("x = 1\ny = = 2\n")]) == 2
    assert "guess.py:2" in capsys.readouterr().err
    write("z = = 1\n", "broken.py")
    assert main(["train", write("import broken\n")]) == 2
    shown = capsys.readouterr().err
    assert "guess.py imports" in shown
    assert "broken.py:1" in shown


def test_a_wrong_job_in_the_file_is_a_configuration_error_with_its_line(
    fake: FakeTrain, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(ENVIRONMENT + "job = pa.Job(model='m', environment=Guess(), stepz=3)\n")
    assert main(["train", file]) == 2
    shown = capsys.readouterr().err
    assert "stepz: no such setting (from guess.py:4); nearest: steps" in shown
    assert "Traceback" not in shown


# --- outcomes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statuses", "code"),
    [(["finished"], 0), (["stopped"], 4), (["failed"], 1), (["lost"], 1), (["finished", "stopped"], 4),
     (["failed", "stopped"], 1)],
)  # fmt: skip
def test_the_exit_code_is_the_outcome_of_the_worst_run(
    fake: FakeTrain, statuses: list[str], code: int
) -> None:
    fake.statuses = list(statuses)
    file = write(ONE_JOB + "".join(f"job.train(steps={n + 1})\n" for n in range(len(statuses))))
    assert main(["train", file]) == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineError("the engine died", where="here", next_command="palestra doctor"), 1),
        (RunStopped("5 steps without any signal"), 1),
        (palestra.errors.MissingExtraError("torch", "torch"), 3),
        (palestra.errors.ModelSourceError("no such model"), 3),
        (KeyboardInterrupt(), 130),
    ],
)
def test_an_error_of_the_run_keeps_its_own_exit_code(
    fake: FakeTrain, error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.error = error
    assert main(["train", write(ONE_JOB)]) == code
    streams = capsys.readouterr()
    assert streams.out == ""
    assert str(error) in streams.err
    assert "Traceback" not in streams.err


def test_debug_shows_the_traceback(
    fake: FakeTrain, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.error = EngineError("the engine died")
    assert main(["train", write(ONE_JOB), "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("PALESTRA_DEBUG", "1")
    assert main(["train", write(ONE_JOB)]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_panel_choice_of_the_command_overrides_the_file(fake: FakeTrain) -> None:
    file = write(ONE_JOB + "job.train(panel=True)\n")
    main(["train", file])
    main(["train", file, "--no-panel"])
    main(["train", file, "--json"])
    assert [panel for _, _, panel in fake.asked] == [True, False, False]


def test_json_holds_the_runs_and_nothing_of_what_the_file_prints(
    fake: FakeTrain, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.statuses = ["stopped"]
    assert main(["train", write(ONE_JOB + "print('hello')\n"), "--json"]) == 4
    streams = capsys.readouterr()
    (run,) = json.loads(streams.out)["runs"]
    assert run == {
        "id": "guess",
        "path": "runs/guess",
        "state": "stopped",
        "reason": "because",
        "checkpoints": ["runs/guess/checkpoints/step_7"],
    }
    assert "hello" in streams.err


def test_errors_are_json_with_all_parts_where_json_was_asked_for(
    fake: FakeTrain, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.error = EngineError(
        "died", where="a:1", expected="life", nearest="rest", next_command="pray", detail="x\ny"
    )
    assert main(["train", write(ONE_JOB), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "error": {
            "kind": "EngineError", "what": "died", "where": "a:1", "expected": "life", "nearest": "rest",
            "next": "pray", "detail": "x\ny", "boundary": "engine", "exit_code": 1,
        }
    }  # fmt: skip
    assert main(["train", write(ONE_JOB), "--json", "--set", "a=1", "--set", "steps=0"]) == 2
    assert len(json.loads(capsys.readouterr().out)["error"]["problems"]) == 2


def test_an_error_text_cannot_drive_the_terminal(fake: FakeTrain, capsys: pytest.CaptureFixture[str]) -> None:
    """Helicone#5588 (case 34): what a model or a file says is only ever text."""
    fake.error = EngineError("bad \x1b[2J\x07 output \u202e", detail="line one\n\x1b]0;title\x07two")
    assert main(["train", write(ONE_JOB)]) == 1
    shown = capsys.readouterr().err
    assert not any(c in shown for c in "\x1b\x07\u202e")
    assert "line one\n" in shown
