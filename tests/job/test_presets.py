"""Published algorithms as values, what a user changes in them, and combinations that cannot work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import palestra as pa
from palestra import presets
from palestra.algorithms import registry
from palestra.algorithms.recipe import Recipe
from palestra.batches import LossSpec
from palestra.environments.base import Environment
from palestra.errors import ConfigError
from palestra.fields import given_by, leaves
from palestra.presets import Algorithm, Changes, Preset
from palestra.settings import resolve

PRESETS = {name: value for name, value in vars(presets).items() if isinstance(value, Preset)}
TEACHER = {"Distill": {"reference": "./teacher"}}


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    registry._added.clear()
    registry._added_losses.clear()


class Guess(Environment):
    def tasks(self) -> list[pa.Task]:
        return [pa.Task("guess")]

    async def episode(self, task: pa.Task, ep: pa.Episode) -> float:
        raise NotImplementedError  # never run


def made(name: str, **changes: Any) -> Algorithm:
    return PRESETS[name](**{**TEACHER.get(name, {}), **changes})


def recipe(algorithm: Algorithm) -> Recipe:
    return Recipe.named(**algorithm.model_dump(exclude={"group_size", "reference"}))


def one_problem(build: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build()
    (problem,) = caught.value.problems
    return problem


def test_an_algorithm_has_at_most_twelve_settings_and_a_preset_takes_each_of_them() -> None:
    assert len(leaves(Algorithm)) <= 12
    assert set(Changes.__annotations__) == set(Algorithm.model_fields)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_public_names_its_paper_and_makes_a_recipe(name: str) -> None:
    assert getattr(pa, name) is PRESETS[name]
    assert name in pa.__all__
    assert PRESETS[name].paper.startswith("arXiv:")
    assert recipe(made(name)).updates == 1


@pytest.mark.parametrize(
    ("name", "loss", "aggregate"),
    [
        ("GRPO", LossSpec("policy", 0.2, 0.2), "token"),
        ("DrGRPO", LossSpec("policy", 0.2, 0.2), "constant"),
        ("DAPO", LossSpec("policy", 0.2, 0.28), "token"),
        ("GSPO", LossSpec("policy", 3e-4, 4e-4, ratio="sequence"), "sequence"),
        ("CISPO", LossSpec("cispo", 1.0, 4.0), "token"),
        ("SAPO", LossSpec("sapo"), "sequence"),
        ("RLOO", LossSpec("policy", 0.2, 0.2, ratio="product"), "sum"),
        ("ReinforcePP", LossSpec("policy", 0.2, 0.2), "token"),
        ("MaxRL", LossSpec("policy", 0.2, 0.2), "token"),
        ("Distill", LossSpec("policy", 0.2, 0.2), "token"),
    ],
)
def test_a_preset_is_what_its_paper_says(name: str, loss: LossSpec, aggregate: str) -> None:
    found = recipe(made(name))
    assert (found.loss, found.aggregate) == (loss, aggregate)
    assert found.dynamic_sampling == (name == "DAPO")
    assert found.truncated == ("penalize" if name == "DAPO" else "count")


def test_presets_are_all_in_the_table_above() -> None:
    assert set(PRESETS) == {
        "GRPO",
        "DrGRPO",
        "DAPO",
        "GSPO",
        "CISPO",
        "SAPO",
        "RLOO",
        "ReinforcePP",
        "MaxRL",
        "Distill",
    }


@pytest.mark.parametrize("name", PRESETS)
def test_what_a_preset_set_survives_the_layers_and_can_be_overridden(name: str) -> None:
    job = pa.Job(model="./m", environment=Guess(), algorithm=made(name, group_size=5))
    plain = resolve(job, files=[], environ={})
    assert plain.job.algorithm == made(name, group_size=5)
    laid = resolve(job, files=[], environ={}, sets=["algorithm.updates_per_step=3"])
    assert laid.job.algorithm == made(name, group_size=5, updates_per_step=3)


def test_a_presets_values_are_traced_to_the_line_that_asked_for_it() -> None:
    job = pa.Job(model="./m", environment=Guess(), algorithm=pa.DAPO())
    where = {item.key: item.where for item in given_by(job)}
    assert "test_presets.py:" in where["algorithm.clip_high"]


def test_two_presets_of_equal_values_are_the_same_algorithm() -> None:
    assert pa.GRPO() == Algorithm()
    assert pa.MaxRL(advantage="grpo") == pa.GRPO()


def test_a_preset_that_was_not_called_is_refused_with_the_settings_there_are() -> None:
    problem = one_problem(lambda: pa.Job(model="./m", environment=Guess(), algorithm=pa.GRPO))  # type: ignore[arg-type]
    assert problem.startswith("algorithm: is a section, got")


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: pa.GRPO(advantage="gropo"), 'algorithm.advantage "gropo": expected one of grpo, mean'),
        (lambda: pa.GRPO(loss="ppp"), 'algorithm.loss "ppp": expected one of ppo, gspo'),
        (
            lambda: pa.GRPO(correction="tis:two"),
            'algorithm.correction "tis:two": the limits of tis are numbers',
        ),
        (lambda: pa.GRPO(group_size=1), "every advantage would be 0"),
        (lambda: pa.RLOO(group_size=1), "every advantage would be 0"),
        (lambda: pa.GRPO(advantage="pass@4", group_size=3), "nearest: group_size 4"),
        (lambda: pa.Distill(), "needs a teacher"),
        (lambda: pa.GRPO(reference="./r", kl_coef=0.0), "would be loaded and never asked"),
        (
            lambda: pa.ReinforcePP(dynamic_sampling=True),
            "also learns from groups whose rewards are all equal",
        ),
        (lambda: pa.Distill(reference="./t", truncated="penalize"), "lowers rewards"),
        (lambda: pa.GRPO(kl_coef=-0.1), "kl_coef: expected a number >= 0"),
        (lambda: pa.GRPO(group_size=0), "group_size: expected a whole number >= 1, got 0"),
    ],
)
def test_a_combination_that_cannot_work_is_refused_by_name(build: Any, said: str) -> None:
    """Case 30 (training-gym tutorial 002) among them: a group of one under a group baseline."""
    assert said in one_problem(build)


def test_what_meets_a_default_is_refused_when_the_layers_are_laid() -> None:
    """Case 30 (training-gym tutorial 002): another layer may still mend it."""
    job = pa.Job(model="./m", environment=Guess(), algorithm={"group_size": 1})  # type: ignore[arg-type]
    problem = one_problem(lambda: resolve(job, files=[], environ={}))
    assert "algorithm.advantage from default" in problem
    mended = resolve(job, files=[], environ={}, sets=["algorithm.advantage=reinforce++"])
    assert mended.job.algorithm.group_size == 1


@pytest.mark.parametrize(
    "algorithm",
    [
        lambda: pa.ReinforcePP(group_size=1),
        lambda: pa.Distill(reference="./t", group_size=1),
        lambda: pa.GRPO(reference="./r", kl_coef=0.01),
        lambda: pa.GRPO(advantage="pass@8"),
        lambda: pa.GRPO(correction="icepop:0.5:5"),
    ],
)
def test_what_only_looks_odd_is_accepted(algorithm: Any) -> None:
    assert isinstance(algorithm(), Algorithm)


def test_a_registered_loss_that_does_not_take_the_clips_is_refused_before_the_run() -> None:
    pa.register_algorithm("dual", loss=lambda low, high: LossSpec("policy", low, high, dual_clip=2.0))
    assert recipe(pa.GRPO(loss="dual")).loss.dual_clip == 2.0
    problem = one_problem(lambda: pa.GRPO(loss="dual", clip_high=3.0, clip_low=0.2))
    assert (
        'algorithm.loss "dual" does not take these clips: dual_clip must be 0 or at least 1 + clip_high'
        in problem
    )
