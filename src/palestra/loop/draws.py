"""Which prompt is drawn when: a pure function of the run's seed, so no state can lose one.

Draw i of a run is a position in an endless sequence of epochs; each epoch is one
permutation of all training tasks. Step s (from 1) owns draws ``(s-1)*P`` up to
``s*P``: each prompt once per epoch, whatever dies and whenever. Sampling seeds
derive from names, never from a generator that has to be saved.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Draw:
    """One prompt's turn: its place in the run, its epoch, and the task's index."""

    index: int
    epoch: int
    task_index: int


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed named by ``parts``: BLAKE2b of them, so unrelated names give unrelated seeds."""
    name = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def epoch_order(tasks: int, seed: int, epoch: int) -> list[int]:
    """The permutation of ``range(tasks)`` that is this epoch's order."""
    order = list(range(tasks))
    random.Random(derive_seed(seed, "epoch", epoch)).shuffle(order)
    return order


def draw(index: int, *, tasks: int, seed: int) -> Draw:
    """Draw number ``index`` (from 0). Raises ValueError without tasks or below 0."""
    if tasks < 1 or index < 0:
        raise ValueError(f"no draw {index} over {tasks} tasks")
    epoch, place = divmod(index, tasks)
    return Draw(index, epoch, epoch_order(tasks, seed, epoch)[place])


def draws_of_step(step: int, *, prompts_per_step: int, tasks: int, seed: int) -> list[Draw]:
    """The draws that step ``step`` (from 1) owns, in order."""
    first = (step - 1) * prompts_per_step
    return [draw(i, tasks=tasks, seed=seed) for i in range(first, first + prompts_per_step)]
