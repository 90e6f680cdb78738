"""The examples are programs a user would write: each one really runs, on a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.character import warmed_up_stand_in
from helpers.tiny import make_tiny_model
from palestra.records.reader import RunReader

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = {
    "python_functions.py": {
        "prompts_per_step": 2, "algorithm.group_size": 2, "sampling.max_new_tokens": 4, "evaluation.tasks": 2,
        "evaluation.samples_per_task": 1,
    },
    "guess_number.py": {"prompts_per_step": 2, "algorithm.group_size": 2, "sampling.max_new_tokens": 3,
                        "evaluation.tasks": 1, "evaluation.samples_per_task": 1},
    "expressions.py": {"prompts_per_step": 2, "algorithm.group_size": 2, "evaluation.tasks": 2,
                       "evaluation.samples_per_task": 1},
}  # fmt: skip
"""Settings that make each example small; nothing else about it changes."""
OWN_MODEL = {"expressions.py"}
"""Examples that bring their model."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_positions=1024)


@pytest.mark.parametrize("name", sorted(SMALL))
@pytest.mark.parametrize("how", ["palestra train", "python"])
def test_an_example_runs_as_the_readme_says(name: str, how: str, model: Path, tmp_path: Path) -> None:
    settings = {
        **({} if name in OWN_MODEL else {"model": model}),
        "steps": 1,
        "runs_dir": tmp_path,
        "threads": 1,
        "name": "example",
        **SMALL[name],
    }
    warmed_up_stand_in(tmp_path / "cache")
    environment = {**os.environ, "NO_COLOR": "1", "PALESTRA_CACHE": str(tmp_path / "cache")}
    argv = [sys.executable, str(EXAMPLES / name)]
    if how == "palestra train":
        argv = [sys.executable, "-m", "palestra", "train", str(EXAMPLES / name)]
        argv += [f"--set={key}={value}" for key, value in settings.items()]
    else:
        environment |= {
            f"PALESTRA_{key.upper().replace('.', '__')}": str(value) for key, value in settings.items()
        }
    done = subprocess.run(
        argv, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    reader = RunReader(tmp_path / "example")
    assert reader.state()[0] == "finished"
    rollouts = reader.rollouts(split="train")
    assert len(rollouts) == 4
    assert all(r["abstain"] is None for r in rollouts), [r["abstain"] for r in rollouts]


def test_a_checkpoint_is_served_and_chatted_with_as_the_example_says(model: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "serve_and_chat.py"), str(model)],
        capture_output=True, text=True, cwd=tmp_path, timeout=110, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n--\n") == 2
    last = done.stdout.splitlines()[-1]
    assert last.startswith("tokens [")
    assert " by [version, from, to] [[0, 0, " in last
    wrong = subprocess.run(
        [sys.executable, str(EXAMPLES / "serve_and_chat.py"), "nothing"],
        capture_output=True, text=True, cwd=tmp_path, timeout=110, check=False,
    )  # fmt: skip
    assert wrong.returncode == 2
    assert "there is no run and no model 'nothing'" in wrong.stderr


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*SMALL, "serve_and_chat.py"}
