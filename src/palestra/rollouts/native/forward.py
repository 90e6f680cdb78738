"""The decoder as three functions over one version's weights: prompts into the cache, tokens in step, scores.

``prefill`` runs pieces of prompts packed end to end: the products see all tokens at
once, attention sees one piece at a time, with what the cache holds before it.
``step`` runs one token for every row that decodes. ``whole`` runs one sequence
without a cache. None keeps state. A sequence's numbers do not depend on its
neighbours (fp32, see `linears`), nor on how many pieces are computed at once, and
the functions agree with each other and with transformers to float32 rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from palestra.models.config import ModelConfig
from palestra.rollouts.native.adapters import RowAdapters
from palestra.rollouts.native.cache import STRIDE, Pool
from palestra.rollouts.native.layers import Model, mixed, normed, projected
from palestra.rollouts.native.weights import Weights

_SMALL_PRODUCT = 400
"""torch multiplies batches of matrices below this many multiplications with another kernel."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [N, heads, D], keys and values [N, kv_heads, D]) -> [N, heads * D]."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one prompt from position ``start``; the positions before are in its slot."""

    tokens: Sequence[int]
    start: int
    pool: Pool[Any]
    slot: int


@dataclass(frozen=True, slots=True)
class Lane:
    """The decoding rows of one pool, in slot order: each row's last token and its position."""

    pool: Pool[Any]
    tokens: Sequence[int]
    positions: Sequence[int]


def prefill(
    model: Model, weights: Weights, pieces: Sequence[Piece], adapters: RowAdapters | None = None
) -> Tensor:
    """The final hidden states of all pieces, end to end: [tokens, hidden]. Fills their slots.

    Pieces of one prompt must stand in order.
    """

    def attend(layer: int, queries_THD: Tensor, keys_TKD: Tensor, values_TKD: Tensor) -> Tensor:
        attended: list[Tensor] = []
        first = 0
        for piece in pieces:
            at = slice(first, first + len(piece.tokens))
            first = at.stop
            piece.pool.write(layer, piece.slot, piece.start, keys_TKD[at], values_TKD[at])
            if piece.start == 0:
                attended.append(_causal(queries_THD[at], keys_TKD[at], values_TKD[at]))
            else:
                seen = piece.pool.read(layer, piece.slot, piece.start + len(piece.tokens))
                attended.append(_continued(queries_THD[at], *seen))
        return torch.cat(attended) if len(attended) > 1 else attended[0]

    tokens = [token for piece in pieces for token in piece.tokens]
    positions = [p for piece in pieces for p in range(piece.start, piece.start + len(piece.tokens))]
    return _decoded(model, weights, tokens, positions, attend, adapters)


def whole(model: Model, weights: Weights, tokens: Sequence[int]) -> Tensor:
    """The final hidden states of one sequence: [tokens, hidden]."""

    def attend(_: int, queries_THD: Tensor, keys_TKD: Tensor, values_TKD: Tensor) -> Tensor:
        return _causal(queries_THD, keys_TKD, values_TKD)

    return _decoded(model, weights, tokens, range(len(tokens)), attend, None)


def step(
    model: Model, weights: Weights, lanes: Sequence[Lane], adapters: RowAdapters | None = None
) -> Tensor:
    """The logits after every row's token, lane after lane: [rows, vocab]. Keys and values go to the slots."""
    config, device = model.config, weights.embedding_VH.device
    places = [lane.pool.token_places(lane.positions) for lane in lanes]
    positions_LN = [torch.tensor(lane.positions, device=device) for lane in lanes]
    if model.kernels is None:
        seen_LN = [
            _span_mask(config, positions_N, _span(config, lane), weights.embedding_VH.dtype)
            for lane, positions_N in zip(lanes, positions_LN, strict=True)
        ]
    else:
        seen_LN = [positions_N + 1 for positions_N in positions_LN]

    def attend(layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor) -> Tensor:
        attended: list[Tensor] = []
        first = 0
        for lane, place, seen in zip(lanes, places, seen_LN, strict=True):
            at = slice(first, first + len(lane.tokens))
            first = at.stop
            lane.pool.write_tokens(layer, place, keys_NKD[at], values_NKD[at])
            keys, values = lane.pool.keys[layer], lane.pool.values[layer]
            if model.kernels is None:
                attended.append(_cached(config, queries_NHD[at], keys, values, seen))
            else:
                kv_heads = config.kv_heads
                attended.append(model.kernels.attention(queries_NHD[at], keys, values, seen, kv_heads))
        return torch.cat(attended) if len(attended) > 1 else attended[0]

    tokens = [token for lane in lanes for token in lane.tokens]
    positions = [position for lane in lanes for position in lane.positions]
    return logits(model, weights, _decoded(model, weights, tokens, positions, attend, adapters))


def logits(model: Model, weights: Weights, hidden_NH: Tensor) -> Tensor:
    """The head's output for each row of final hidden states: [rows, vocab]."""
    rows = hidden_NH.shape[0]
    missing = model.ops.padded(rows) - rows
    if missing:
        hidden_NH = torch.cat((hidden_NH, hidden_NH[:1].expand(missing, -1)))
    normed_NH = normed(hidden_NH, weights.norm, model.config.rms_norm_eps, model.kernels)
    return weights.head(normed_NH)[:rows]


def _decoded(
    model: Model,
    weights: Weights,
    tokens: Sequence[int],
    positions: Sequence[int],
    attend: Attend,
    adapters: RowAdapters | None,
) -> Tensor:
    """All layers over rows of one token each: [rows, hidden]."""
    rows, device = len(tokens), weights.embedding_VH.device
    padding = model.ops.padded(rows) - rows
    tokens_N = torch.tensor([*tokens, *[0] * padding], device=device)
    positions_N = torch.tensor([*positions, *[0] * padding], device=device)
    cos_N1D, sin_N1F = model.cos_P1D[positions_N], model.sin_P1F[positions_N]
    hidden_NH = weights.embedding_VH[tokens_N]
    for index, layer in enumerate(weights.layers):
        queries_NHD, keys_NKD, values_NKD = projected(
            model, layer, hidden_NH, cos_N1D, sin_N1F, index, adapters
        )
        attended_NE = attend(index, queries_NHD[:rows], keys_NKD[:rows], values_NKD[:rows])
        if padding:
            attended_NE = torch.cat((attended_NE, attended_NE.new_zeros(padding, attended_NE.shape[1])))
        hidden_NH = mixed(model, layer, hidden_NH, attended_NE, index, adapters)
    return hidden_NH[:rows]


def _causal(queries_THD: Tensor, keys_TKD: Tensor, values_TKD: Tensor) -> Tensor:
    """Causal attention within one sequence from its beginning: [T, heads * D]."""
    attended_1HTD = scaled_dot_product_attention(
        queries_THD.transpose(0, 1)[None],
        keys_TKD.transpose(0, 1)[None],
        values_TKD.transpose(0, 1)[None],
        is_causal=True,
        enable_gqa=queries_THD.shape[1] != keys_TKD.shape[1],
    )
    return attended_1HTD[0].transpose(0, 1).reshape(queries_THD.shape[0], -1)


def _continued(queries_THD: Tensor, keys_KSD: Tensor, values_KSD: Tensor) -> Tensor:
    """Causal attention of the last T of S positions over all of them: [T, heads * D]."""
    length, seen = queries_THD.shape[0], keys_KSD.shape[1]
    allowed_TS = torch.ones(length, seen, dtype=torch.bool, device=queries_THD.device).tril_(seen - length)
    attended_1HTD = scaled_dot_product_attention(
        queries_THD.transpose(0, 1)[None],
        keys_KSD[None],
        values_KSD[None],
        attn_mask=allowed_TS,
        enable_gqa=queries_THD.shape[1] != keys_KSD.shape[0],
    )
    return attended_1HTD[0].transpose(0, 1).reshape(length, -1)


def _span(config: ModelConfig, lane: Lane) -> int:
    """How many cached positions torch's attention reads for these rows.

    Multiples of ``STRIDE`` give every row the same sums whatever the longest row is.
    """
    group = config.heads // config.kv_heads * config.head_dim
    least = -(-_SMALL_PRODUCT // group)
    span = -(-max(max(lane.positions) + 1, least) // STRIDE) * STRIDE
    return min(span, lane.pool.capacity)


def _span_mask(config: ModelConfig, positions_N: Tensor, span: int, dtype: torch.dtype) -> Tensor:
    """0 up to each row's position and -inf after it, once per key-value head: [N * kv_heads, 1, span]."""
    hidden = torch.arange(span, device=positions_N.device)[None] > positions_N[:, None]
    mask_NS = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    mask_NS.masked_fill_(hidden, float("-inf"))
    return mask_NS.repeat_interleave(config.kv_heads, dim=0)[:, None]


def _cached(config: ModelConfig, queries_NHD: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention of one query per head over the cached positions: [N, heads * D].

    Query heads that share a key-value head form one small matrix, so each cached
    key is read once. Plain batched products: measured as fast as the fused kernel
    for this shape, and free of its dependence on how many rows there are.
    """
    pairs, _, span = mask.shape
    queries = queries_NHD.reshape(pairs, -1, config.head_dim)
    keys_t = keys[:pairs, :span].transpose(1, 2)
    scores = torch.baddbmm(mask, queries, keys_t, alpha=config.head_dim**-0.5)
    shares = torch.softmax(scores, dim=-1, dtype=torch.float32).to(queries.dtype)
    return torch.bmm(shares, values[:pairs, :span]).view(queries_NHD.shape[0], -1)
