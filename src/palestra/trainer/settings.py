"""What a trainer may be told; every value is checked here, so a wrong one never reaches a weight."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from palestra.models.dtypes import DtypeName

_ROUNDING_ONLY = ("threads", "micro_batch_tokens", "rollout_dtype")


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

    def fingerprint(self) -> dict[str, Any]:
        """The settings a saved state belongs to: all that change an update by more than rounding."""
        return {name: value for name, value in asdict(self).items() if name not in _ROUNDING_ONLY}
