"""Attention over a packed forest, equal to attention over each sequence alone.

A plan is made once per micro-batch and used by every layer. Roots are causal
blocks. Every other segment is a row of queries against its ancestors' keys and
its own, under a mask. Rows of like length share a block, so padding and masked
scores stay a small share of the work; a padded query's output is dropped and
its gradient is zero. No token's result depends on which block it fell into
beyond rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from palestra.batches import Batch

_MAX_WASTE = 1.25
"""A block's padded scores may exceed its real ones by this factor."""
_MAX_SCORES = 1 << 24
"""Scores of a block with more than one row: bounds the mask's memory."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One segment as queries: its own packed range, and the packed tokens of its ancestors."""

    start: int
    length: int
    context: tuple[int, ...]

    @property
    def keys(self) -> int:
        return len(self.context) + self.length


@dataclass(frozen=True, slots=True)
class _Block:
    rows: int
    queries: int
    """Padded queries per row."""
    own: slice
    """Where this block's padded queries (and own keys) lie among all padded rows."""
    context: Tensor | None
    """[rows * padded context] packed indices of the ancestors' keys; None for roots."""
    mask: Tensor | None
    """[rows, 1, queries, context + queries], True where a query sees a key; None is causal."""


class TreeAttention:
    """The plan for one batch; call it with packed queries, keys and values [T, heads, D]."""

    def __init__(self, batch: Batch) -> None:
        rows = _rows(batch)
        self.longest = max(row.keys for row in rows)
        """Tokens that one token can see at most, itself included."""
        packed: list[int] = []
        padding: list[int] = []
        self._blocks: list[_Block] = []
        roots = [row for row in rows if not row.context]
        others = [row for row in rows if row.context]
        for members in (*_blocks(roots), *_blocks(others)):
            start = len(packed)
            width = max(row.length for row in members)
            for row in members:
                packed.extend(range(row.start, row.start + row.length))
                padding.extend(range(len(packed), len(packed) + width - row.length))
                packed.extend([row.start] * (width - row.length))
            context, mask = _context(members, width)
            self._blocks.append(_Block(len(members), width, slice(start, len(packed)), context, mask))
        self._scatter = _Scatter(
            torch.tensor(packed), torch.tensor(padding, dtype=torch.int64), batch.token_count
        )

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float | None = None) -> Tensor:
        """[T, heads, D]; ``scale`` multiplies the scores, 1 / sqrt(D) if not given."""
        padded_queries = self._scatter.pad(queries)
        padded_keys, padded_values = self._scatter.pad(keys), self._scatter.pad(values)
        outputs: list[Tensor] = []
        for block in self._blocks:
            shape = (block.rows, block.queries, -1, queries.shape[-1])
            own = [x[block.own].view(shape) for x in (padded_queries, padded_keys, padded_values)]
            if block.context is not None:
                prefix = (block.rows, -1, keys.shape[1], keys.shape[2])
                own[1] = torch.cat((keys.index_select(0, block.context).view(prefix), own[1]), 1)
                own[2] = torch.cat((values.index_select(0, block.context).view(prefix), own[2]), 1)
            attended = functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in own),
                attn_mask=block.mask,
                is_causal=block.mask is None,
                scale=scale,
                enable_gqa=queries.shape[1] != keys.shape[1],
            )
            outputs.append(attended.transpose(1, 2).reshape(-1, *queries.shape[1:]))
        return self._scatter.unpad(torch.cat(outputs) if len(outputs) > 1 else outputs[0])


class _Scatter:
    """Packed tokens to padded rows and back, both as gathers: a scatter-add is never needed."""

    def __init__(self, packed_R: Tensor, padding: Tensor, tokens: int) -> None:
        self.packed_R = packed_R
        self.padding = padding
        real = torch.ones(len(packed_R), dtype=torch.bool)
        real[padding] = False
        rows = real.nonzero().squeeze(1)
        self.rows_T = torch.empty(tokens, dtype=torch.int64)
        self.rows_T[packed_R[rows]] = rows

    def pad(self, packed: Tensor) -> Tensor:
        return _Pad.apply(packed, self)  # type: ignore[return-value]  # autograd.Function is untyped

    def unpad(self, padded: Tensor) -> Tensor:
        return _Unpad.apply(padded, self)  # type: ignore[return-value]

    def gather_padded(self, packed: Tensor) -> Tensor:
        return packed.index_select(0, self.packed_R).index_fill_(0, self.padding, 0)

    def gather_packed(self, padded: Tensor) -> Tensor:
        return padded.index_select(0, self.rows_T)


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, scatter: _Scatter) -> Tensor:
        ctx.scatter = scatter
        return scatter.gather_padded(packed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.scatter.gather_packed(grads[0]), None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: Tensor, scatter: _Scatter) -> Tensor:
        ctx.scatter = scatter
        return scatter.gather_packed(padded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.scatter.gather_padded(grads[0]), None


def _rows(batch: Batch) -> list[_Row]:
    starts: list[int] = []
    for index, segment in enumerate(batch.segment_ids_T):
        if segment == len(starts):
            starts.append(index)
    stops = [*starts[1:], batch.token_count]
    contexts: list[tuple[int, ...]] = []
    rows: list[_Row] = []
    for segment, parent in enumerate(batch.segment_parents_S):
        above = () if parent < 0 else (*contexts[parent], *range(starts[parent], stops[parent]))
        contexts.append(above)
        rows.append(_Row(starts[segment], stops[segment] - starts[segment], above))
    return rows


def _blocks(rows: Iterable[_Row]) -> list[list[_Row]]:
    """Rows of like shape together: few kernels, little padding."""
    blocks: list[list[_Row]] = []
    width = depth = real = 0
    for row in sorted(rows, key=lambda row: (row.length, len(row.context)), reverse=True):
        scores = row.length * row.keys
        if blocks:
            wider, deeper = max(width, row.length), max(depth, len(row.context))
            padded = wider * (wider + deeper) * (len(blocks[-1]) + 1)
            if padded <= min(_MAX_WASTE * (real + scores), _MAX_SCORES):
                blocks[-1].append(row)
                width, depth, real = wider, deeper, real + scores
                continue
        blocks.append([row])
        width, depth, real = row.length, len(row.context), scores
    return blocks


def _context(members: Sequence[_Row], width: int) -> tuple[Tensor | None, Tensor | None]:
    depth = max(len(row.context) for row in members)
    if not depth:
        return None, None
    index = torch.tensor([(*row.context, *[row.context[0]] * (depth - len(row.context))) for row in members])
    lengths = torch.tensor([len(row.context) for row in members])
    sees_context = (torch.arange(depth) < lengths[:, None])[:, None, :].expand(-1, width, -1)
    sees_own = torch.ones(width, width, dtype=torch.bool).tril().expand(len(members), -1, -1)
    return index.flatten(), torch.cat((sees_context, sees_own), -1)[:, None]
