"""LoRA adapters in PEFT's layout: parsed, checked against the model, and merged into its weights.

An adapter is a low-rank change of some weights: ``W + scale * B @ A``. Only what is
computed exactly is accepted: a setting that would change the mathematics is refused
by name, also one this module has never heard of, and so is a tensor that fits no
weight or a weight that the settings target and the file leaves out. Nothing is
applied in part: ``merged`` fails where a change finds no weight to change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from palestra.errors import ModelSourceError, WeightsError, nearest
from palestra.models.config import read_json

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_READ = {
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform"),
}
_WITHOUT_EFFECT = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
    *("qalora_group_size", "megatron_core"),
}
"""Of training, of the making of an adapter, or of a feature that another setting turns on."""
_KEEP_THE_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Ways to begin an adapter that leave the model's own weights as they are."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The change of one weight: ``scale * up @ down``."""

    down_RI: Tensor
    up_OR: Tensor
    scale: float

    def delta(self) -> Tensor:
        """The whole matrix [O, I], in fp32."""
        return (self.up_OR.float() @ self.down_RI.float()).mul_(self.scale)


def read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What ``folder`` holds, unchecked against any model; ModelSourceError if it is not an adapter."""
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            pickled = sorted(path.name for path in folder.glob("*.bin"))
            raise ModelSourceError(
                f"the adapter folder has no {name}",
                where=str(folder),
                expected=f"a LoRA adapter as PEFT saves it: {CONFIG}, {TENSORS}",
                nearest=f"{pickled[0]} (pickled weights are never opened; convert them)" if pickled else "",
            )
    try:
        return read_json(folder / CONFIG), load_file(folder / TENSORS)
    except (SafetensorError, OSError) as error:
        raise ModelSourceError(
            f"{TENSORS} is damaged or cut short: {error}",
            where=str(folder / TENSORS),
            expected="a complete safetensors file",
        ) from error


def parse_adapter(
    config: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]], shapes: Mapping[str, Sequence[int]]
) -> dict[str, LowRank]:
    """The adapter's changes, by the name of the weight they change, in the order of ``shapes``.

    ``shapes`` are the model's: every tensor under its Hugging Face name. Raises
    WeightsError for a setting, a tensor, a rank or a shape that does not fit.
    """
    _check_settings(config)
    halves = _halves(tensors, shapes)
    wanted = [name for name in shapes if _targetable(name) and _targeted(config, _module(name))]
    lost = next((name for name in wanted if name not in halves), None)
    if lost is not None or not wanted:
        raise _refused(
            f"the adapter's settings target {_module(lost)}, and it holds no tensors for it"
            if lost
            else "the adapter's settings target no weight of this model",
            f"target_modules = {config.get('target_modules')!r}",
        )
    extra = next((name for name in halves if name not in wanted), None)
    if extra is not None:
        raise _refused(
            f"the adapter holds tensors for {_module(extra)}, which its settings do not target",
            f"target_modules = {config.get('target_modules')!r}",
        )
    return {name: _low_rank(config, name, halves[name], tuple(shapes[name])) for name in wanted}


def merged(
    tensors: Iterable[tuple[str, Tensor]], changes: Mapping[str, LowRank]
) -> Iterator[tuple[str, Tensor]]:
    """``tensors`` with the changes added in fp32, each in its own type; one at a time, as they come.

    Raises WeightsError where a shape does not fit, and at the end if a change found no weight.
    """
    left = set(changes)
    for name, tensor in tensors:
        if name not in changes:
            yield name, tensor
            continue
        left.discard(name)
        delta_OI = changes[name].delta()
        if delta_OI.shape != tensor.shape:
            raise _refused(
                f"the adapter changes {name} as if its shape were {list(delta_OI.shape)}",
                f"shape {list(tensor.shape)}",
            )
        yield name, (tensor.float() + delta_OI.to(tensor.device)).to(tensor.dtype)
    if left:
        raise _refused(f"the adapter changes {min(left)}, which was not among the model's tensors")


def _refused(what: str, expected: str = "", near: str = "") -> WeightsError:
    return WeightsError(what, where="the LoRA adapter", expected=expected, nearest=near)


def _check_settings(config: Mapping[str, Any]) -> None:
    fixed = {"peft_type": ("LORA",), "bias": (None, "none"), "init_lora_weights": _KEEP_THE_BASE}
    for key, value in config.items():
        if key in fixed:
            allowed = fixed[key]
        elif key in _READ or key in _WITHOUT_EFFECT or not value:
            continue
        else:
            allowed = ("absent",)
        if value not in allowed:
            raise _refused(
                f"{CONFIG} sets {key} = {value!r}, which this package does not compute",
                f"{key} {' or '.join(map(str, allowed))}",
            )
    if config.get("peft_type") is None:
        raise _refused(f"{CONFIG} names no peft_type", "peft_type LORA")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not _is_number(alpha):
        raise _refused(f"{CONFIG} sets r = {rank!r}, lora_alpha = {alpha!r}", "a rank of 1 or more, a number")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _halves(
    tensors: Iterable[tuple[str, Tensor]], shapes: Mapping[str, Sequence[int]]
) -> dict[str, dict[str, Tensor]]:
    """For each weight the adapter changes, its ``lora_A`` and ``lora_B``."""
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        found = re.fullmatch(rf"{re.escape(_PREFIX)}(.+)\.(lora_[AB])\.weight", name)
        weight = f"{found[1]}.weight" if found else ""
        if found is None or not _targetable(weight) or weight not in shapes:
            known = [
                _PREFIX + _module(n) + f".lora_{h}.weight" for n in shapes if _targetable(n) for h in "AB"
            ]
            raise _refused(
                f"the adapter's tensor {name} fits no weight that an adapter may change here",
                f"{_PREFIX}(layer).lora_A.weight or lora_B, the layer one of {', '.join(_TARGETS)}"
                + (" (experts and routers cannot have adapters)" if ".mlp." in name else ""),
                nearest(name, known),
            )
        if tensor.dim() != 2 or not tensor.is_floating_point():
            raise _refused(
                f"{name} has shape {list(tensor.shape)} and type {tensor.dtype}", "a matrix of floats"
            )
        if found[2] in halves.setdefault(weight, {}):
            raise _refused(f"{name} was given twice", "every tensor once")
        halves[weight][found[2]] = tensor.detach()
    return halves


def _targetable(name: str) -> bool:
    return name.endswith(tuple(f".{target}.weight" for target in _TARGETS)) and ".experts." not in name


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _targeted(config: Mapping[str, Any], module: str) -> bool:
    """Whether PEFT would put an adapter there."""
    layers = config.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers
    number = re.search(r"\.(\d+)\.", module)
    if layers and (number is None or int(number[1]) not in layers):
        return False
    wanted = config.get("target_modules") or ()
    if isinstance(wanted, str) and wanted.lower() == "all-linear":
        return True
    return _named(wanted, module) and not _named(config.get("exclude_modules") or (), module)


def _named(wanted: str | Sequence[str], module: str) -> bool:
    """By a regular expression for the whole name, or by one of several last parts of it."""
    if isinstance(wanted, str):
        return _matches(wanted, module)
    return any(module == name or module.endswith(f".{name}") for name in wanted)


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.fullmatch(pattern, module) is not None
    except re.error as error:
        raise _refused(f"{CONFIG} holds {pattern!r}, which is no regular expression: {error}") from error


def _of(config: Mapping[str, Any], key: str, default: Any, module: str) -> Any:
    """The value of ``rank_pattern`` or ``alpha_pattern`` for ``module``: the first key that fits it."""
    patterns: Mapping[str, Any] = config.get(key) or {}
    found = next((p for p in patterns if _matches(rf"(?:.*\.)?(?:{p})", module)), None)
    return default if found is None else patterns[found]


def _low_rank(
    config: Mapping[str, Any], name: str, halves: Mapping[str, Tensor], shape: tuple[int, ...]
) -> LowRank:
    module = _module(name)
    rank = _of(config, "rank_pattern", config["r"], module)
    alpha = _of(config, "alpha_pattern", config["lora_alpha"], module)
    if not isinstance(rank, int) or rank < 1 or not _is_number(alpha):
        raise _refused(f"{CONFIG} gives {module} the rank {rank!r} and alpha {alpha!r}", "numbers")
    for half, expected in (("lora_A", (rank, shape[1])), ("lora_B", (shape[0], rank))):
        if half not in halves:
            raise _refused(f"the adapter holds no {half} for {module}", "both lora_A and lora_B")
        if tuple(halves[half].shape) != expected:
            raise _refused(
                f"{module}.{half} has shape {list(halves[half].shape)}",
                f"{list(expected)}: rank {rank} from {CONFIG}, and the model's {list(shape)}",
            )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LowRank(halves["lora_A"], halves["lora_B"], scale)
