"""What is wrong with an environment's tasks is said before anything runs, and exactly."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from palestra.environments.base import Environment, validate_tasks
from palestra.errors import TaskError
from palestra.sandboxes.base import SandboxSpec
from palestra.types import Task

ONE, TWO, THREE = (Task(prompt=f"What is {n} + 1?", secret={"n": n}) for n in (1, 2, 3))


class Listed(Environment):
    def __init__(self, tasks: Any, held_out: Any = ()) -> None:
        self._given, self._held_out = tasks, held_out

    def tasks(self) -> Any:
        return self._given

    def evaluation_tasks(self) -> Any:
        return self._held_out

    async def episode(self, task: Task, ep: Any) -> float:
        return 1.0


def refusal(environment: Environment) -> TaskError:
    with pytest.raises(TaskError) as caught:
        validate_tasks(environment)
    assert caught.value.expected
    return caught.value


def test_tasks_come_back_in_their_order() -> None:
    assert validate_tasks(Listed([TWO, ONE], [THREE])) == (TWO, ONE)


def test_tasks_may_be_a_generator() -> None:
    class Lazy(Listed):
        def tasks(self) -> Iterator[Task]:
            yield from (ONE, TWO)

    assert validate_tasks(Lazy(None)) == (ONE, TWO)


def test_an_environment_without_tasks_says_what_to_define() -> None:
    class Bare(Environment):
        pass

    error = refusal(Bare())
    assert error.what == "Bare defines no tasks"
    assert "test_base.py:" in error.where
    assert "def tasks(self)" in error.expected


async def test_an_environment_without_an_episode_says_what_to_define() -> None:
    class Bare(Environment):
        pass

    with pytest.raises(TaskError, match="Bare defines no episode") as caught:
        await Bare().episode(ONE, None)  # type: ignore[arg-type]
    assert "async def episode(self, task, ep)" in caught.value.expected


def test_an_empty_task_list_is_refused() -> None:
    assert refusal(Listed([])).what == "Listed.tasks() is empty: there is nothing to train on"


@pytest.mark.parametrize(
    ("given", "kind"),
    [(None, "None"), ("abc", "a str"), ({"a": 1}, "a dict"), (7, "a int"), (b"x", "a bytes")],
)
def test_what_is_no_list_is_named(given: Any, kind: str) -> None:
    assert refusal(Listed(given)).what == f"Listed.tasks() returned {kind}, not a list"


def test_the_first_entry_that_is_no_task_is_shown_with_its_index() -> None:
    error = refusal(Listed([ONE, "What is 2 + 2?", 5]))
    assert error.what == "Listed.tasks()[1] is a str, not a Task: 'What is 2 + 2?'"
    assert "palestra.Task(prompt=...)" in error.expected


def test_a_long_entry_is_shortened() -> None:
    assert len(refusal(Listed(["x" * 999])).what) < 150


def test_two_tasks_with_one_id_are_refused_with_both_indexes() -> None:
    tasks = [ONE, Task(prompt="a", id="same"), TWO, Task(prompt="b", id="same")]
    assert refusal(Listed(tasks)).what == "tasks()[1] and tasks()[3] both have the id 'same'"


def test_the_same_task_twice_is_refused_with_both_indexes_even_under_two_ids() -> None:
    tasks = [Task(prompt="a", id="x"), TWO, Task(prompt="a", id="y")]
    assert refusal(Listed(tasks)).what.startswith("tasks()[0] and tasks()[2] are the same task")


def test_a_held_out_task_that_is_trained_on_is_refused_whatever_its_id() -> None:
    held_out = [THREE, Task(prompt=TWO.prompt, secret={"n": 2}, id="held-out")]
    what = refusal(Listed([ONE, TWO], held_out)).what
    assert what.startswith("evaluation_tasks()[1] (task held-out) is also tasks()[1]")


def test_held_out_tasks_are_checked_like_training_tasks() -> None:
    assert "evaluation_tasks()[0] is a int" in refusal(Listed([ONE], [3])).what
    assert (
        "evaluation_tasks()[0] and evaluation_tasks()[1] are the same task"
        in refusal(Listed([ONE], [TWO, TWO])).what
    )


def test_tasks_that_raise_keep_their_traceback() -> None:
    class Broken(Listed):
        def tasks(self) -> Any:
            return [ONE, {}["gone"]]

    with pytest.raises(TaskError, match=r"Broken\.tasks\(\) raised KeyError: 'gone'") as caught:
        validate_tasks(Broken(None))
    assert "Traceback" in caught.value.detail
    assert "test_base.py" in caught.value.where


def test_a_generator_that_raises_half_way_keeps_its_traceback() -> None:
    class Broken(Listed):
        def tasks(self) -> Any:
            yield ONE
            raise RuntimeError("half way")

    with pytest.raises(TaskError, match="half way"):
        validate_tasks(Broken(None))


def test_async_tasks_are_refused() -> None:
    class Async(Listed):
        async def tasks(self) -> Any:
            return [ONE]

    assert refusal(Async(None)).what == "Async.tasks() is async"


def test_an_episode_that_is_not_async_is_refused() -> None:
    class Plain(Listed):
        def episode(self, task: Task, ep: Any) -> float:  # type: ignore[override]
            return 1.0

    error = refusal(Plain([ONE]))
    assert error.what == "Plain.episode is not a coroutine function"
    assert "test_base.py:" in error.where


@pytest.mark.parametrize(
    "declared", [(1.0, 0.0), (0.0, 0.0), (0.0,), 1.0, ("a", "b"), (0.0, float("inf")), None]
)
def test_an_impossible_reward_range_is_refused(declared: Any) -> None:
    environment = Listed([ONE])
    environment.reward_range = declared
    assert refusal(environment).what == f"Listed.reward_range is {declared!r}"


def test_a_sandbox_that_is_no_specification_is_refused() -> None:
    environment = Listed([ONE])
    environment.sandbox = {"memory_mb": 3}  # type: ignore[assignment]
    assert "Listed.sandbox is a dict" in refusal(environment).what
    environment.sandbox = SandboxSpec()
    assert validate_tasks(environment) == (ONE,)


def test_declaring_environments_imports_no_framework() -> None:
    program = (
        "import sys, palestra as pa; pa.Environment, pa.SingleTurn, pa.Episode, pa.Task;"
        "print(sorted({'torch', 'numpy', 'jinja2', 'tokenizers'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
