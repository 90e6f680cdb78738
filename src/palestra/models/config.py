"""What a model folder says about its architecture, checked before any weight is read.

Only what this package computes exactly is accepted: decoders of the Llama kind,
with the biases, norms, experts and scaled rotary positions of the named families.
A setting that would change the mathematics in another way is refused by name rather
than ignored, because a model that loads and computes something slightly else is the
worst of the outcomes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from palestra.errors import ModelSourceError

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_NEUTRAL: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("hidden_act", ("silu",)),
    ("use_sliding_window", (False, None)),
    ("partial_rotary_factor", (1, None)),
    ("quantization_config", (None,)),
)
"""Settings that must have one of these values if they are given at all."""
_ROPE_KEYS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"),
    *("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary positions are slowed, to reach further than the model was first trained for."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    """llama3: pairs that turn less often than this within the original positions are slowed by ``factor``."""
    high_freq_factor: float = 4.0
    """llama3: pairs that turn more often than this are left alone."""
    original_positions: int = 0

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise ValueError(f"the rotary factor is {self.factor}")
        if self.kind == "llama3" and not (
            0 < self.low_freq_factor < self.high_freq_factor and self.original_positions > 0
        ):
            raise ValueError(f"rotary positions cannot be scaled by {self}")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The architecture of one model folder, in this package's words."""

    architecture: str
    vocab_size: int
    """Rows of the embedding; may exceed the tokenizer's vocabulary."""
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    tied_embeddings: bool
    max_positions: int
    eos_token_ids: tuple[int, ...]
    """Tokens that end a completion; empty if neither generation_config.json nor config.json names one."""
    bos_token_id: int | None
    dtype: str
    """The weights' type on disk as config.json names it: float32, bfloat16, float16."""
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Each head's query and key are normed before they are rotated."""
    sparse_layers: frozenset[int] = frozenset()
    """Layers whose feed-forward is a choice of experts; the others have one of ``intermediate_size``."""
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    """Whether the chosen experts' shares are made to add up to 1."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "layers", "heads", "kv_heads", "head_dim", "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} attention heads cannot share {self.kv_heads} key-value heads evenly"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary positions need pairs")
        if self.sparse_layers and not (
            1 <= self.experts_per_token <= self.experts and self.moe_intermediate_size > 0
        ):
            raise ValueError(
                f"{self.experts_per_token} of {self.experts} experts of size {self.moe_intermediate_size}"
            )

    def beyond_llama(self) -> tuple[str, ...]:
        """What this model computes that a plain Llama does not, by field; rotary scaling is not among it."""
        fields = ("qkv_bias", "output_bias", "mlp_bias", "qk_norm", "sparse_layers")
        return tuple(name for name in fields if getattr(self, name))

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read ``config.json``; ModelSourceError where it is absent, malformed or not supported."""
        path = folder / "config.json"
        raw = read_json(path)
        _check_supported(raw, path)
        _require(raw, _REQUIRED, path)
        heads = raw["num_attention_heads"]
        try:
            return cls(
                architecture=raw["architectures"][0],
                vocab_size=raw["vocab_size"],
                hidden_size=raw["hidden_size"],
                intermediate_size=raw["intermediate_size"],
                layers=raw["num_hidden_layers"],
                heads=heads,
                kv_heads=raw.get("num_key_value_heads") or heads,
                head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
                rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
                tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
                max_positions=int(raw.get("max_position_embeddings", 2048)),
                eos_token_ids=read_eos_token_ids(folder),
                bos_token_id=raw.get("bos_token_id"),
                dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
                **_rope(raw, path),
                **_family(raw, path),
            )
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise ModelSourceError(f"config.json is inconsistent: {error}", where=str(path)) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; ModelSourceError if the file is absent or holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelSourceError(
            f"the model folder has no {path.name}",
            where=str(path.parent),
            expected="a model in Hugging Face layout: config.json, tokenizer.json, *.safetensors",
        ) from error
    except (OSError, ValueError) as error:
        raise ModelSourceError(f"{path.name} cannot be read as JSON: {error}", where=str(path)) from error
    if not isinstance(value, dict):
        raise ModelSourceError(f"{path.name} holds no JSON object", where=str(path))
    return value


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """The end tokens of ``generation_config.json``, else of ``config.json``, as one tuple."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            value = read_json(folder / name).get("eos_token_id")
            if value is not None:
                return tuple(value) if isinstance(value, list) else (value,)
    return ()


def _check_supported(raw: Mapping[str, Any], path: Path) -> None:
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in SUPPORTED_ARCHITECTURES:
        raise ModelSourceError(
            f"the architecture {', '.join(map(str, names)) or '(none named)'} is not supported",
            where=str(path),
            expected=f"one of {', '.join(SUPPORTED_ARCHITECTURES)}",
        )
    for key, allowed in _NEUTRAL:
        if key in raw and raw[key] not in allowed:
            raise _not_computed(f"{key} = {raw[key]!r}", f"{key} absent or {allowed[0]!r}", path)
    if raw.get("mlp_bias") and names[0] != "LlamaForCausalLM":
        raise _not_computed(
            f"mlp_bias = {raw['mlp_bias']!r} for {names[0]}", "mlp_bias absent or False", path
        )
    kinds = set(raw.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise _not_computed(
            f"layer_types with {min(map(str, kinds))!r}", "full_attention in every layer", path
        )


def _not_computed(setting: str, expected: str, path: Path) -> ModelSourceError:
    return ModelSourceError(
        f"config.json sets {setting}, which this package does not compute", where=str(path), expected=expected
    )


def _require(raw: Mapping[str, Any], keys: Iterable[str], path: Path) -> None:
    missing = [key for key in keys if not isinstance(raw.get(key), int)]
    if missing:
        raise ModelSourceError(f"config.json lacks {', '.join(missing)}", where=str(path))


def _family(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The fields in which the families differ."""
    architecture, biased = raw["architectures"][0], bool(raw.get("attention_bias"))
    if architecture == "LlamaForCausalLM":
        return {"qkv_bias": biased, "output_bias": biased, "mlp_bias": bool(raw.get("mlp_bias"))}
    if architecture == "Qwen2ForCausalLM":
        return {"qkv_bias": True}
    fields: dict[str, Any] = {"qk_norm": True, "qkv_bias": biased, "output_bias": biased}
    if architecture == "Qwen3MoeForCausalLM":
        experts = (
            "num_local_experts" if "num_local_experts" in raw else "num_experts"
        )  # transformers 5: either
        _require(raw, (experts, "num_experts_per_tok", "moe_intermediate_size"), path)
        step, dense = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or ()
        layers = range(raw["num_hidden_layers"]) if raw[experts] else ()
        fields |= {
            "sparse_layers": frozenset(i for i in layers if i not in dense and (i + 1) % step == 0),
            "experts": raw[experts],
            "experts_per_token": raw["num_experts_per_tok"],
            "moe_intermediate_size": raw["moe_intermediate_size"],
            "norm_topk_prob": bool(raw.get("norm_topk_prob", False)),
        }
    return fields


def _rope(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """From ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise TypeError(f"rotary positions are described by {rope!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise _not_computed(f"rotary positions of type {kind!r}", "default, linear or llama3", path)
    unknown = sorted(set(rope) - _ROPE_KEYS)
    if unknown or rope.get("partial_rotary_factor") not in (1, None):
        setting = f"{unknown[0]} for rotary positions" if unknown else "partial_rotary_factor"
        raise _not_computed(setting, "whole heads rotated, every layer alike", path)
    scaling = None
    try:
        if kind == "linear":
            scaling = RopeScaling("linear", float(rope["factor"]))
        elif kind == "llama3":
            scaling = RopeScaling(
                "llama3",
                float(rope["factor"]),
                float(rope["low_freq_factor"]),
                float(rope["high_freq_factor"]),
                int(rope["original_max_position_embeddings"]),
            )
    except KeyError as error:
        raise ModelSourceError(
            f"config.json lacks {error.args[0]} for rotary positions of type {kind!r}", where=str(path)
        ) from error
    theta = float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    return {"rope_theta": theta, "rope_scaling": scaling}
