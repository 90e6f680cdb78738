"""What a rollout's line says beyond its texts: outcome, turns, tokens and versions.

Pure. A reward and an abstention are different keys and exactly one is set, so a
reader cannot take a failure for a number.
"""

from __future__ import annotations

from typing import Any

from palestra.records.schema import number
from palestra.types import Abstain, Trajectory, Turn


def rollout_record(trajectory: Trajectory) -> dict[str, Any]:
    """The keys of a rollout's line that follow from its trajectory alone."""
    outcome = trajectory.outcome
    versions = [
        v for turn in trajectory.turns for v, s in zip(turn.versions, turn.sampled_mask, strict=True) if s
    ]
    abstained = isinstance(outcome, Abstain)
    return {
        "id": trajectory.id,
        "task_hash": trajectory.task_hash,
        "reward": None if abstained else outcome.value,
        "parts": {} if abstained else {name: number(part) for name, part in outcome.parts.items()},
        "abstain": _abstention(outcome) if abstained else None,
        "stop_reason": str(trajectory.stop_reason) if trajectory.stop_reason else None,
        "turns": [_turn(turn) for turn in trajectory.turns],
        "token_count": sum(len(turn.token_ids) for turn in trajectory.turns),
        "sampled_count": trajectory.sampled_count,
        "versions": [min(versions), max(versions)] if versions else None,
        "spans": [[span.name, span.start_s, span.end_s] for span in trajectory.spans],
    }


def _abstention(outcome: Abstain) -> dict[str, str]:
    return {"boundary": str(outcome.boundary), "reason": outcome.reason, "detail": outcome.detail}


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "role": turn.role,
        "tokens": len(turn.token_ids),
        "sampled": sum(turn.sampled_mask),
        "stop_reason": str(turn.stop_reason) if turn.stop_reason else None,
    }
