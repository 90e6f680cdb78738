"""What a trainer may be told; every value is checked here, so a wrong one never reaches a weight."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from palestra.models.dtypes import DtypeName

_ROUNDING_ONLY = ("threads", "micro_batch_tokens", "rollout_dtype", "checkpoint_layers", "device", "seed")

RECOMPUTE_BEYOND = 4
"""Trees are not cut, so memory for one that is this many times too large is bought with time."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Masters and optimiser state are always fp32; the learning rate comes with each step."""

    dtype: DtypeName = "fp32"
    """What matrix products compute in."""
    rollout_dtype: DtypeName = "fp32"
    """What ``export`` yields."""
    threads: int = 0
    """CPU threads; 0 leaves the process's setting. Same bits need the same number."""
    micro_batch_tokens: int = 512
    """Packed tokens per forward: 1.2 MB of activations each for a 135M model; more is no faster here."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled; applies to matrices, not to norm weights."""
    grad_clip: float = 1.0
    """Largest global L2 norm of the gradient; 0 is off."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where weights, optimiser state and activations lie."""
    checkpoint_layers: bool = False
    """Keep one tensor per layer for the backward pass and compute the rest again: the same gradient.
    A tree of more than `RECOMPUTE_BEYOND` times ``micro_batch_tokens`` is computed so in any case."""
    lora_rank: int = 0
    """Train low-rank adapters of this rank beside frozen weights in ``dtype``; 0 trains every weight."""
    lora_alpha: float = 32.0
    """The adapters' output is multiplied by ``lora_alpha / lora_rank``."""
    lora_targets: tuple[str, ...] = ()
    """Linear layers with an adapter, by the last part of their names; () is all but the head."""
    reference_decay: float = 0.0
    """Of the running mean of the masters that is the KL term's reference; 0: it is the starting model."""
    seed: int = 0
    """What fresh adapters are drawn from."""

    def __post_init__(self) -> None:
        for name in ("dtype", "rollout_dtype"):
            value = getattr(self, name)
            _require(value in ("fp32", "bf16"), f"{name} must be fp32 or bf16, got {value!r}")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"{name} must be in [0, 1), got {getattr(self, name)}")
        for name in ("weight_decay", "grad_clip", "epsilon"):
            value = getattr(self, name)
            _require(math.isfinite(value) and value >= 0, f"{name} must be finite and >= 0, got {value}")
        _require(self.epsilon > 0, "epsilon must be above 0")
        _require(self.threads >= 0, f"threads must be >= 0 (0 leaves it alone), got {self.threads}")
        _require(
            self.micro_batch_tokens >= 1, f"micro_batch_tokens must be >= 1, got {self.micro_batch_tokens}"
        )
        _require(self.device in ("cpu", "cuda"), f"device must be cpu or cuda, got {self.device!r}")
        _require(self.lora_rank >= 0, f"lora_rank must be >= 0 (0 is no adapter), got {self.lora_rank}")
        _require(
            math.isfinite(self.lora_alpha) and self.lora_alpha > 0,
            f"lora_alpha must be above 0, got {self.lora_alpha}",
        )
        _require(
            0 <= self.reference_decay < 1, f"reference_decay must be in [0, 1), got {self.reference_decay}"
        )

    def recomputes(self, tokens: int) -> bool:
        """Whether layers are computed twice for a micro-batch of so many packed tokens."""
        return self.checkpoint_layers or tokens > RECOMPUTE_BEYOND * self.micro_batch_tokens

    def fingerprint(self) -> dict[str, Any]:
        """The settings a saved state belongs to: all that change an update by more than rounding."""
        absent = () if self.lora_rank else ("lora_rank", "lora_alpha", "lora_targets")
        if not self.reference_decay:
            absent = (*absent, "reference_decay")
        values = {n: v for n, v in asdict(self).items() if n not in (*_ROUNDING_ONLY, *absent)}
        return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}
