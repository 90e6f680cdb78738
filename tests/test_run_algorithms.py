"""Whole runs on a tiny model with every algorithm, with a reference, a teacher, and one of a user's own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import palestra as pa
from helpers.tiny import make_tiny_model
from palestra.algorithms import registry
from palestra.errors import ConfigError, PalestraError
from palestra.job import Job
from palestra.presets import Algorithm, Preset
from palestra.run import Run
from palestra.types import Group

PRESETS = ["GRPO", "DrGRPO", "DAPO", "GSPO", "CISPO", "SAPO", "RLOO", "ReinforcePP", "MaxRL"]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    registry._added.clear()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("student", 1), ("teacher", 2)):
        make_tiny_model(folder / name, seed=seed)
    return folder


def _noise() -> Callable[[pa.Task, str], float]:
    """A reward that varies within a group and is the same for the same reply.

    A closure travels to the workers by value: however the tests are started, it is found there.
    """

    def noise(task: pa.Task, reply: str) -> float:
        return zlib.crc32(reply.encode()) / 2**32

    return noise


noise = _noise()


@pytest.fixture
def make(models: Path, tmp_path: Path) -> Callable[..., Job]:
    def build(algorithm: Algorithm, reward: Any = noise, **changes: Any) -> Job:
        settings: dict[str, Any] = {
            "model": str(models / "student"), "name": "tiny", "runs_dir": tmp_path / "runs", "steps": 2,
            "environment": pa.SingleTurn([pa.Task(f"task {n}") for n in range(4)], reward),
            "prompts_per_step": 2, "threads": 1, "algorithm": algorithm,
            "sampling": pa.Sampling(max_new_tokens=5), "optimizer": pa.Optimizer(learning_rate=1e-3),
            "evaluation": pa.Evaluation(before=False, after=False),
        }  # fmt: skip
        return Job(**{**settings, **changes})

    return build


def series(run: Run, name: str) -> list[float]:
    return [value for _, value in run.records.series(name)]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains_with_several_updates_a_correction_and_a_kl_term(
    make: Callable[..., Job], name: str
) -> None:
    preset: Preset = getattr(pa, name)
    algorithm = preset(group_size=4, updates_per_step=2, correction="tis:2", kl_coef=0.05)
    run = make(algorithm, steps=1).train(panel=False)
    assert run.status == "finished"
    assert series(run, "train/applied") == [1.0]
    assert all(norm > 0 for norm in series(run, "train/grad_norm"))
    assert series(run, "train/kl_reference")[-1] > 0
    # Engine and trainer hold the same weights here, so nearly every factor is 1.
    assert series(run, "correction/masked_fraction") == [0.0]
    assert len(series(run, "groups/dropped")) == (name == "DAPO")


def test_before_the_first_update_the_policy_is_its_own_reference(make: Callable[..., Job]) -> None:
    run = make(pa.GRPO(group_size=4, kl_coef=0.1)).train(panel=False)
    first, second = series(run, "train/kl_reference")
    assert first == pytest.approx(0.0, abs=1e-9)
    assert second > 0


def test_a_strong_kl_term_holds_the_policy_near_the_starting_model(make: Callable[..., Job]) -> None:
    rate = pa.Optimizer(learning_rate=1e-2)
    free, held = (
        make(pa.GRPO(group_size=4, kl_coef=coef), name=f"kl{n}", steps=4, optimizer=rate).train(panel=False)
        for n, coef in enumerate((1e-6, 100.0))
    )
    assert series(held, "train/kl_reference")[-1] < series(free, "train/kl_reference")[-1]


def test_distillation_brings_the_student_nearer_to_its_teacher_without_any_reward(
    make: Callable[..., Job], models: Path
) -> None:
    algorithm = pa.Distill(reference=str(models / "teacher"), group_size=8)
    job = make(algorithm, lambda task, reply: 0.0, steps=8, optimizer=pa.Optimizer(learning_rate=3e-2))
    run = job.train(panel=False)
    distance = series(run, "train/kl_reference")
    assert len(distance) == 8
    assert distance[-1] < 0.7 * distance[0]


def test_a_teacher_of_another_vocabulary_is_refused_before_anything_is_sampled(
    make: Callable[..., Job], models: Path, tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path / "other", seed=3)
    path = other / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer))
    job = make(pa.Distill(reference=str(other), group_size=2))
    with pytest.raises(ConfigError, match="has another vocabulary than the model"):
        job.train(panel=False)


def test_a_reference_that_does_not_exist_is_refused(make: Callable[..., Job], tmp_path: Path) -> None:
    with pytest.raises(PalestraError, match="nowhere"):
        make(pa.GRPO(kl_coef=0.1, reference=str(tmp_path / "nowhere"))).train(panel=False)


def test_an_algorithm_for_rewards_of_zero_and_above_refuses_an_environment_of_others(
    make: Callable[..., Job],
) -> None:
    environment = pa.SingleTurn([pa.Task("task")], noise, reward_range=(-1.0, 1.0))
    with pytest.raises(ConfigError, match="reward_range begins at -1"):
        make(pa.MaxRL(), environment=environment).train(panel=False)


def test_single_samples_train_where_they_are_compared_with_the_whole_batch(make: Callable[..., Job]) -> None:
    run = make(pa.ReinforcePP(group_size=1), prompts_per_step=4).train(panel=False)
    assert series(run, "train/applied") == [1.0, 1.0]


def test_a_users_algorithm_runs_and_its_token_advantages_are_recorded_as_their_mean(
    make: Callable[..., Job],
) -> None:
    def early(groups: Sequence[Group]) -> dict[str, list[float]]:
        """Only the first token of each reply is trained, by its reward."""
        return {
            t.id: [r] + [0.0] * (t.sampled_count - 1)
            for g in groups
            for t, r in zip(g.rewarded, g.rewards, strict=True)
        }

    pa.register_algorithm("early", advantages=early)
    run = make(pa.GRPO(advantage="early", group_size=4)).train(panel=False)
    assert series(run, "train/applied") == [1.0, 1.0]
    pairs = [(r["advantage"], r["reward"]) for r in run.records.rollouts(split="train")]
    assert all(0 < advantage <= reward for advantage, reward in pairs)
    assert any(advantage < 0.5 * reward for advantage, reward in pairs)


def test_an_algorithm_that_fails_ends_the_run_at_the_trainers_boundary(make: Callable[..., Job]) -> None:
    def broken(groups: Sequence[Group]) -> dict[str, float]:
        raise KeyError("no such member")

    pa.register_algorithm("broken", advantages=broken)
    with pytest.raises(PalestraError, match="computing advantages"):
        make(pa.GRPO(advantage="broken", group_size=4)).train(panel=False)


def test_dynamic_sampling_that_leaves_nothing_is_a_starved_step_and_says_so(make: Callable[..., Job]) -> None:
    job = make(pa.DAPO(group_size=2), lambda task, reply: 1.0, limits={"max_starved_steps": 1})
    with pytest.raises(PalestraError, match="taught nothing"):
        job.train(panel=False)


def test_the_program_of_the_page_runs(models: Path, tmp_path: Path) -> None:
    """docs/algorithms.md: an algorithm of one's own, in one file."""
    page = (Path(__file__).parent.parent / "docs" / "algorithms.md").read_text()
    (program,) = (
        text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "job.train()" in text
    )
    assert program.count("\n") <= 40
    (tmp_path / "model").symlink_to(models / "student")
    (tmp_path / "job.py").write_text(program)
    small = {
        "STEPS": "1", "PROMPTS_PER_STEP": "1", "THREADS": "1", "SAMPLING__MAX_NEW_TOKENS": "4",
        "EVALUATION__BEFORE": "false", "EVALUATION__AFTER": "false",
    }  # fmt: skip
    environ = os.environ | {f"PALESTRA_{name}": value for name, value in small.items()}
    done = subprocess.run(
        [sys.executable, "job.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "job").is_dir()
