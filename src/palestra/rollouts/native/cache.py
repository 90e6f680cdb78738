"""Keys and values of the running requests, in one preallocated tensor per layer.

Row r of a running batch owns slot r, so the running rows are always a prefix and
attention reads views, never copies. A slot is moved only when the row before it
ends. Memory is zero where nothing was written (masked positions are multiplied by
a weight of 0, and 0 times garbage could be nan) and is kept while rows run: it
grows only when a request needs more tokens than any before it. How much is
reserved changes no number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from palestra.models.config import ModelConfig

STRIDE = 16
"""Attention reads a multiple of this many positions: then its sums do not depend on the longest row."""
_FIRST_TOKENS = 128


class KVCache:
    """``keys[layer]`` and ``values[layer]`` are [slots * kv_heads, tokens, head_dim]."""

    def __init__(self, config: ModelConfig, *, slots: int, context: int, dtype: torch.dtype) -> None:
        self.slots = slots
        self.context = context
        self.tokens = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._config = config
        self._dtype = dtype

    @property
    def nbytes(self) -> int:
        """Reserved bytes; what is resident may be less."""
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def reserve(self, tokens: int, held: int) -> None:
        """Make room for ``tokens`` tokens in every slot; what the first ``held`` slots store stays."""
        if tokens <= self.tokens:
            return
        grown = max(tokens, min(2 * self.tokens, self.context), _FIRST_TOKENS)
        grown = -(-grown // STRIDE) * STRIDE
        rows = held * self._config.kv_heads
        for tensors in (self.keys, self.values):
            for layer in range(self._config.layers):
                fresh = self._zeros(grown)
                if self.tokens:
                    fresh[:rows, : self.tokens] = tensors[layer][:rows]
                    tensors[layer] = fresh
                else:
                    tensors.append(fresh)
        self.tokens = grown

    def write_prompt(self, layer: int, slot: int, keys_TKD: Tensor, values_TKD: Tensor) -> None:
        """Store a prompt's keys and values from position 0 of ``slot``."""
        heads = self._config.kv_heads
        at = slice(slot * heads, (slot + 1) * heads)
        self.keys[layer][at, : keys_TKD.shape[0]] = keys_TKD.transpose(0, 1)
        self.values[layer][at, : values_TKD.shape[0]] = values_TKD.transpose(0, 1)

    def token_places(self, positions: Sequence[int]) -> Tensor:
        """Row r's place for ``write_tokens`` at ``positions[r]``: indices over all places of a layer."""
        heads = self._config.kv_heads
        slots_N1 = torch.arange(len(positions) * heads).view(-1, heads)
        return (slots_N1 * self.tokens + torch.tensor(positions)[:, None]).view(-1)

    def write_tokens(self, layer: int, places: Tensor, keys_NKD: Tensor, values_NKD: Tensor) -> None:
        width = self._config.head_dim
        self.keys[layer].view(-1, width).index_copy_(0, places, keys_NKD.reshape(-1, width))
        self.values[layer].view(-1, width).index_copy_(0, places, values_NKD.reshape(-1, width))

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first ``tokens`` positions of one slot over another's."""
        heads = self._config.kv_heads
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                slots = tensor.view(-1, heads, self.tokens, self._config.head_dim)
                slots[target, :, :tokens] = slots[source, :, :tokens]

    def clear(self, slot: int) -> None:
        """Zero a slot: after a row whose numbers were not finite."""
        heads = self._config.kv_heads
        for tensor in (*self.keys, *self.values):
            tensor[slot * heads : (slot + 1) * heads].zero_()

    def release(self) -> None:
        """Give the memory back."""
        self.keys, self.values, self.tokens = [], [], 0

    def _zeros(self, tokens: int) -> Tensor:
        # numpy allocates with calloc: fresh pages come zeroed from the kernel, when they are first touched.
        shape = (self.slots * self._config.kv_heads, tokens, self._config.head_dim)
        if self._dtype == torch.float32:
            return torch.from_numpy(np.zeros(shape, np.float32))
        return torch.from_numpy(np.zeros(shape, np.uint16)).view(self._dtype)
