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
from palestra.rollouts.native.linears import Linear, LinearOps
from palestra.types import Manifest, TensorEntry

_LINEARS = ("qkv", "output", "gate_up", "down", "head")


@dataclass(frozen=True, slots=True)
class Part:
    """Where one Hugging Face tensor goes: rows ``first_row`` onwards of the buffer ``key``."""

    key: str
    first_row: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: Tensor
    qkv: Linear
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """A complete version, ready to compute with."""

    embedding_VH: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear


def plan(config: ModelConfig) -> dict[str, Part]:
    """Every tensor the model has, under its Hugging Face name, and its place."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    parts = {"model.embed_tokens.weight": Part("embedding", 0, (config.vocab_size, hidden))}
    for i in range(config.layers):
        at = f"model.layers.{i}"
        parts |= {
            f"{at}.input_layernorm.weight": Part(f"{i}.input_norm", 0, (hidden,)),
            f"{at}.self_attn.q_proj.weight": Part(f"{i}.qkv", 0, (queries, hidden)),
            f"{at}.self_attn.k_proj.weight": Part(f"{i}.qkv", queries, (keys, hidden)),
            f"{at}.self_attn.v_proj.weight": Part(f"{i}.qkv", queries + keys, (keys, hidden)),
            f"{at}.self_attn.o_proj.weight": Part(f"{i}.output", 0, (hidden, queries)),
            f"{at}.post_attention_layernorm.weight": Part(f"{i}.post_norm", 0, (hidden,)),
            f"{at}.mlp.gate_proj.weight": Part(f"{i}.gate_up", 0, (inner, hidden)),
            f"{at}.mlp.up_proj.weight": Part(f"{i}.gate_up", inner, (inner, hidden)),
            f"{at}.mlp.down_proj.weight": Part(f"{i}.down", 0, (hidden, inner)),
        }
    parts["model.norm.weight"] = Part("norm", 0, (hidden,))
    if not config.tied_embeddings:
        parts["lm_head.weight"] = Part("head", 0, (config.vocab_size, hidden))
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
        self._linears: dict[str, Linear] = {}

    def put(self, part: Part, tensor: Tensor) -> None:
        key = part.key
        if key not in self._buffers:
            shape = (self._missing_rows[key], *part.shape[1:])
            self._buffers[key] = torch.empty(shape, dtype=self._ops.dtype)
        self._buffers[key][part.first_row : part.first_row + part.shape[0]].copy_(tensor)
        self._missing_rows[key] -= part.shape[0]
        if self._missing_rows[key] == 0 and key.rpartition(".")[2] in _LINEARS:
            self._linears[key] = self._ops.make(self._buffers.pop(key))

    def finish(self) -> Weights:
        embedding = self._buffers["embedding"]
        layers = tuple(
            Layer(
                input_norm=self._buffers[f"{i}.input_norm"],
                qkv=self._linears[f"{i}.qkv"],
                output=self._linears[f"{i}.output"],
                post_norm=self._buffers[f"{i}.post_norm"],
                gate_up=self._linears[f"{i}.gate_up"],
                down=self._linears[f"{i}.down"],
            )
            for i in range(self._config.layers)
        )
        head = self._linears.get("head") or self._ops.make(embedding)
        return Weights(embedding, layers, self._buffers["norm"], head)
