"""AdamW (arXiv:1711.05101) over named fp32 masters, as one fused kernel per tensor.

The state is two moments per master and the number of updates; an update is a
function of these, the gradients and the settings, bit for bit at one thread
count. It uses torch's functional form: the class form imports the compiler
(2.6 CPU-seconds) for nothing. The fused kernel takes an eighth of the plain
one's time and divides by the clipping factor on its way. Decay is decoupled
and spares vectors (norm weights).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from palestra.models.functions import gradient_of
from palestra.trainer.settings import TrainerSettings

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """Owns the moments of ``masters``, which are allocated once. Gradients live from backward to update."""

    def __init__(self, masters: Mapping[str, Tensor], settings: TrainerSettings) -> None:
        self._masters = masters
        self._settings = settings
        self.moments: dict[str, dict[str, Tensor]] = {
            moment: {name: torch.zeros_like(master) for name, master in masters.items()} for moment in MOMENTS
        }
        self.updates = 0

    def free_gradients(self) -> None:
        """A gradient takes as much memory as the weights, and sampling comes next: none is kept."""
        for master in self._masters.values():
            master.grad = None

    def gradient_norm(self) -> float:
        """Global L2 norm; inf or nan where any gradient is."""
        return torch.nn.utils.get_total_norm([gradient_of(m) for m in self._masters.values()]).item()

    @torch.no_grad()
    def update(self, learning_rate: float, norm: float) -> None:
        """One update with the gradients scaled so that their ``norm`` is at most ``grad_clip``."""
        settings = self._settings
        limit = settings.grad_clip
        device = next(iter(self._masters.values())).device
        scale = torch.tensor(norm / limit, device=device) if limit and norm > limit else None
        for decay, names in self._decay_groups():
            if not names:
                continue  # adapters have no vectors
            adamw(
                [self._masters[name] for name in names],
                [gradient_of(self._masters[name]) for name in names],
                [self.moments["exp_avg"][name] for name in names],
                [self.moments["exp_avg_sq"][name] for name in names],
                [],
                [torch.tensor(float(self.updates), device=device) for _ in names],
                fused=True,
                grad_scale=scale,
                amsgrad=False,
                beta1=settings.beta1,
                beta2=settings.beta2,
                lr=learning_rate,
                weight_decay=decay,
                eps=settings.epsilon,
                maximize=False,
            )
        self.updates += 1

    def _decay_groups(self) -> tuple[tuple[float, list[str]], tuple[float, list[str]]]:
        matrices = [name for name, master in self._masters.items() if master.ndim > 1]
        vectors = [name for name, master in self._masters.items() if master.ndim <= 1]
        return (self._settings.weight_decay, matrices), (0.0, vectors)
