"""What makes a run this run: the settings that a continued run may not change.

Steps, deadlines, limits, evaluation, checkpoint and resource settings may change
between attempts; model, tasks, seed, algorithm, sampling and number types may
not, because the ledger's draws and the recorded losses would mean something
else. Pure functions over plain JSON values, but for `source_digest`, which reads files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.environments.base import Environment, where_defined
from palestra.job import Job
from palestra.types import Task

_FIXED = ("seed", "prompts_per_step", "chat_template", "algorithm", "sampling", "optimizer")


def tasks_digest(tasks: Sequence[Task]) -> str:
    """64 hex digits of SHA-256 over the tasks' hashes in order."""
    return hashlib.sha256("".join(task.hash for task in tasks).encode()).hexdigest()


def identity_of(
    job: Job,
    tasks: Sequence[Task],
    evaluation_tasks: Sequence[Task],
    *,
    model_digest: str,
    dtypes: Mapping[str, str],
) -> dict[str, Any]:
    """The identity of a run as flat JSON: dotted keys, so a difference can be named."""
    settings = job.model_dump(mode="json", include=set(_FIXED))
    decays = job.optimizer.schedule != "constant"
    return {
        "environment": type(job.environment).__qualname__,
        "reward_range": list(job.environment.reward_range),
        "steps (the learning rate falls towards the last)": job.steps if decays else None,
        "model_digest": model_digest,
        "tasks": f"{len(tasks)} tasks, digest {tasks_digest(tasks)[:16]}",
        "evaluation_tasks": f"{len(evaluation_tasks)} tasks, digest {tasks_digest(evaluation_tasks)[:16]}",
        "dtypes": dict(dtypes),
        "trainer.lora": job.trainer.lora or None,
        **_flat(settings),
    }


def source_digest(environment: Environment) -> str:
    """64 hex digits over the files that define the environment and the functions it holds.

    Not part of the identity: mending a reward is what a stopped run is continued for. '' without a file.
    """
    parts = [type(environment), *(value for value in vars(environment).values() if callable(value))]
    files = {where_defined(part).rpartition(":")[0] for part in parts}
    contents = [Path(file).read_bytes() for file in sorted(files) if file and Path(file).is_file()]
    return hashlib.sha256(b"\0".join(contents)).hexdigest() if contents else ""


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flat(item, f"{prefix}{key}.")  # pyright: ignore[reportUnknownArgumentType]
        else:
            flat[prefix + key] = item
    return flat


def differences(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, recorded, now) for every key on which the two differ, sorted by key."""
    keys = sorted({*recorded, *now})
    return [(k, recorded.get(k), now.get(k)) for k in keys if recorded.get(k) != now.get(k)]
