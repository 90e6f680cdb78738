"""palestra: reinforcement-learning post-training of language models, one file from laptop to cluster.

Names are loaded on first use, so ``import palestra`` brings in neither torch nor any engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from palestra.algorithms.registry import register_algorithm as register_algorithm
    from palestra.batches import LossSpec as LossSpec
    from palestra.environments.base import Environment as Environment
    from palestra.environments.episode import Episode as Episode
    from palestra.environments.single_turn import SingleTurn as SingleTurn
    from palestra.job import Checkpoints as Checkpoints
    from palestra.job import Deadlines as Deadlines
    from palestra.job import Evaluation as Evaluation
    from palestra.job import Job as Job
    from palestra.job import Optimizer as Optimizer
    from palestra.job import Sampling as Sampling
    from palestra.presets import CISPO as CISPO
    from palestra.presets import DAPO as DAPO
    from palestra.presets import GRPO as GRPO
    from palestra.presets import GSPO as GSPO
    from palestra.presets import RLOO as RLOO
    from palestra.presets import SAPO as SAPO
    from palestra.presets import Algorithm as Algorithm
    from palestra.presets import Distill as Distill
    from palestra.presets import DrGRPO as DrGRPO
    from palestra.presets import MaxRL as MaxRL
    from palestra.presets import ReinforcePP as ReinforcePP
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
    "Algorithm": "palestra.presets",
    "CISPO": "palestra.presets",
    "DAPO": "palestra.presets",
    "Distill": "palestra.presets",
    "DrGRPO": "palestra.presets",
    "GRPO": "palestra.presets",
    "GSPO": "palestra.presets",
    "MaxRL": "palestra.presets",
    "ReinforcePP": "palestra.presets",
    "RLOO": "palestra.presets",
    "SAPO": "palestra.presets",
    "LossSpec": "palestra.batches",
    "register_algorithm": "palestra.algorithms.registry",
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
    "CISPO",
    "DAPO",
    "GRPO",
    "GSPO",
    "RLOO",
    "SAPO",
    "Abstain",
    "Algorithm",
    "Checkpoints",
    "Deadlines",
    "Distill",
    "DrGRPO",
    "Environment",
    "Episode",
    "Evaluation",
    "Job",
    "LossSpec",
    "MaxRL",
    "Message",
    "Optimizer",
    "ReinforcePP",
    "Reward",
    "Run",
    "Sampling",
    "SandboxSpec",
    "SingleTurn",
    "Task",
    "__version__",
    "register_algorithm",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'palestra' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
