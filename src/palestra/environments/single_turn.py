"""The smallest environment: a prompt, one answer, a reward function.

A plain reward function runs in a worker process that can be killed, so it may
block, loop for ever or crash without harm to the run; an ``async def`` one runs on
the event loop, may use the episode (its sandbox, further turns) and must not
block. Its signature is checked when the environment is built, its verdict where
every verdict is (`palestra.environments.rewards`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

from palestra.environments.base import Environment
from palestra.environments.episode import Episode, is_async
from palestra.environments.rewards import name_of, place_of, verdict_of
from palestra.errors import RewardError, users_line
from palestra.sandboxes.base import SandboxSpec
from palestra.types import Abstain, Reward, Task

Tasks = Sequence[Task] | Callable[[], Sequence[Task]]
_NEXT = "correct it there, then the same command"
_EXPECTED = "def reward(task, reply), async def reward(task, reply), or async def reward(task, reply, ep)"


class SingleTurn(Environment):
    """``SingleTurn(tasks, reward)``: the model answers each task once, ``reward(task, reply)`` judges.

    ``tasks`` and ``evaluation_tasks`` are lists, or functions that return them.
    """

    def __init__(
        self,
        tasks: Tasks,
        reward: Callable[..., object],
        *,
        evaluation_tasks: Tasks = (),
        reward_range: tuple[float, float] = (0.0, 1.0),
        sandbox: SandboxSpec | None = None,
    ) -> None:
        self.built_at = users_line()
        self._takes_episode = _takes_episode(reward)
        self._tasks = tasks
        self._evaluation_tasks = evaluation_tasks
        self._reward = reward
        self.reward_range = reward_range
        self.sandbox = sandbox

    def tasks(self) -> Sequence[Task]:
        return self._tasks() if callable(self._tasks) else self._tasks

    def evaluation_tasks(self) -> Sequence[Task]:
        return self._evaluation_tasks() if callable(self._evaluation_tasks) else self._evaluation_tasks

    async def episode(self, task: Task, ep: Episode) -> Reward | Abstain | float:
        reply = await ep.say()
        more = (ep,) if self._takes_episode else ()
        return verdict_of(await ep.grade(self._reward, task, reply, *more), self.reward_range, self._reward)


def _takes_episode(reward: Callable[..., object]) -> bool:
    """Whether the reward wants the episode as its third argument; RewardError if it cannot be called."""
    if not callable(reward):  # pyright: ignore[reportUnnecessaryComparison]
        raise RewardError(
            f"the reward is a {type(reward).__name__}, not a function",
            where=users_line(),
            expected=_EXPECTED,
            next_command=_NEXT,
        )
    name, place = name_of(reward), place_of(reward)
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # a builtin that tells no signature: it is called with two
        return False
    wants = not _accepts(signature, 2) or _third_is_episode(signature)
    if wants and not _accepts(signature, 3):
        what = f"{name}{signature} cannot be called as a reward"
        raise RewardError(what, where=place, expected=_EXPECTED, next_command=_NEXT)
    if wants and not is_async(reward):
        raise RewardError(
            f"{name}{signature} takes the episode but is not async: plain functions run in another process, "
            "which the episode cannot enter",
            where=place,
            expected=_EXPECTED,
            next_command=_NEXT,
        )
    return wants


def _accepts(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _third_is_episode(signature: inspect.Signature) -> bool:
    """An optional third parameter is the episode's only if it is called so."""
    names = [
        p.name
        for p in signature.parameters.values()
        if p.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    return len(names) >= 3 and names[2] in ("ep", "episode")
