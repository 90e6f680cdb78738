"""One version's weights in the layout the decode loop computes with.

Tensors come in under their Hugging Face names in any order; each is checked,
hashed as received, converted and put into its place in a fused tensor (query,
key and value; gate and up). Nothing serves from here before every tensor has
arrived. Two sets of buffers are kept and used in turn, so staging allocates only
once and never touches the weights that serve; prepacked copies live as long as
their version. At most two versions are alive at any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from palestra.errors import WeightsError, nearest
from palestra.models.config import ModelConfig
from palestra.rollouts.native.linears import Linear, LinearOps
from palestra.types import Manifest, TensorEntry

DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
}
"""The types a tensor may arrive in, as safetensors writes them."""


class Store(Protocol):
    """Where a version's plain buffers live: the same tensor for the same key, every time."""

    def __getitem__(self, key: str, /) -> Tensor: ...

    def __setitem__(self, key: str, value: Tensor, /) -> None: ...

    def __contains__(self, key: object, /) -> bool: ...


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
    nbytes: int


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
    config: ModelConfig,
    ops: LinearOps,
    manifest: Manifest,
    tensors: Iterable[tuple[str, Tensor]],
    store: Store,
) -> tuple[Weights, str]:
    """The weights and the manifest digest computed from the bytes received.

    Writes into ``store``, which is garbage after an exception. Raises WeightsError
    for a tensor that is unknown, given twice, of another shape or type, or missing.
    """
    where = f"weights {manifest.version}"
    loader = _Loader(config, ops, store)
    entries: list[TensorEntry] = []
    seen: set[str] = set()
    for name, tensor in tensors:
        part = _checked(loader.parts, name, tensor, seen, where)
        seen.add(name)
        plain = tensor.detach().cpu().contiguous()
        entries.append(_entry(name, plain))
        loader.put(part, plain)
    missing = [name for name in loader.parts if name not in seen]
    if missing:
        raise WeightsError(
            f"{len(missing)} of {len(loader.parts)} tensors are missing, first {missing[0]}",
            where=where,
            expected="every tensor of the model, once",
        )
    return loader.finish(), Manifest.digest_of(entries)


def _checked(parts: dict[str, Part], name: str, tensor: Tensor, seen: set[str], where: str) -> Part:
    part = parts.get(name)
    if part is None:
        tied = name == "lm_head.weight"
        raise WeightsError(
            f"the model has no tensor named {name}",
            where=where,
            expected="the head under the input embedding's name: they are tied" if tied else "",
            nearest="model.embed_tokens.weight" if tied else nearest(name, parts),
        )
    if name in seen:
        raise WeightsError(f"{name} was given twice", where=where, expected="every tensor once")
    if tuple(tensor.shape) != part.shape:
        raise WeightsError(
            f"{name} has shape {list(tensor.shape)}", where=where, expected=f"shape {list(part.shape)}"
        )
    if tensor.dtype not in DTYPE_NAMES:
        raise WeightsError(
            f"{name} has type {tensor.dtype}",
            where=where,
            expected=f"one of {', '.join(str(t).removeprefix('torch.') for t in DTYPE_NAMES)}",
        )
    return part


def _entry(name: str, tensor: Tensor) -> TensorEntry:
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    digest = xxhash.xxh3_128_hexdigest(data.data)
    return TensorEntry(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), data.nbytes, digest)


class _Loader:
    """Fuses parts into buffers, and packs a buffer as soon as its last part has come."""

    def __init__(self, config: ModelConfig, ops: LinearOps, store: Store) -> None:
        self.parts = plan(config)
        self._config = config
        self._ops = ops
        self._store = store
        self._rows: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for part in self.parts.values():
            rows = max(self._rows.get(part.key, 0), part.first_row + part.shape[0])
            self._rows[part.key] = rows
            self._shapes[part.key] = (rows, *part.shape[1:])
        self._scratch: dict[tuple[int, ...], list[Tensor]] = {}
        self._open: dict[str, Tensor] = {}
        self._linears: dict[str, Linear] = {}

    def put(self, part: Part, tensor: Tensor) -> None:
        buffer = self._buffer(part.key)
        buffer[part.first_row : part.first_row + part.shape[0]].copy_(tensor)
        self._rows[part.key] -= part.shape[0]
        if self._rows[part.key] == 0 and self._is_linear(part.key):
            self._linears[part.key] = self._ops.make(buffer)
            scratch = self._open.pop(part.key, None)
            if scratch is not None:
                self._scratch.setdefault(self._shapes[part.key], []).append(scratch)

    def finish(self) -> Weights:
        embedding = self._store["embedding"]
        head = self._linears.get("head") or self._ops.make(embedding)
        layers = tuple(
            Layer(
                input_norm=self._store[f"{i}.input_norm"],
                qkv=self._linears[f"{i}.qkv"],
                output=self._linears[f"{i}.output"],
                post_norm=self._store[f"{i}.post_norm"],
                gate_up=self._linears[f"{i}.gate_up"],
                down=self._linears[f"{i}.down"],
            )
            for i in range(self._config.layers)
        )
        linears = [linear for key, linear in self._linears.items() if key not in self._store]
        plain = [self._store[key] for key in self._shapes if key in self._store]
        if head.owns_memory and "head" not in self._linears:
            linears.append(head)
        nbytes = sum(linear.nbytes for linear in linears) + sum(t.nbytes for t in plain)
        return Weights(embedding, layers, self._store["norm"], head, nbytes)

    @staticmethod
    def _is_linear(key: str) -> bool:
        return key.rpartition(".")[2] in ("qkv", "output", "gate_up", "down", "head")

    def _buffer(self, key: str) -> Tensor:
        """The plain buffer of ``key``: kept in the store, or borrowed until the linear is packed."""
        if not (self._ops.packed and self._is_linear(key)):
            if key not in self._store:
                self._store[key] = torch.empty(self._shapes[key], dtype=self._ops.dtype)
            return self._store[key]
        if key not in self._open:
            free = self._scratch.get(self._shapes[key])
            shape = self._shapes[key]
            self._open[key] = free.pop() if free else torch.empty(shape, dtype=self._ops.dtype)
        return self._open[key]
