"""Trainers for tests, and what their updates are compared with: transformers in double precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from helpers.forest import random_advantages, random_groups
from palestra.algorithms.packing import pack
from palestra.batches import Batch, LossSpec
from palestra.trainer.torch_trainer import TorchTrainer
from palestra.types import Group, SamplingParams


def double(folder: Path) -> Any:
    """transformers' own network of ``folder`` in double precision, with its plainest attention."""
    auto: Any = transformers.AutoModelForCausalLM
    plainest = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return auto.from_pretrained(folder, dtype=torch.float64, **plainest).eval()


def packed(
    groups: list[Group], advantages: dict[str, float], sampling: SamplingParams | None = None
) -> Batch:
    batch = pack(groups, advantages, sampling or SamplingParams())
    assert batch is not None
    return batch


def some_batch(seed: int = 5, *, groups: int = 3) -> Batch:
    made = random_groups(seed, groups=groups)
    return packed(made, random_advantages(made, seed))


def gradients(trainer: TorchTrainer, batch: Batch, spec: LossSpec | None = None) -> dict[str, torch.Tensor]:
    """What one step accumulates, as the optimiser finds it; a learning rate of 0 changes nothing."""
    optimizer, seen = trainer._prepare(), {}
    update = optimizer.update

    def spy(learning_rate: float, norm: float) -> None:
        seen.update({name: master.grad.clone() for name, master in trainer._masters.items()})
        update(learning_rate, norm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "update", spy)
        trainer.step(batch, spec or LossSpec(), 0.0)
    return seen
