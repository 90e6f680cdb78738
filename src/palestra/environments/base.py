"""What a user's environment is, and what must hold of its tasks before anything runs.

An environment is one object used to train, to evaluate and to play by hand: it
lists tasks and plays one episode of one of them. Its tasks are distinct, and no
held-out task is also a training task: a run whose evaluation was trained on is
refused, not reported. Nothing here samples, renders or imports a framework.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from palestra.errors import TaskError, boundary
from palestra.sandboxes.base import SandboxSpec
from palestra.types import Abstain, Boundary, Reward, Task

if TYPE_CHECKING:
    from palestra.environments.episode import Episode

_NEXT = "correct it there, then the same command"
_METHODS = {
    "tasks": "def tasks(self) -> list[palestra.Task]",
    "episode": "async def episode(self, task, ep) -> float",
}


class Environment:
    """Subclass this: define ``tasks`` and ``episode``; the rest has defaults.

    The object is shared by all episodes, which run interleaved on one event loop:
    state of one episode belongs into local variables of ``episode``.
    """

    reward_range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest reward there can be; anything outside abstains, never counts."""
    sandbox: SandboxSpec | None = None
    """Limits of the sandboxes its episodes open; None takes the job's."""
    built_at: str = ""
    """``file:line`` to name where the class is not the user's own; '' names the class's line."""

    def tasks(self) -> Sequence[Task]:
        """The training tasks, in an order that is the same in every process."""
        raise TaskError(
            f"{type(self).__name__} defines no tasks",
            where=where_defined(type(self)),
            expected=_METHODS["tasks"],
            next_command=_NEXT,
        )

    def evaluation_tasks(self) -> Sequence[Task]:
        """Held-out tasks, none of them a training task; none by default."""
        return ()

    async def episode(self, task: Task, ep: Episode) -> Reward | Abstain | float:
        """Play one task through ``ep.say`` and judge it.

        Exceptions are the environment's failures, not the policy's: the episode
        abstains. Return a number in ``reward_range``, a Reward, or an Abstain.
        """
        raise TaskError(
            f"{type(self).__name__} defines no episode",
            where=where_defined(type(self)),
            expected=_METHODS["episode"],
            next_command=_NEXT,
        )


def validate_tasks(environment: Environment) -> tuple[Task, ...]:
    """The environment's training tasks, checked as `all_tasks` checks them."""
    return all_tasks(environment)[0]


def all_tasks(environment: Environment) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
    """Training and held-out tasks, asked for once; TaskError names the first thing wrong with them.

    Held-out tasks are checked too. Refused: no task at all, anything that is not
    a Task, one id or one content given twice, a task both trained on and held out.
    """
    check_declaration(environment)
    tasks = _listed(environment, environment.tasks, "tasks()")
    if not tasks:
        raise TaskError(
            f"{type(environment).__name__}.tasks() is empty: there is nothing to train on",
            where=_place(environment),
            expected="at least one palestra.Task",
            next_command=_NEXT,
        )
    _refuse_duplicates(environment, tasks, "tasks()")
    held_out = _listed(environment, environment.evaluation_tasks, "evaluation_tasks()")
    _refuse_duplicates(environment, held_out, "evaluation_tasks()")
    trained = {task.hash: index for index, task in enumerate(tasks)}
    for index, task in enumerate(held_out):
        if task.hash in trained:
            raise TaskError(
                f"evaluation_tasks()[{index}] (task {task.id}) is also tasks()[{trained[task.hash]}]: "
                "an evaluation on a trained task says nothing",
                where=_place(environment),
                expected="held-out tasks that are not training tasks",
                next_command=_NEXT,
            )
    return tasks, held_out


def where_defined(kind: object) -> str:
    """``file:line`` of a class or function, or '' where it has no source (an interactive session)."""
    target = inspect.unwrap(kind) if callable(kind) and not isinstance(kind, type) else kind
    code = getattr(target, "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    try:
        file = inspect.getsourcefile(target)  # type: ignore[arg-type]  # TypeError says it has no file
        return f"{file}:{inspect.getsourcelines(target)[1]}" if file else ""  # type: ignore[arg-type]
    except (TypeError, OSError):
        return ""


def _place(environment: Environment, part: object = None) -> str:
    """Where the user can look: the line of ``part`` or of the class, or where an object of ours was built."""
    return environment.built_at or where_defined(part) or where_defined(type(environment))


def check_declaration(environment: Environment) -> None:
    """TaskError where the class lacks a method, or declares what cannot be; asks for no task."""
    name, where = type(environment).__name__, _place(environment)
    for part, signature in _METHODS.items():
        if getattr(getattr(environment, part), "__func__", None) is getattr(Environment, part):
            raise TaskError(f"{name} defines no {part}", where=where, expected=signature, next_command=_NEXT)
    if not _is_range(environment.reward_range):
        raise TaskError(
            f"{name}.reward_range is {environment.reward_range!r}",
            where=where,
            expected="two finite numbers, the lowest reward and a higher one, such as (0.0, 1.0)",
            next_command=_NEXT,
        )
    if not _is_spec(environment.sandbox):
        raise TaskError(
            f"{name}.sandbox is a {type(environment.sandbox).__name__}: {environment.sandbox!r}",
            where=where,
            expected="palestra.SandboxSpec(...) or None",
            next_command=_NEXT,
        )
    episode: object = environment.episode
    if not inspect.iscoroutinefunction(episode):
        raise TaskError(
            f"{name}.episode is not a coroutine function",
            where=where_defined(episode) or where,
            expected="async def episode(self, task, ep): ep.say has to be awaited",
            next_command=_NEXT,
        )


def _is_range(value: object) -> bool:
    if not isinstance(value, (tuple, list)):
        return False
    ends = list(cast("Sequence[object]", value))
    numbers = [end for end in ends if isinstance(end, (int, float)) and math.isfinite(end)]
    return len(ends) == len(numbers) == 2 and numbers[0] < numbers[1]


def _is_spec(value: object) -> bool:
    return value is None or isinstance(value, SandboxSpec)


def _listed(environment: Environment, give: Callable[[], object], label: str) -> tuple[Task, ...]:
    """What ``give`` lists, every entry known to be a Task."""
    name, where = f"{type(environment).__name__}.{label}", _place(environment, give)
    expected = "a list of palestra.Task"
    with boundary(Boundary.TASK, name):
        given: object = give()
        if inspect.iscoroutine(given):
            given.close()
            plain = "a plain def that returns the list"
            raise TaskError(f"{name} is async", where=where, expected=plain, next_command=_NEXT)
        if not isinstance(given, Iterable) or isinstance(given, (str, bytes, Mapping)):
            kind = "None" if given is None else f"a {type(cast('object', given)).__name__}"
            what = f"{name} returned {kind}, not a list"
            raise TaskError(what, where=where, expected=expected, next_command=_NEXT)
        # A generator runs here, so that what it raises gets the boundary too.
        entries = tuple(cast("Iterable[object]", given))
    tasks = tuple(entry for entry in entries if isinstance(entry, Task))
    if len(tasks) < len(entries):
        index, entry = next((i, e) for i, e in enumerate(entries) if not isinstance(e, Task))
        shown = repr(entry) if len(repr(entry)) <= 80 else repr(entry)[:77] + "..."
        raise TaskError(
            f"{name}[{index}] is a {type(entry).__name__}, not a Task: {shown}",
            where=where,
            expected=expected + "; a prompt alone becomes one with palestra.Task(prompt=...)",
            next_command=_NEXT,
        )
    return tasks


def _refuse_duplicates(environment: Environment, tasks: Sequence[Task], label: str) -> None:
    where = _place(environment)
    by_id: dict[str, int] = {}
    by_hash: dict[str, int] = {}
    for index, task in enumerate(tasks):
        first = by_hash.setdefault(task.hash, index)
        if first != index:
            raise TaskError(
                f"{label}[{first}] and {label}[{index}] are the same task (prompt, messages, data and secret "
                "agree): it would be drawn twice an epoch, and its groups could not be told apart",
                where=where,
                expected="each task once; what differs may be put into Task.data",
                next_command=_NEXT,
            )
        first = by_id.setdefault(task.id, index)
        if first != index:
            raise TaskError(
                f"{label}[{first}] and {label}[{index}] both have the id {task.id!r}",
                where=where,
                expected="a different id for each task, or none: it then follows from the content",
                next_command=_NEXT,
            )
