"""TRL's own loss on plain tensors: `_compute_loss`, unbound, with everything around the formula left out.

Whoever imports this has checked that TRL is installed.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class _Accelerator:
    num_processes = 1
    sync_gradients = True

    def gather(self, value: Tensor) -> Tensor:
        return value

    def reduce(self, value: Tensor, reduction: str) -> Tensor:
        assert reduction == "sum"
        return value


def _trainer(logprobs: Tensor, settings: dict[str, Any]) -> SimpleNamespace:
    arguments = {
        "use_bias_correction_kl": settings.pop("use_bias_correction_kl", False),
        "delta": settings.pop("delta", None),
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "steps_per_generation": 1,
    }
    plain = {
        "args": SimpleNamespace(**arguments),
        "accelerator": _Accelerator(),
        "model": SimpleNamespace(training=True),
        "current_gradient_accumulation_steps": 1,
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "loss_type": "dapo",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "max_completion_length": 1,
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
    }
    return SimpleNamespace(**{**plain, **settings})


def trl_loss(
    kind: str, logprobs_BT: Tensor, mask_BT: Tensor, columns: dict[str, Any], **settings: Any
) -> Tensor:
    """The loss of `GRPOTrainer` (``grpo``) or `RLOOTrainer` (``rloo``), differentiable in the logprobs."""
    import trl

    owner: Any = {"grpo": trl.GRPOTrainer, "rloo": trl.RLOOTrainer}[kind]
    trainer = _trainer(logprobs_BT, settings)
    if trainer.off_policy_mask_threshold is not None:
        trainer.get_off_policy_mask = owner.get_off_policy_mask
    ids = torch.zeros_like(mask_BT, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": mask_BT[:, :1].long(),
        "completion_ids": ids,
        "completion_mask": mask_BT.to(logprobs_BT.dtype),
        "num_items_in_batch": mask_BT.sum(),
        **columns,
    }
    return owner._compute_loss(trainer, None, inputs)
