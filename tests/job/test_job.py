"""Building a job in Python: everything wrong is said at once, in the user's words, with the line."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import palestra as pa
from helpers.declared import Declared
from palestra.errors import ConfigError
from palestra.fields import given_by, leaves
from palestra.job import (
    Checkpoints,
    Deadlines,
    Evaluation,
    Job,
    Optimizer,
    Sampling,
    SandboxConfig,
    conflicts,
    default_name,
    defaults,
)
from palestra.presets import GRPO
from palestra.sandboxes.base import SandboxSpec


class GuessNumber(Declared):
    pass


def job(**values: Any) -> Job:
    return Job(**{"model": "./m", "environment": GuessNumber(), **values})


def problems(build: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        build()
    return caught.value.problems


def one_problem(build: Any) -> str:
    (problem,) = problems(build)
    return problem


def test_model_and_environment_are_all_a_job_needs() -> None:
    built = Job(model="./m", environment=GuessNumber())
    assert (built.steps, built.algorithm.group_size, built.optimizer.learning_rate) == (20, 8, 1e-5)
    assert built.runs_dir == Path("runs")


def test_the_job_of_the_design_reads_as_written_there() -> None:
    built = pa.Job(
        model="HuggingFaceTB/SmolLM2-135M-Instruct",
        environment=GuessNumber(),
        algorithm=pa.GRPO(group_size=4),
    )
    assert built.algorithm == GRPO(group_size=4)


def test_a_section_may_be_given_as_a_dict() -> None:
    built = job(optimizer={"learning_rate": 3e-5}, sampling={"stop": ["```"]})
    assert built.optimizer == Optimizer(learning_rate=3e-5)
    assert built.sampling.stop == ("```",)


def test_a_job_without_model_and_environment_is_told_both() -> None:
    model, environment = problems(Job)
    assert "model: required" in model
    assert "./FOLDER, ORG/NAME or pypi:NAME==VERSION" in model
    assert "environment: required" in environment
    assert "test_job.py:" in environment


def test_all_problems_of_a_call_are_reported_at_once() -> None:
    found = problems(
        lambda: job(
            steps="ten",
            seed=-3,
            name="a b",
            optimizer={"lr": 1, "beta1": 1},
            sampling={"temperature": 0, "stop": "x"},
            limits=Deadlines(),
            evalution={"tasks": 3},
        )
    )
    text = "\n".join(found)
    assert len(found) == 9
    for expected in (
        'steps: expected a whole number >= 1, got "ten" from',
        "seed: expected a whole number in [0, 9223372036854775807], got -3 from",
        "name: expected letters, digits, '.', '_' and '-', beginning with a letter or digit, got \"a b\"",
        "optimizer.lr: no such setting",
        "nearest: optimizer.learning_rate",
        "optimizer.beta1: expected a number in [0, 1), got 1 from",
        "sampling.temperature: expected a number > 0, got 0",
        'sampling.stop: expected a list of non-empty strings, got "x"',
        "limits: expected Limits(...) or a dict, got Deadlines(...)",
        "evalution.tasks: no such setting",
    ):
        assert expected in text


def test_a_problem_names_the_line_of_the_call_that_caused_it() -> None:
    problem = one_problem(lambda: job_on_another_line(steps=0))
    assert f"test_job.py:{job_on_another_line.__code__.co_firstlineno + 1}" in problem
    line = sys._getframe().f_lineno + 1
    assert f"test_job.py:{line}" in one_problem(lambda: Sampling(top_p=0))


def job_on_another_line(**values: Any) -> Job:
    return Job(model="./m", environment=GuessNumber(), **values)


def test_a_group_of_one_is_refused_with_the_reason() -> None:
    """training-gym tutorial 002 (case 30): group size 1 under a group-mean baseline, every advantage is 0."""
    together = {"group_size": 1, "advantage": "mean"}
    for build in (lambda: GRPO(group_size=1), lambda: job(algorithm=together)):
        problem = one_problem(build)
        assert "algorithm.group_size (1) is too small for algorithm.advantage" in problem
        assert "every advantage would be 0" in problem
        assert problem.endswith('nearest: group_size 2, or algorithm.advantage "reinforce++"')


def test_temperature_zero_is_refused_with_the_reason_and_where_greedy_is_measured() -> None:
    problem = one_problem(lambda: Sampling(temperature=0))
    assert "all samples of a group are equal" in problem
    assert "evaluation.greedy" in problem


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Checkpoints(keep=0), "the newest checkpoint is what a run resumes from"),
        (lambda: Optimizer(learning_rate=0), "at 0 no weight would change"),
        (lambda: Optimizer(learning_rate=1e5), "nearest: 1.0"),
        (lambda: GRPO(clip_low=1.1), "clip_low: expected a number in [0, 1], got 1.1"),
        (lambda: GRPO(clip_high=-0.1), "clip_high: expected a number >= 0, got -0.1"),
        (lambda: Evaluation(tasks=-1), "tasks: expected a whole number >= 0, got -1"),
        (lambda: GRPO(kind="ppo"), "kind: no such setting"),  # type: ignore[call-arg]
        (
            lambda: GRPO(aggregate="mean"),
            'aggregate: expected one of token, sequence, constant, sum, got "mean"',
        ),
    ],
)
def test_values_out_of_range_are_refused_by_the_section_itself(build: Any, said: str) -> None:
    assert said in one_problem(build)


def test_an_environment_class_is_not_an_environment() -> None:
    problem = one_problem(lambda: job(environment=GuessNumber))
    assert "environment: expected an Environment instance" in problem
    assert problem.endswith("nearest: GuessNumber()")


def test_sections_given_under_a_wrong_name_are_refused_even_when_empty() -> None:
    assert "optimiser: no such setting" in one_problem(lambda: job(optimiser=Optimizer()))
    assert "optimiser: no such setting" in one_problem(lambda: job(optimiser={}))
    assert job(optimizer={}).optimizer == Optimizer()


def test_a_value_where_a_section_belongs_lists_the_sections_settings() -> None:
    problem = one_problem(lambda: job(checkpoints=5))
    assert problem.startswith("checkpoints: is a section, got 5")
    assert problem.endswith("its settings: every_steps, keep")


def test_a_dict_where_one_value_belongs_is_refused() -> None:
    assert "steps is one value and has no parts" in one_problem(lambda: job(steps={"a": 1}))
    assert "steps: expected a whole number >= 1, got {}" in one_problem(lambda: job(steps={}))


def test_a_built_job_cannot_be_changed() -> None:
    built = job()
    problem = one_problem(lambda: setattr(built, "steps", 5))
    assert "a Job cannot be changed once built; give steps to Job(...)" in problem
    assert "an Algorithm cannot be changed" in one_problem(lambda: setattr(built.algorithm, "group_size", 5))
    assert built.steps == 20


@given(
    st.dictionaries(
        st.sampled_from([*Job.model_fields, "stepps", "lr"]),
        st.none()
        | st.integers()
        | st.floats()
        | st.text()
        | st.lists(st.text(), max_size=2)
        | st.dictionaries(
            st.sampled_from(["dtype", "keep", "tasks", "stop", "x"]), st.integers() | st.text(), max_size=3
        ),
        max_size=4,
    )
)
def test_whatever_a_job_is_built_from_nothing_but_a_configuration_error_leaves(
    values: dict[str, Any],
) -> None:
    try:
        built = job(**values)
    except ConfigError as error:
        found = error.problems
    else:
        found = ()
        assert set(values) <= set(Job.model_fields)
        assert built.steps >= 1
    assert all("pydantic" not in problem and "\n" not in problem for problem in found)


# --- values that cannot work together ---------------------------------------------------------------


def test_the_defaults_agree_with_each_other() -> None:
    assert conflicts(defaults()) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"optimizer.warmup_steps": 30},
            [
                "optimizer.warmup_steps (30) is above steps (20)",
                "warmup_steps at most 20, or steps at least 30",
            ],
        ),
        (
            {"deadlines.reward_s": 600.0},
            ["deadlines.reward_s (600.0 s) is not below deadlines.episode_s (600.0 s)", "inside its episode"],
        ),
        (
            {"deadlines.episode_s": 2000.0},
            ["deadlines.episode_s (2000.0 s) is not below deadlines.step_s (1800.0 s)", "above 2000.0"],
        ),
        (
            {"sandbox.time_s": 601.0},
            ["sandbox.time_s (601.0 s) is not below deadlines.episode_s (600.0 s)", "below 600.0"],
        ),
        (
            {"engine.context_tokens": 128},
            ["leaves no room for a prompt", "max_new_tokens at most 127", "context_tokens above 128, or 0"],
        ),
        (
            {"engine.context_tokens": 1},
            ["leaves no room for a prompt", "nearest: context_tokens above 128"],
        ),
        (
            {"evaluation.samples_per_task": 0, "evaluation.greedy": False},
            ["would measure nothing", "samples_per_task 1, or greedy true"],
        ),
    ],
)
def test_a_conflict_names_both_settings_the_reason_and_what_would_do(
    changed: dict[str, Any], said: list[str]
) -> None:
    (found,) = conflicts({**defaults(), **changed})
    for words in said:
        assert words in found.text
    for key in found.keys:
        assert key in found.text


@pytest.mark.parametrize(
    "changed",
    [
        {"optimizer.warmup_steps": 20},
        {"engine.context_tokens": 129},
        {"engine.max_running": 1, "prompts_per_step": 64},
        {"evaluation.samples_per_task": 0},
        {"evaluation.samples_per_task": 0, "evaluation.greedy": False, "evaluation.before": False,
         "evaluation.after": False},
        {"deadlines.reward_s": 599.0},
    ],
)  # fmt: skip
def test_what_only_looks_like_a_conflict_is_allowed(changed: dict[str, Any]) -> None:
    assert conflicts({**defaults(), **changed}) == []


def test_values_written_side_by_side_are_checked_when_the_job_is_built() -> None:
    problem = one_problem(lambda: job(steps=5, optimizer={"warmup_steps": 6}))
    assert "warmup_steps at most 5" in problem


def test_a_value_beside_a_default_waits_for_the_layers_above() -> None:
    assert job(optimizer={"warmup_steps": 50}).optimizer.warmup_steps == 50


def test_the_deadlines_of_one_call_are_checked_as_one_tree() -> None:
    """verifiers PR#1245, rllm PR#736 (case 23): what runs inside something must end before it."""
    found = problems(lambda: job(deadlines={"step_s": 1.0, "episode_s": 2.0, "reward_s": 3.0}))
    assert len(found) == 2


# --- small things -----------------------------------------------------------------------------------


def test_the_sandbox_section_becomes_the_ports_spec() -> None:
    assert SandboxConfig(memory_mb=512, time_s=2).spec() == SandboxSpec(memory_mb=512, time_s=2.0)
    assert SandboxConfig().spec() == SandboxSpec()


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("/x/my_job.py", "my_job"),
        ("/x/my job!.py", "my-job-"),
        ("/x/_.py", "guess_number"),
        (None, "guess_number"),
    ],
)
def test_a_run_is_named_after_its_file_or_its_environment(file: str | None, name: str) -> None:
    assert default_name(job(), Path(file) if file else None) == name


def test_capitals_in_a_row_stay_one_word_in_a_name() -> None:
    class HTTPGuess2D(Declared):
        pass

    assert default_name(job(environment=HTTPGuess2D()), None) == "http_guess2_d"


def test_what_a_user_wrote_is_told_apart_from_defaults_with_its_line() -> None:
    section = Optimizer(beta1=0.8)
    built = job(steps=20, optimizer=section, sampling={"top_k": 5})
    written = {item.key: item for item in given_by(built)}
    assert set(written) == {"model", "environment", "steps", "optimizer.beta1", "sampling.top_k"}
    assert written["optimizer.beta1"].where != written["steps"].where


def test_a_job_survives_pickling_and_dumps_to_json() -> None:
    import cloudpickle

    built = job(steps=3)
    again = pickle.loads(cloudpickle.dumps(built))
    assert again.steps == 3
    assert built.model_dump(mode="json", include={"steps", "runs_dir"}) == {"steps": 3, "runs_dir": "runs"}


def test_leaves_keep_the_order_of_declaration() -> None:
    keys = list(leaves(Job))
    assert keys[:3] == ["model", "environment", "name"]
    assert keys[-1] == "limits.max_starved_steps"


def test_building_a_job_loads_no_tensor_library() -> None:
    script = (
        "import sys, palestra as pa\n"
        "pa.Job(model='m', environment=pa.SingleTurn([], lambda task, reply: 1.0))\n"
        "sys.exit(repr({'torch', 'numpy', 'rich', 'palestra.run'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "set()"
