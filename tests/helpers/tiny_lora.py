"""Random LoRA adapters in PEFT's layout for any model's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERYWHERE = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def peft_name(weight: str, half: str) -> str:
    return f"base_model.model.{weight.removesuffix('.weight')}.lora_{half}.weight"


def make_lora(
    model: Mapping[str, Tensor],
    *,
    rank: int = 4,
    alpha: float = 6,
    targets: Sequence[str] = EVERYWHERE,
    seed: int = 0,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """adapter_config.json and tensors, large enough to change every logit clearly."""
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, weight in model.items():
        if name.endswith(tuple(f"{target}.weight" for target in targets)):
            rows, columns = weight.shape
            tensors[peft_name(name, "A")] = torch.randn(rank, columns, generator=random) * columns**-0.5
            tensors[peft_name(name, "B")] = torch.randn(rows, rank, generator=random) * 0.2
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets)}
    return config, tensors


def dense(model: Mapping[str, Tensor], lora: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """``W + scale * B @ A`` for every weight, computed here and not by the code under test."""
    changed = {name: tensor.double() for name, tensor in model.items()}
    for name in changed:
        if peft_name(name, "A") in lora:
            up, down = lora[peft_name(name, "B")].double(), lora[peft_name(name, "A")].double()
            changed[name] = changed[name] + scale * up @ down
    return {name: tensor.to(model[name].dtype) for name, tensor in changed.items()}
