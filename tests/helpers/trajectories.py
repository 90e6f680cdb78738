"""Small trajectories and groups for tests: real types, made-up tokens."""

from __future__ import annotations

from collections.abc import Sequence

from palestra.types import (
    Abstain,
    Boundary,
    Completion,
    Group,
    Outcome,
    Reward,
    StopReason,
    Task,
    Trajectory,
    Turn,
)

TASK = Task(prompt="What is 1 + 1?", secret={"answer": 2})


def trajectory(
    name: str,
    outcome: Outcome | float | None,
    *,
    tokens: int = 4,
    task: Task = TASK,
    stop_reason: StopReason = StopReason.EOS,
    prompt: Sequence[int] = (1, 2, 3),
    version: int = 0,
) -> Trajectory:
    """A one-turn trajectory. ``outcome`` None abstains; a number is a reward."""
    ids = tuple(10 + (len(name) + i) % 50 for i in range(tokens))
    completion = Completion(ids, (-0.5,) * tokens, (version,) * tokens, stop_reason)
    turns = (Turn.given(prompt), Turn.sampled(completion)) if tokens else (Turn.given(prompt),)
    if outcome is None:
        outcome = Abstain("the engine broke", Boundary.ENGINE, detail="Traceback: boom")
    if isinstance(outcome, (int, float)):
        outcome = Reward(outcome)
    return Trajectory(name, task.hash, turns, outcome)


def group(name: str, outcomes: Sequence[float | None], *, task: Task = TASK, tokens: int = 4) -> Group:
    members = tuple(
        trajectory(f"{name}.{i}", outcome, task=task, tokens=tokens) for i, outcome in enumerate(outcomes)
    )
    return Group(name, task.hash, members)
