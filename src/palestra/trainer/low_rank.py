"""LoRA (arXiv:2106.09685): low-rank changes beside frozen linear layers, trained in fp32.

A layer's output becomes ``W x + scale * B (A x)``; ``B`` begins at zero, so the
untrained adapter is the base model, and with the adapters off it always is: the
reference of a KL term costs nothing. Layers keep their classes and names. What is
saved is PEFT's layout, complete or not at all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from palestra.errors import TrainerError, nearest
from palestra.models.lora import CONFIG, TENSORS, LowRank, parse_adapter, read_adapter
from palestra.models.tensors import write_durably, write_safetensors
from palestra.trainer.settings import TrainerSettings


class LowRankModules:
    """Adapters on ``model``'s linear layers, all but ``head`` or those that the settings name."""

    def __init__(self, model: nn.Module, head: nn.Module, settings: TrainerSettings) -> None:
        self.rank = settings.lora_rank
        self.alpha = settings.lora_alpha
        self._scale = settings.lora_alpha / settings.lora_rank
        self._enabled = True
        layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
        chosen = _chosen(layers, settings.lora_targets)
        self.targets = sorted({name.rpartition(".")[2] for name in chosen})
        self._shapes = {f"{name}.weight": tuple(layer.weight.shape) for name, layer in chosen.items()}
        random = torch.Generator().manual_seed(settings.seed)
        self.masters: dict[str, Tensor] = {}
        self._halves: dict[str, tuple[Tensor, Tensor]] = {}
        for name, layer in chosen.items():
            bound = layer.in_features**-0.5
            drawn = torch.empty(self.rank, layer.in_features, device="cpu").uniform_(
                -bound, bound, generator=random
            )
            device = layer.weight.device
            down_RI = drawn.to(device).requires_grad_()
            up_OR = torch.zeros(layer.out_features, self.rank, device=device).requires_grad_()
            self.masters |= {f"{name}.lora_A.weight": down_RI, f"{name}.lora_B.weight": up_OR}
            self._halves[name] = down_RI, up_OR
            layer.register_forward_hook(self._beside(down_RI, up_OR))

    @contextmanager
    def off(self) -> Iterator[None]:
        """The base model as it was."""
        self._enabled = False
        try:
            yield
        finally:
            self._enabled = True

    def changes(self) -> dict[str, LowRank]:
        """What the adapters add, by the name of the weight they add it to."""
        return {
            f"{name}.weight": LowRank(down.detach(), up.detach(), self._scale)
            for name, (down, up) in self._halves.items()
        }

    def save(self, folder: Path) -> None:
        """Write the adapter in PEFT's layout; the configuration, without which it is none, comes last."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).unlink(missing_ok=True)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "target_modules": self.targets,
            "inference_mode": True,
        }
        tensors = {f"base_model.model.{name}": master for name, master in self.masters.items()}
        write_safetensors(folder / TENSORS, tensors)
        write_durably(folder / CONFIG, [(json.dumps(config, indent=2) + "\n").encode()])

    def load(self, folder: Path) -> None:
        """Take an adapter's values; an error that names the difference if it is another one, or damaged."""
        config, tensors = read_adapter(folder)
        found = parse_adapter(config, tensors.items(), self._shapes)
        own = self.changes()
        for name in sorted(own.keys() | found.keys()):
            theirs, ours = _told(found.get(name)), _told(own.get(name))
            if theirs != ours:
                raise TrainerError(
                    f"the adapter has {theirs} for {name}",
                    where=str(folder),
                    expected=f"{ours}, from trainer.lora_rank, lora_alpha and lora_targets",
                )
        with torch.no_grad():
            for name, change in found.items():
                down, up = self._halves[name.removesuffix(".weight")]
                down.copy_(change.down_RI)
                up.copy_(change.up_OR)

    def _beside(self, down_RI: Tensor, up_OR: Tensor) -> Callable[[nn.Module, tuple[Tensor], Tensor], Tensor]:
        def add(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            if not self._enabled:
                return output
            x = inputs[0] if torch.is_autocast_enabled(output.device.type) else inputs[0].float()
            return output + self._scale * linear(linear(x, down_RI), up_OR).to(output.dtype)

        return add


def _chosen(layers: Mapping[str, nn.Linear], targets: tuple[str, ...]) -> dict[str, nn.Linear]:
    names = {name.rpartition(".")[2] for name in layers}
    for target in targets:
        if target not in names:
            raise TrainerError(
                f"the model has no linear layer called {target}",
                where="trainer.lora_targets",
                expected=f"some of {', '.join(sorted(names))}",
                nearest=nearest(target, sorted(names)),
            )
    chosen = {n: m for n, m in layers.items() if not targets or n.rpartition(".")[2] in targets}
    if not chosen:
        raise TrainerError("the model has no linear layer that an adapter could change")
    return chosen


def _told(change: LowRank | None) -> str:
    if change is None:
        return "no adapter"
    rank = len(change.down_RI)
    alpha = change.scale * rank
    return f"rank {rank} and alpha {alpha if not math.isclose(alpha, round(alpha)) else round(alpha):g}"
