from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from palestra import errors
from palestra.errors import (
    ConfigError,
    EngineError,
    MissingExtraError,
    PalestraError,
    RewardError,
    SandboxError,
    boundary,
    nearest,
    traceback_of,
)
from palestra.types import Boundary


def test_an_error_says_what_where_expected_nearest_and_next() -> None:
    error = PalestraError(
        "the model was not found", where="./modl", expected="a folder", nearest="./model",
        next_command="palestra doctor", detail="line one\nline two",
    )  # fmt: skip
    assert str(error).splitlines() == [
        "the model was not found",
        "  where: ./modl",
        "  expected: a folder",
        "  nearest: ./model",
        "  next: palestra doctor",
        "  detail:",
        "    line one",
        "    line two",
    ]


def test_parts_that_are_not_known_take_no_line() -> None:
    assert str(PalestraError("short")) == "short"


def test_a_configuration_error_lists_every_problem_at_once() -> None:
    text = str(ConfigError(["steps: too small", "modle: unknown, did you mean model?"]))
    assert text.startswith("the job's configuration has 2 errors:")
    assert "  - steps: too small" in text
    assert "  - modle" in text
    assert str(ConfigError(["one"])).startswith("the job's configuration is wrong:")


def test_a_missing_extra_names_the_command_that_installs_it() -> None:
    error = MissingExtraError("torch", "torch")
    assert "pip install 'palestra[torch]'" in str(error)
    assert error.exit_code == 3


@pytest.mark.parametrize("name", list(Boundary))
def test_every_boundary_has_an_error_of_its_own(name: Boundary) -> None:
    with pytest.raises(PalestraError) as caught, boundary(name, "the work"):
        raise KeyError("lost")
    assert caught.value.boundary is name
    assert caught.value.what == "the work raised KeyError: 'lost'"
    assert isinstance(caught.value.__cause__, KeyError)


def test_the_traceback_of_the_cause_surfaces_in_the_error() -> None:
    """prime-rl PR#3020 (case 9): a child failed and its traceback was never shown."""

    def the_users_function() -> None:
        raise RuntimeError("deep inside")

    with pytest.raises(RewardError) as caught, boundary(Boundary.REWARD, "the reward"):
        the_users_function()
    assert "in the_users_function" in str(caught.value)
    assert "deep inside" in caught.value.detail
    assert "test_errors.py" in caught.value.where


def test_an_error_that_has_a_boundary_keeps_it() -> None:
    with pytest.raises(SandboxError), boundary(Boundary.REWARD, "the reward"):
        raise SandboxError("the sandbox broke")


def test_an_error_without_a_boundary_gets_the_innermost() -> None:
    with pytest.raises(EngineError), boundary(Boundary.REWARD, "outer"), boundary(Boundary.ENGINE, "inner"):
        raise PalestraError("no boundary yet")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit])
def test_cancellation_and_exits_pass_untouched(error: type[BaseException]) -> None:
    with pytest.raises(error), boundary(Boundary.REWARD, "the reward"):
        raise error


def test_a_block_that_succeeds_raises_nothing() -> None:
    with boundary(Boundary.TASK, "reading"):
        value = 3
    assert value == 3


def test_the_nearest_spelling_is_found_or_nothing_is_said() -> None:
    assert nearest("learning_rat", ["learning_rate", "steps"]) == "learning_rate"
    assert nearest("zzz", ["learning_rate", "steps"]) == ""


def test_a_traceback_holds_its_causes() -> None:
    try:
        try:
            raise ValueError("first")
        except ValueError as error:
            raise KeyError("second") from error
    except KeyError as error:
        text = traceback_of(error)
    assert "first" in text
    assert "second" in text


def test_where_is_the_users_own_line_even_if_a_library_raised() -> None:
    with pytest.raises(RewardError) as caught, boundary(Boundary.REWARD, "the reward"):
        json.loads("not json")
    assert caught.value.where.startswith(f"{__file__}:")
    assert "decoder.py" in caught.value.detail, "the whole way down stays in the detail"


def test_a_folder_beside_ours_is_the_users() -> None:
    ours = Path(errors.__file__).parent
    assert not errors.is_users(str(ours / "run.py"))
    assert errors.is_users(f"{ours}_jobs/job.py")
    assert not errors.is_users(json.__file__)
    assert not errors.is_users(pytest.__file__)


def test_what_installs_an_extra_names_the_python_that_needs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", f"{tmp_path}/.venv/bin/python")
    assert errors.install_command("hub") == ".venv/bin/python -m pip install 'palestra[hub]'"
    monkeypatch.setattr("sys.executable", "/opt/my python/bin/python")
    assert errors.install_command("hub").startswith("'/opt/my python/bin/python' -m pip")
