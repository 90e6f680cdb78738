"""An environment that declares all it must, for tests of what a job says and never plays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from palestra.environments.base import Environment
from palestra.types import Task

if TYPE_CHECKING:
    from palestra.environments.episode import Episode


class Declared(Environment):
    def tasks(self) -> Sequence[Task]:
        return [Task(prompt="never played")]

    async def episode(self, task: Task, ep: Episode) -> float:
        raise AssertionError("this test plays nothing")
