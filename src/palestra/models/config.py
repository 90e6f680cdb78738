"""What a model folder says about its architecture, checked before any weight is read.

Only what this package computes exactly is accepted: a plain Llama decoder. A
setting that would change the mathematics (scaled rotary positions, biases,
another activation) is refused by name rather than ignored, because a model that
loads and computes something slightly else is the worst of the outcomes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.errors import ModelSourceError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_NEUTRAL: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("hidden_act", ("silu",)),
    ("attention_bias", (False,)),
    ("mlp_bias", (False,)),
    ("quantization_config", (None,)),
)
"""Settings that must have one of these values if they are given at all."""


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

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read ``config.json``; ModelSourceError where it is absent, malformed or not supported."""
        path = folder / "config.json"
        raw = read_json(path)
        _check_supported(raw, path)
        missing = [key for key in _REQUIRED if not isinstance(raw.get(key), int)]
        if missing:
            raise ModelSourceError(f"config.json lacks {', '.join(missing)}", where=str(path))
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
                rope_theta=_rope_theta(raw, path),
                rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
                tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
                max_positions=int(raw.get("max_position_embeddings", 2048)),
                eos_token_ids=read_eos_token_ids(folder),
                bos_token_id=raw.get("bos_token_id"),
                dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
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
            raise ModelSourceError(
                f"config.json sets {key} = {raw[key]!r}, which this package does not compute",
                where=str(path),
                expected=f"{key} absent or {allowed[0]!r}",
            )


def _rope_theta(raw: Mapping[str, Any], path: Path) -> float:
    """From ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ModelSourceError(
            f"config.json asks for rotary positions of type {kind!r}, which this package does not compute",
            where=str(path),
            expected="plain rotary positions (rope_type 'default')",
        )
    return float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0)))
