"""Whole starts that a newcomer gets wrong: what is said, and what is left behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.job_file import finish, write_job
from helpers.tiny import make_tiny_model
from palestra.environments.base import Environment
from palestra.environments.single_turn import SingleTurn
from palestra.errors import (
    ConfigError,
    MissingExtraError,
    ModelSourceError,
    PalestraError,
    RecordError,
    TaskError,
)
from palestra.job import Evaluation, Job, Sampling
from palestra.loop import checkpoints
from palestra.presets import GRPO
from palestra.records.folder import RunFolder
from palestra.records.writer import RunWriter
from palestra.run import _left_behind, _say_lost_records
from palestra.sandboxes.base import SandboxSpec
from palestra.types import Task


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Callable[..., Job]:
    def build(**changes: Any) -> Job:
        settings: dict[str, Any] = {
            "model": str(model),
            "environment": SingleTurn([Task(prompt=f"question {i}") for i in range(3)], length),
            "name": "tiny", "runs_dir": tmp_path / "runs", "steps": 1, "prompts_per_step": 1, "threads": 1,
            "algorithm": GRPO(group_size=2), "sampling": Sampling(max_new_tokens=5),
            "evaluation": Evaluation(before=False, after=False),
        }  # fmt: skip
        return Job(**{**settings, **changes})

    return build


def length(task: Task, reply: str) -> float:
    return (len(reply) % 7) / 7


# --- refused before anything began ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        ({"model": "./nowhere"}, ModelSourceError, "nowhere does not exist"),
        (
            {"sampling": {"max_new_tokens": 100_000}},
            ConfigError,
            "sampling.max_new_tokens (100000) leaves no",
        ),
        ({"engine": {"context_tokens": 100_000}}, ConfigError, "engine.context_tokens (100000) is above the"),
    ],
)
def test_a_start_that_is_refused_leaves_no_run(
    make: Callable[..., Job], tmp_path: Path, changes: dict[str, Any], kind: type[PalestraError], says: str
) -> None:
    with pytest.raises(kind) as caught:
        make(**changes).train(panel=False)
    assert says in str(caught.value)
    assert caught.value.next_command
    assert not (tmp_path / "runs" / "tiny").exists()


def test_a_missing_package_leaves_no_run(
    make: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from palestra.models import sources

    monkeypatch.setattr(sources, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(MissingExtraError):
        make().train(panel=False)
    assert not (tmp_path / "runs" / "tiny").exists()


def test_a_run_that_began_keeps_its_folder_when_a_later_start_is_refused(
    make: Callable[..., Job], tmp_path: Path
) -> None:
    run = make().train(panel=False)
    assert run.records.state() == ("finished", "1 step"), "one step is one step"
    with pytest.raises(ConfigError):
        make(steps=2, seed=1).train(panel=False)
    assert (tmp_path / "runs" / "tiny" / "checkpoints" / "1").is_dir()


def test_both_numbers_are_named_where_a_reply_cannot_fit(make: Callable[..., Job]) -> None:
    with pytest.raises(ConfigError) as caught:
        make(sampling={"max_new_tokens": 100_000}).train(panel=False)
    (problem,) = caught.value.problems
    assert "in 256 tokens (the model's limit); nearest: 128" in problem
    assert caught.value.next_command == "--set sampling.max_new_tokens=128"


@pytest.mark.parametrize("where", ["file", "file/inside", "/dev/null", "/proc/palestra"])
def test_a_runs_dir_that_cannot_hold_runs_suggests_another(
    make: Callable[..., Job], tmp_path: Path, where: str
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError) as caught:
        make(runs_dir=tmp_path / where).train(panel=False)
    assert caught.value.exit_code == 2
    assert "--runs-dir DIR" in caught.value.next_command
    assert "continues" not in str(caught.value), "nothing was started"


def test_checkpoints_that_became_a_file_are_named(make: Callable[..., Job], tmp_path: Path) -> None:
    make().train(panel=False)
    root = tmp_path / "runs" / "tiny" / "checkpoints"
    root.rename(root.with_name("moved"))
    root.write_text("not a folder")
    with pytest.raises(RecordError) as caught:
        make(steps=2).train(panel=False)
    assert "checkpoints is a file" in caught.value.what
    assert caught.value.where == str(root)
    with pytest.raises(RecordError, match="is a file"):
        checkpoints.sweep(root)


# --- environments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [[], {"a": 1}, None, "text", [{"prompt": "a"}]])
def test_wrong_tasks_of_a_single_turn_name_the_users_line(make: Callable[..., Job], given: Any) -> None:
    environment = SingleTurn(given, length)
    with pytest.raises(TaskError) as caught:
        make(environment=environment).train(panel=False)
    assert caught.value.where.startswith(f"{__file__}:")
    assert caught.value.next_command
    assert caught.value.exit_code == 2


class NoEpisode(Environment):
    def tasks(self) -> list[Task]:
        return [Task(prompt="a")]


class PlainEpisode(NoEpisode):
    def episode(self, task: Task, ep: Any) -> float:  # type: ignore[override]
        return 1.0


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (NoEpisode(), "environment: NoEpisode defines no episode"),
        (Environment(), "environment: Environment defines no tasks"),
        (PlainEpisode(), "environment: PlainEpisode.episode is not a coroutine function"),
    ],
    ids=["no episode", "nothing", "not async"],
)
def test_a_class_that_lacks_a_method_is_refused_where_the_job_is_built(
    make: Callable[..., Job], environment: Environment, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        make(environment=environment)


def test_a_programs_time_counts_only_where_somebody_set_it(make: Callable[..., Job]) -> None:
    short = {"episode_s": 3.0, "reward_s": 1.0}
    assert make(deadlines=short).deadlines.episode_s == 3.0, "the default of 5 s contradicts nothing"
    with pytest.raises(ConfigError, match=r"sandbox\.time_s \(4\.0 s\) is not below deadlines\.episode_s"):
        make(deadlines=short, sandbox={"time_s": 4.0})
    own = SingleTurn([Task(prompt="a")], length, sandbox=SandboxSpec(time_s=7))
    with pytest.raises(ConfigError, match=r"the environment's sandbox\.time_s \(7 s\) is not below"):
        make(environment=own, deadlines=short)


def test_a_function_as_environment_is_shown_without_its_address(make: Callable[..., Job]) -> None:
    with pytest.raises(ConfigError) as caught:
        make(environment=lambda: 1)
    assert "expected an Environment instance" in str(caught.value)
    assert " at 0x" not in str(caught.value)


# --- while it runs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("return 7", "reward returned 7, outside the declared range 0 to 1"),
        ("raise ValueError('no such row')", "reward raised ValueError: no such row"),
    ],
)
def test_a_reward_that_never_works_ends_with_the_useful_line_first_and_once(
    model: Path, tmp_path: Path, body: str, cause: str
) -> None:
    """OpenEnv PR#1025, PR#1199 (case 17): the verdict, the range and the user's line are said."""
    job = write_job(tmp_path, model, steps=1)
    lines = job.read_text().split("\n")
    at = next(i for i, line in enumerate(lines) if "return zlib" in line)
    lines[at] = f"    {body}"
    job.write_text("\n".join(lines))
    code, output = finish(job, "--no-panel")
    assert code == 1
    said = output[output.index("palestra: no episode") :].splitlines()
    assert said[0].endswith(f"got a reward: {cause}")
    assert said[1].startswith(f"  where: {job}:")
    assert "Traceback" not in output
    assert output.count(cause) == 1
    assert any(line.startswith("  traceback: with --debug") for line in said)
    code, output = finish(job, "--no-panel", "--debug")
    assert (code, "Traceback" in output) == (1, True)


def writer_of(folder: Path) -> tuple[RunFolder, RunWriter]:
    run = RunFolder.open(folder, create=True)
    run.begin_attempt({}, {}, {})
    return run, RunWriter(run)


async def test_a_task_that_nobody_awaited_becomes_a_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, writer = writer_of(tmp_path / "run")

    async def late() -> None:
        raise TaskError("ep.say was called after episode g0.1 had ended")

    asyncio.get_running_loop().set_exception_handler(_left_behind(writer))
    task = asyncio.ensure_future(late())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    del task
    gc.collect()
    writer.close()
    run.unlock()
    from palestra.records.reader import RunReader

    (notice,) = RunReader(run.path).events("notice")
    assert notice["fields"]["text"] == (
        "a task that was started and never awaited: ep.say was called after episode g0.1 had ended"
    )
    assert "Traceback" in notice["fields"]["detail"]
    assert capsys.readouterr().err == ""


def test_records_that_were_dropped_are_said_at_the_end_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, writer = writer_of(tmp_path / "run")
    writer.close()
    _say_lost_records(run, writer)
    assert capsys.readouterr().err == "", "nothing was lost"
    writer.event("notice", text="too late")  # a closed writer takes nothing more
    _say_lost_records(run, writer)
    assert "the records of run run are incomplete (1 dropped)" in capsys.readouterr().err
    assert run.info["lost_records"] == [{"attempt": 1, "dropped": 1, "why": "the queue was full"}]
    run.unlock()
