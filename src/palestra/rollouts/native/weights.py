"""One version's weights in the layout the decode loop computes with.

Tensors come in under their Hugging Face names in any order; each is checked,
hashed as received, converted and put into its place in a fused tensor (query,
key and value; gate and up). A version exists only if every tensor has arrived
and every byte is the one its manifest announced. It lives in memory of its own,
so staging one never touches the one that serves, and a version nobody uses
leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from palestra.errors import WeightsError, nearest
from palestra.models.config import ModelConfig
from palestra.models.tensors import DTYPE_NAMES, entry_of
from palestra.rollouts.native.linears import BiasedLinear, DenseLinear, Linear, LinearOps, PackedLinear
from palestra.types import Manifest, TensorEntry

_LINEARS = ("qkv", "output", "gate_up", "down", "router", "head")


@dataclass(frozen=True, slots=True)
class Part:
    """Where one Hugging Face tensor goes: rows ``first_row`` onwards of the buffer ``key``."""

    key: str
    first_row: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FeedForward:
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Experts:
    """Feed-forwards of which each row chooses some, and the product that it chooses by."""

    router: Linear
    members: tuple[FeedForward, ...]
    ops: LinearOps


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: Tensor
    qkv: Linear
    head_norm: Tensor | None
    """One row for each query head, then one for each key head: [heads + kv_heads, D]."""
    output: Linear
    post_norm: Tensor
    mlp: FeedForward | Experts


@dataclass(frozen=True, slots=True)
class Weights:
    """A complete version, ready to compute with."""

    embedding_VH: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear


def plan(config: ModelConfig) -> dict[str, Part]:
    """Every tensor the model has, under its Hugging Face name, and its place."""
    hidden = config.hidden_size
    parts = {"model.embed_tokens.weight": Part("embedding", 0, (config.vocab_size, hidden))}
    for i in range(config.layers):
        at = f"model.layers.{i}"
        parts[f"{at}.input_layernorm.weight"] = Part(f"{i}.input_norm", 0, (hidden,))
        parts |= _attention_parts(config, i, f"{at}.self_attn")
        parts[f"{at}.post_attention_layernorm.weight"] = Part(f"{i}.post_norm", 0, (hidden,))
        if i in config.sparse_layers:
            parts[f"{at}.mlp.gate.weight"] = Part(f"{i}.router", 0, (config.experts, hidden))
            for e in range(config.experts):
                parts |= _mlp_parts(
                    config, f"{i}.{e}.", f"{at}.mlp.experts.{e}", config.moe_intermediate_size
                )
        else:
            parts |= _mlp_parts(config, f"{i}.", f"{at}.mlp", config.intermediate_size)
    parts["model.norm.weight"] = Part("norm", 0, (hidden,))
    if not config.tied_embeddings:
        parts["lm_head.weight"] = Part("head", 0, (config.vocab_size, hidden))
    return parts


def _attention_parts(config: ModelConfig, i: int, at: str) -> dict[str, Part]:
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = config.heads * dim, config.kv_heads * dim
    parts = _matrix(f"{at}.q_proj", f"{i}.qkv", 0, (queries, hidden), config.qkv_bias)
    parts |= _matrix(f"{at}.k_proj", f"{i}.qkv", queries, (keys, hidden), config.qkv_bias)
    parts |= _matrix(f"{at}.v_proj", f"{i}.qkv", queries + keys, (keys, hidden), config.qkv_bias)
    parts |= _matrix(f"{at}.o_proj", f"{i}.output", 0, (hidden, queries), config.output_bias)
    if config.qk_norm:
        parts[f"{at}.q_norm.weight"] = Part(f"{i}.q_norm", 0, (dim,))
        parts[f"{at}.k_norm.weight"] = Part(f"{i}.k_norm", 0, (dim,))
    return parts


def _mlp_parts(config: ModelConfig, key: str, at: str, inner: int) -> dict[str, Part]:
    hidden, bias = config.hidden_size, config.mlp_bias
    return {
        **_matrix(f"{at}.gate_proj", f"{key}gate_up", 0, (inner, hidden), bias),
        **_matrix(f"{at}.up_proj", f"{key}gate_up", inner, (inner, hidden), bias),
        **_matrix(f"{at}.down_proj", f"{key}down", 0, (hidden, inner), bias),
    }


def _matrix(name: str, key: str, first_row: int, shape: tuple[int, int], bias: bool) -> dict[str, Part]:
    parts = {f"{name}.weight": Part(key, first_row, shape)}
    if bias:
        parts[f"{name}.bias"] = Part(f"{key}_bias", first_row, shape[:1])
    return parts


def load(
    config: ModelConfig, ops: LinearOps, manifest: Manifest, tensors: Iterable[tuple[str, Tensor]]
) -> tuple[Weights, str]:
    """The weights, and the manifest digest computed from the bytes received.

    Raises WeightsError for a tensor that is unknown, given twice, of another shape or
    type, or missing, and where the bytes received are not those of ``manifest``.
    """
    where = f"weights {manifest.version}"
    loader = _Loader(config, ops)
    received: dict[str, TensorEntry] = {}
    for name, tensor in tensors:
        part = _checked(loader.parts, name, tensor, received, where)
        plain = tensor.detach().cpu().contiguous()
        received[name] = entry_of(name, plain)
        loader.put(part, plain)
    missing = [name for name in loader.parts if name not in received]
    if missing:
        raise WeightsError(
            f"{len(missing)} of {len(loader.parts)} tensors are missing, first {missing[0]}",
            where=where,
            expected="every tensor of the model, once",
        )
    _check_bytes(manifest, received, where)
    return loader.finish(), Manifest.digest_of(tuple(received.values()))


def _check_bytes(manifest: Manifest, received: dict[str, TensorEntry], where: str) -> None:
    announced = {entry.name: entry for entry in manifest.tensors}
    names = [*received, *announced]
    different = next((name for name in names if received.get(name) != announced.get(name)), None)
    if different is not None:
        raise WeightsError(
            f"the bytes received for {different} are not those its manifest announced",
            where=where,
            expected=f"{announced.get(different, 'no such tensor')}",
            next_command="the same command again; if it repeats, the transport corrupts data",
        )


def _checked(
    parts: dict[str, Part], name: str, tensor: Tensor, received: dict[str, TensorEntry], where: str
) -> Part:
    part = parts.get(name)
    if part is None:
        tied = name == "lm_head.weight"
        raise WeightsError(
            f"the model has no tensor named {name}",
            where=where,
            expected="the head under the input embedding's name: they are tied" if tied else "",
            nearest="model.embed_tokens.weight" if tied else nearest(name, parts),
        )
    if name in received:
        raise WeightsError(f"{name} was given twice", where=where, expected="every tensor once")
    if tuple(tensor.shape) != part.shape:
        raise WeightsError(
            f"{name} has shape {list(tensor.shape)}", where=where, expected=f"shape {list(part.shape)}"
        )
    if not (tensor.is_floating_point() and tensor.dtype in DTYPE_NAMES):
        floats = [name for dtype, name in DTYPE_NAMES.items() if dtype.is_floating_point]
        raise WeightsError(
            f"{name} has type {tensor.dtype}", where=where, expected=f"one of {', '.join(floats)}"
        )
    return part


class _Loader:
    """Fuses parts into buffers; a linear is made, and its buffer let go, once its last part has come."""

    def __init__(self, config: ModelConfig, ops: LinearOps) -> None:
        self.parts = plan(config)
        self._config = config
        self._ops = ops
        self._missing_rows: dict[str, int] = {}
        for part in self.parts.values():
            self._missing_rows[part.key] = self._missing_rows.get(part.key, 0) + part.shape[0]
        self._buffers: dict[str, Tensor] = {}
        self._linears: dict[str, PackedLinear | DenseLinear] = {}

    def put(self, part: Part, tensor: Tensor) -> None:
        key = part.key
        if key not in self._buffers:
            shape = (self._missing_rows[key], *part.shape[1:])
            self._buffers[key] = torch.empty(shape, dtype=self._ops.dtype, device=self._ops.device)
        self._buffers[key][part.first_row : part.first_row + part.shape[0]].copy_(tensor)
        self._missing_rows[key] -= part.shape[0]
        if self._missing_rows[key] == 0 and key.rpartition(".")[2] in _LINEARS:
            self._linears[key] = self._ops.make(self._buffers.pop(key))

    def finish(self) -> Weights:
        embedding = self._buffers["embedding"]
        layers = tuple(self._layer(i) for i in range(self._config.layers))
        head = self._linears.get("head") or self._ops.make(embedding)
        return Weights(embedding, layers, self._buffers["norm"], head)

    def _layer(self, i: int) -> Layer:
        return Layer(
            input_norm=self._buffers[f"{i}.input_norm"],
            qkv=self._linear(f"{i}.qkv"),
            head_norm=self._head_norm(i) if self._config.qk_norm else None,
            output=self._linear(f"{i}.output"),
            post_norm=self._buffers[f"{i}.post_norm"],
            mlp=self._experts(i) if i in self._config.sparse_layers else self._feed_forward(f"{i}."),
        )

    def _experts(self, i: int) -> Experts:
        members = tuple(self._feed_forward(f"{i}.{e}.") for e in range(self._config.experts))
        return Experts(self._linear(f"{i}.router"), members, self._ops)

    def _feed_forward(self, key: str) -> FeedForward:
        return FeedForward(self._linear(f"{key}gate_up"), self._linear(f"{key}down"))

    def _linear(self, key: str) -> Linear:
        bias_O = self._buffers.get(f"{key}_bias")
        product = self._linears[key]
        return product if bias_O is None else BiasedLinear(product, bias_O)

    def _head_norm(self, i: int) -> Tensor:
        query_D, key_D = self._buffers[f"{i}.q_norm"], self._buffers[f"{i}.k_norm"]
        return torch.stack([query_D] * self._config.heads + [key_D] * self._config.kv_heads)
