"""A GGUF file of the Llama architecture becomes a folder in Hugging Face layout.

Every tensor of the file is placed or the conversion stops: an unknown tensor, a
missing one, another shape, a scaled rotary embedding or an unknown tokenizer is an
error by name, so a folder that exists computes what the file computes. Quantised
weights are written as bfloat16 (the type such models are published in; the
quantisation error is far larger than its rounding); if any matrix is stored as
F32 or F16, everything is written as float32, which loses nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np
import torch

from palestra.errors import ModelSourceError, nearest
from palestra.models.gguf_tokenizer import write_tokenizer
from palestra.models.tensors import save_tensors

CONVERTER = 1
"""Rises when the same file would convert to other bytes; older conversions are then redone."""

_ARCHITECTURE = "llama"
_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BROKEN = (ValueError, IndexError, KeyError, TypeError, OSError, OverflowError, NotImplementedError)
"""What the GGUF reader raises on a file that is cut short or is something else."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """The sizes a GGUF file's metadata declares."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def of(self, hf_name: str) -> tuple[int, ...]:
        """The shape the tensor of this Hugging Face name must have."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        kind = hf_name.removesuffix(".weight").rsplit(".", 1)[-1]
        shapes: dict[str, tuple[int, ...]] = {
            "embed_tokens": (self.vocab, self.hidden),
            "lm_head": (self.vocab, self.hidden),
            "q_proj": (queries, self.hidden),
            "k_proj": (keys, self.hidden),
            "v_proj": (keys, self.hidden),
            "o_proj": (self.hidden, queries),
            "gate_proj": (self.inner, self.hidden),
            "up_proj": (self.inner, self.hidden),
            "down_proj": (self.hidden, self.inner),
        }
        return shapes.get(kind, (self.hidden,))


def convert_gguf(file: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Write config, tokenizer and weights of ``file`` into the existing ``folder``.

    Raises ModelSourceError; what ``folder`` then holds must not be used.
    """
    try:
        reader = gguf.GGUFReader(file)
        meta = {name: _value(part) for name, part in reader.fields.items()}
    except _BROKEN as error:
        raise ModelSourceError(
            f"{file.name} cannot be read as GGUF: {error}", where=str(file), expected="a complete GGUF file"
        ) from error
    _check_supported(meta, file)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    try:
        shape = _read_shape(meta, stored)
        names = _hf_names(stored, shape.layers, file)
        dtype = _dtype_on_disk(stored)
        say(f"converting {file.name} to safetensors ({len(names)} tensors)")
        tensors: dict[str, torch.Tensor] = {}
        for name, hf_name in names.items():
            tensors[hf_name] = _convert(stored[name], hf_name, shape).to(dtype)
        write_tokenizer(meta, folder, file)
        config = _config(meta, shape, tied="lm_head.weight" not in tensors, dtype=dtype)
    except _BROKEN as error:
        raise ModelSourceError(f"{file.name} is inconsistent: {error!r}", where=str(file)) from error
    _write_json(folder / "config.json", config)
    ends = {key: value for key, value in config.items() if key.endswith("_token_id")}
    _write_json(folder / "generation_config.json", ends)
    say("writing model.safetensors")
    save_tensors(folder, tensors)


def unpermute(rotary_rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of query and key rows.

    GGUF interleaves the two halves of each head (row 2i and 2i+1 rotate together);
    the Hugging Face layout keeps them apart (row i and i + head_dim/2).
    """
    rows, columns = rotary_rows.shape
    return rotary_rows.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _value(part: gguf.ReaderField) -> Any:
    """A metadata value in plain Python, for every gguf release that has ReaderField."""
    kind = part.types[-1]
    if kind == gguf.GGUFValueType.STRING:
        items: list[Any] = [bytes(part.parts[index]).decode("utf-8") for index in part.data]
    else:
        items = [item for index in part.data for item in part.parts[index].tolist()]
    return items if part.types[0] == gguf.GGUFValueType.ARRAY else items[0]


def _check_supported(meta: Mapping[str, Any], file: Path) -> None:
    found = meta.get("general.architecture")
    if found != _ARCHITECTURE:
        raise ModelSourceError(
            f"the GGUF architecture {found!r} is not supported", where=str(file), expected=repr(_ARCHITECTURE)
        )
    scaling = meta.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelSourceError(
            f"{file.name} asks for {scaling!r} scaling of rotary positions, which is not supported",
            where=str(file),
            expected="plain rotary positions",
        )


def _read_shape(meta: Mapping[str, Any], stored: Mapping[str, gguf.ReaderTensor]) -> _Shape:
    heads, hidden = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    head_dim = meta.get("llama.attention.key_length", hidden // heads)
    rotary = meta.get("llama.rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise ValueError(f"rotary positions on {rotary} of {head_dim} dimensions of a head")
    return _Shape(
        layers=meta["llama.block_count"],
        hidden=hidden,
        inner=meta["llama.feed_forward_length"],
        heads=heads,
        kv_heads=meta.get("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab=int(stored["token_embd.weight"].shape[-1]),
    )


def _hf_names(stored: Mapping[str, Any], layers: int, file: Path) -> dict[str, str]:
    """GGUF name -> Hugging Face name; every tensor on either side must have its partner."""
    names = dict(_OUTER_NAMES)
    for layer in range(layers):
        for short, long in _LAYER_NAMES.items():
            names[f"blk.{layer}.{short}.weight"] = f"model.layers.{layer}.{long}.weight"
    if "output.weight" not in stored:
        del names["output.weight"]
    unknown = sorted(set(stored) - set(names))
    missing = sorted(set(names) - set(stored))
    if unknown or missing:
        raise ModelSourceError(
            f"{file.name} has the unknown tensor {unknown[0]}"
            if unknown
            else f"{file.name} lacks {missing[0]}",
            where=str(file),
            expected=f"the {len(names)} tensors of a plain Llama with {layers} layers",
            nearest=nearest(unknown[0], names) if unknown else "",
        )
    return names


def _dtype_on_disk(stored: Mapping[str, gguf.ReaderTensor]) -> torch.dtype:
    wide = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
    matrices = [tensor for tensor in stored.values() if len(tensor.shape) > 1]
    return torch.float32 if any(t.tensor_type in wide for t in matrices) else torch.bfloat16


def _convert(tensor: gguf.ReaderTensor, hf_name: str, shape: _Shape) -> torch.Tensor:
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    if values.shape != shape.of(hf_name):
        raise ValueError(f"{tensor.name} has shape {values.shape}, its metadata say {shape.of(hf_name)}")
    if hf_name.endswith("q_proj.weight"):
        values = unpermute(values, shape.heads)
    elif hf_name.endswith("k_proj.weight"):
        values = unpermute(values, shape.kv_heads)
    return torch.from_numpy(np.require(values, np.float32, ["C", "W"]))


def _config(meta: Mapping[str, Any], shape: _Shape, *, tied: bool, dtype: torch.dtype) -> dict[str, Any]:
    ids = {
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _as_written(meta["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _as_written(meta.get("llama.rope.freq_base", 10_000.0)),
        "max_position_embeddings": meta["llama.context_length"],
        "tie_word_embeddings": tied,
        "dtype": str(dtype).removeprefix("torch."),
    } | {key: value for key, value in ids.items() if value is not None}


def _as_written(single: float) -> float:
    """The short decimal behind a float32: 9.999999747378752e-06 was written as 1e-05."""
    return float(f"{single:.7g}")


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
