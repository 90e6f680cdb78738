"""Keys and values of the requests that run: pools of slots, one pool per slot size, under one budget.

A request gets a slot that holds all it may ever need, so what was admitted always
finishes, and a long request never makes a short one read its length. A pool's
slots in use are always a prefix of it, those that decode before those whose prompt
is still being computed, so attention reads views and never gathers. A slot is
moved only when one before it becomes free. Where attention reads beyond a request's
length, what lies there is zero: it is multiplied by a weight of 0, and 0 times an
earlier request's nan would be nan. Which slot a request has changes no number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from palestra.models.config import ModelConfig

STRIDE = 16
"""Attention reads a multiple of this many positions: then its sums do not depend on the longest row."""
SMALLEST = 128
"""Positions of the smallest slot; the others are its doubles."""
FIRST_SLOTS = 8
"""Slots that a pool begins with, and below which it is not worth growing by doubling."""


class Owner(Protocol):
    """Who has a slot."""

    slot: int
    """Kept up to date by the pool."""

    @property
    def stored(self) -> int:
        """How many positions of the slot hold something."""
        ...


T = TypeVar("T", bound=Owner)


class Pool(Generic[T]):
    """Slots of one size: ``keys[layer]`` and ``values[layer]`` are [slots * kv_heads, capacity, head_dim]."""

    def __init__(
        self,
        config: ModelConfig,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        reads_beyond: bool = True,
    ) -> None:
        """``reads_beyond``: whether attention reads more positions than a request stores."""
        self.capacity = capacity
        self.slots = 0
        self.owners: list[T] = []
        self.decoding = 0
        """How many owners, from the first, have their whole prompt in their slot."""
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._config = config
        self._dtype = dtype
        self._device = device
        self._reads_beyond = reads_beyond
        self._touched = 0
        """Slots, from the first, that somebody has had."""

    def enter(self, owner: T) -> None:
        """Give ``owner`` the next free slot."""
        owner.slot = len(self.owners)
        self.owners.append(owner)
        if owner.slot < self._touched:
            self._wipe(owner.slot, 0)
        self._touched = max(self._touched, len(self.owners))

    def promote(self, owner: T) -> None:
        """``owner``'s prompt is complete: it decodes from now on."""
        if owner.slot != self.decoding:
            self._swap(owner.slot, self.decoding)
        self.decoding += 1

    def leave(self, owner: T) -> None:
        """Free its slot; the last of its kind moves into it, and the very last into that one's."""
        hole = owner.slot
        if hole < self.decoding:
            self.decoding -= 1
            self._move(self.decoding, hole)
            hole = self.decoding
        self._move(len(self.owners) - 1, hole)
        self.owners.pop()

    def resize(self, slots: int) -> None:
        """Have ``slots`` slots, at least as many as there are owners; what they store stays."""
        held, span = len(self.owners), max((owner.stored for owner in self.owners), default=0)
        rows = held * self._config.kv_heads
        for tensors in (self.keys, self.values):
            for layer in range(self._config.layers):
                fresh = self._zeros(slots)
                if self.slots:
                    fresh[:rows, :span] = tensors[layer][:rows, :span]
                    tensors[layer] = fresh
                else:
                    tensors.append(fresh)
        self.slots = slots
        self._touched = held

    def write(self, layer: int, slot: int, start: int, keys_TKD: Tensor, values_TKD: Tensor) -> None:
        """Store keys and values of consecutive positions from ``start``."""
        at, span = self._rows(slot), slice(start, start + keys_TKD.shape[0])
        self.keys[layer][at, span] = keys_TKD.transpose(0, 1)
        self.values[layer][at, span] = values_TKD.transpose(0, 1)

    def read(self, layer: int, slot: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Views of the first ``tokens`` positions: keys and values [kv_heads, tokens, D]."""
        at = self._rows(slot)
        return self.keys[layer][at, :tokens], self.values[layer][at, :tokens]

    def token_places(self, positions: Sequence[int]) -> Tensor:
        """Slot r's place for ``write_tokens`` at ``positions[r]``: indices over all places of a layer."""
        heads = self._config.kv_heads
        slots_N1 = torch.arange(len(positions) * heads).view(-1, heads)
        return (slots_N1 * self.capacity + torch.tensor(positions)[:, None]).view(-1).to(self._device)

    def write_tokens(self, layer: int, places: Tensor, keys_NKD: Tensor, values_NKD: Tensor) -> None:
        width = self._config.head_dim
        self.keys[layer].view(-1, width).index_copy_(0, places, keys_NKD.reshape(-1, width))
        self.values[layer].view(-1, width).index_copy_(0, places, values_NKD.reshape(-1, width))

    def copied(self, slot: int, tokens: int) -> Tensor:
        """A copy of the first ``tokens`` positions: [2, layers, kv_heads, tokens, D], keys then values."""
        at = self._rows(slot)
        sides = [torch.stack([t[at, :tokens] for t in tensors]) for tensors in (self.keys, self.values)]
        return torch.stack(sides)

    def paste(self, slot: int, copy_2LKTD: Tensor, tokens: int) -> None:
        """Store the first ``tokens`` positions of what `copied` returned."""
        at = self._rows(slot)
        for tensors, copy_LKTD in zip((self.keys, self.values), copy_2LKTD, strict=True):
            for tensor, copy_KTD in zip(tensors, copy_LKTD, strict=True):
                tensor[at, :tokens] = copy_KTD[:, :tokens]

    def fill_from(self, other: Pool[T], source: int, target: int, tokens: int) -> None:
        """Copy the first ``tokens`` positions of ``other``'s slot ``source`` over our ``target``."""
        to, of = self._rows(target), other._rows(source)
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for layer in range(self._config.layers):
                mine[layer][to, :tokens] = theirs[layer][of, :tokens]

    def _rows(self, slot: int) -> slice:
        return slice(slot * self._config.kv_heads, (slot + 1) * self._config.kv_heads)

    def _wipe(self, slot: int, start: int) -> None:
        """Zero a slot from position ``start`` on, if attention may read there."""
        if self._reads_beyond:
            for tensor in (*self.keys, *self.values):
                tensor[self._rows(slot), start:].zero_()

    def _move(self, source: int, target: int) -> None:
        if source == target:
            return
        mover = self.owners[source]
        self.fill_from(self, source, target, mover.stored)
        self._wipe(target, mover.stored)
        self.owners[target] = mover
        mover.slot = target

    def _swap(self, one: int, other: int) -> None:
        held, saved = self.owners[other], self.copied(other, self.owners[other].stored)
        self._move(one, other)
        self.paste(one, saved, held.stored)
        self._wipe(one, held.stored)
        self.owners[one] = held
        held.slot = one

    def _zeros(self, slots: int) -> Tensor:
        shape = (slots * self._config.kv_heads, self.capacity, self._config.head_dim)
        if self._device.type != "cpu":
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        # numpy allocates with calloc: fresh pages come zeroed from the kernel, when they are first touched.
        if self._dtype == torch.float32:
            return torch.from_numpy(np.zeros(shape, np.float32))
        return torch.from_numpy(np.zeros(shape, np.uint16)).view(self._dtype)


class KVCache(Generic[T]):
    """All pools of one engine. ``budget`` is how many positions may be reserved in all."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        context: int,
        budget: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        reads_beyond: bool = True,
    ) -> None:
        """``reads_beyond``: as of `Pool`."""
        self._reads_beyond = reads_beyond
        self.pools: dict[int, Pool[T]] = {}
        self.budget = budget
        self._config = config
        self._context = -(-context // STRIDE) * STRIDE
        self._dtype = dtype
        self._device = device or torch.device("cpu")

    @property
    def reserved(self) -> int:
        """Positions that the pools hold; what is resident may be less."""
        return sum(pool.slots * pool.capacity for pool in self.pools.values())

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for pool in self.pools.values() for t in (*pool.keys, *pool.values))

    def capacity(self, tokens: int) -> int:
        """The size of the slot that a request of ``tokens`` positions gets."""
        size = SMALLEST
        while size < tokens:
            size *= 2
        return min(size, self._context)

    def place(self, tokens: int, elsewhere: int) -> Pool[T] | None:
        """A pool with a free slot for ``tokens`` positions; None where the budget has no room for one.

        ``elsewhere`` is how much of the budget others hold. Idle slots of other sizes are given up for it.
        """
        capacity = self.capacity(tokens)
        pool = self.pools.get(capacity)
        if pool is not None and len(pool.owners) < pool.slots:
            return pool
        slots = pool.slots if pool else 0
        wanted = max(slots, FIRST_SLOTS)
        room = (self.budget - elsewhere - self.reserved) // capacity
        if room < 1:
            self._give_up_idle(capacity)
            room = (self.budget - elsewhere - self.reserved) // capacity
        if room < 1:
            return None
        pool = self.pools.setdefault(
            capacity, Pool(self._config, capacity, self._dtype, self._device, reads_beyond=self._reads_beyond)
        )
        pool.resize(slots + min(wanted, room))
        return pool

    def release(self) -> None:
        """Give back the memory of pools that nobody uses."""
        self.pools = {size: pool for size, pool in self.pools.items() if pool.owners}

    def _give_up_idle(self, but: int) -> None:
        self.release()
        for size, pool in self.pools.items():
            if size != but and len(pool.owners) < pool.slots:
                pool.resize(len(pool.owners))
