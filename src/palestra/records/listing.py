"""The runs in a folder, one summary each, cheap enough for hundreds of runs.

A summary reads ``run.json``, one configuration and the tail of one metrics file,
never a whole run. A run that cannot be read is listed with the reason, not left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.errors import RecordError
from palestra.records.files import last_lines
from palestra.records.reader import RunReader
from palestra.records.schema import RUN_JSON


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One line of ``palestra runs list``. None where the run does not say."""

    name: str
    path: Path
    state: str
    """One of `palestra.records.schema.State`, or ``unreadable``."""
    reason: str = ""
    step: int = 0
    """The last step it reported a reward or a time for."""
    steps: int | None = None
    reward: float | None = None
    """Mean sampled reward of the last step that had one."""
    model: str | None = None
    created: float | None = None
    """Seconds since the epoch."""
    attempts: int = 0


def list_runs(runs_dir: Path) -> list[RunSummary]:
    """Every run directly below ``runs_dir``, newest first; none where there is no such folder."""
    if not runs_dir.is_dir():
        return []
    found = [summarise(path.parent) for path in runs_dir.glob(f"*/{RUN_JSON}")]
    return sorted(found, key=lambda run: (-(run.created or 0.0), run.name))


def summarise(path: Path) -> RunSummary:
    """The summary of one run folder."""
    try:
        reader = RunReader(path)
        info, (state, reason) = reader.info(), reader.state()
        attempts = reader.attempts()
        step, reward = _last_step(reader)
    except RecordError as error:
        return RunSummary(path.name, path, "unreadable", error.what)
    resolved = attempts[-1]["resolved"] if attempts else {}
    model, steps, created = (_either(info, resolved, name) for name in ("model", "steps", "created"))
    return RunSummary(
        name=path.name,
        path=path,
        state=state,
        reason=reason,
        step=step,
        steps=steps if isinstance(steps, int) else None,
        reward=reward,
        model=model if isinstance(model, str) else None,
        created=float(created) if isinstance(created, (int, float)) else None,
        attempts=len(attempts),
    )


def _either(info: Mapping[str, Any], resolved: Mapping[str, Any], name: str) -> Any:
    return info[name] if name in info else resolved.get(name)


def _last_step(reader: RunReader) -> tuple[int, float | None]:
    """The last reported step and reward, from the newest metrics file that has them."""
    step, reward = 0, None
    for part in reversed(reader.stream_files("metrics")):
        for record in last_lines(part.path):
            values, at = record.get("values"), record.get("step")
            if not isinstance(values, dict) or not isinstance(at, int):
                continue
            if not step and ("time/step_s" in values or "reward/mean" in values):
                step = at
            if isinstance(values.get("reward/mean"), (int, float)):
                return step, float(values["reward/mean"])
    return step, reward
