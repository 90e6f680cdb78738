"""palestra: reinforcement-learning post-training of language models, one file from laptop to cluster.

Names are loaded on first use, so ``import palestra`` brings in neither torch nor any engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from palestra.environments.base import Environment as Environment
    from palestra.environments.episode import Episode as Episode
    from palestra.environments.single_turn import SingleTurn as SingleTurn
    from palestra.job import GRPO as GRPO
    from palestra.job import Checkpoints as Checkpoints
    from palestra.job import Deadlines as Deadlines
    from palestra.job import Evaluation as Evaluation
    from palestra.job import Job as Job
    from palestra.job import Optimizer as Optimizer
    from palestra.job import Sampling as Sampling
    from palestra.run import Run as Run
    from palestra.sandboxes.base import SandboxSpec as SandboxSpec
    from palestra.types import Abstain as Abstain
    from palestra.types import Message as Message
    from palestra.types import Reward as Reward
    from palestra.types import Task as Task

_HOMES = {
    "Abstain": "palestra.types",
    "Checkpoints": "palestra.job",
    "Deadlines": "palestra.job",
    "Environment": "palestra.environments.base",
    "Episode": "palestra.environments.episode",
    "Evaluation": "palestra.job",
    "GRPO": "palestra.job",
    "Job": "palestra.job",
    "Message": "palestra.types",
    "Optimizer": "palestra.job",
    "Reward": "palestra.types",
    "Run": "palestra.run",
    "Sampling": "palestra.job",
    "SandboxSpec": "palestra.sandboxes.base",
    "SingleTurn": "palestra.environments.single_turn",
    "Task": "palestra.types",
}

__all__ = [
    "GRPO",
    "Abstain",
    "Checkpoints",
    "Deadlines",
    "Environment",
    "Episode",
    "Evaluation",
    "Job",
    "Message",
    "Optimizer",
    "Reward",
    "Run",
    "Sampling",
    "SandboxSpec",
    "SingleTurn",
    "Task",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'palestra' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
