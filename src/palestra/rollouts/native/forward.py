"""The Llama decoder as two functions over one version's weights: prompts in bulk, tokens in step.

``prompts`` runs whole sequences packed end to end: the products see all tokens at
once, attention sees one sequence at a time. ``step`` runs one token for every
running row. Neither keeps state; keys and values go to the cache they are given.
A sequence's numbers do not depend on its neighbours (fp32, see `linears`), and the
two functions agree with each other and with transformers to float32 rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from palestra.models.config import ModelConfig
from palestra.rollouts.native.cache import STRIDE, KVCache
from palestra.rollouts.native.layers import Model, mixed, normed, projected
from palestra.rollouts.native.weights import Weights

_SMALL_PRODUCT = 400
"""torch multiplies batches of matrices below this many multiplications with another kernel."""


def prompts(
    model: Model,
    weights: Weights,
    sequences: Sequence[Sequence[int]],
    cache: KVCache | None = None,
    slots: Sequence[int] = (),
) -> Tensor:
    """The final hidden states of all sequences, end to end: [tokens, hidden].

    With a cache, sequence i's keys and values are written to ``slots[i]``.
    """
    config = model.config
    lengths = [len(sequence) for sequence in sequences]
    total = sum(lengths)
    padding = model.ops.padded(total) - total
    tokens_T = torch.tensor([t for s in sequences for t in s] + [0] * padding)
    positions_T = torch.cat([torch.arange(n) for n in lengths] + [torch.zeros(padding, dtype=torch.long)])
    cos_T1D, sin_T1F = model.cos_P1D[positions_T], model.sin_P1F[positions_T]
    hidden_TH = weights.embedding_VH[tokens_T]
    attended_TE = torch.zeros(total + padding, config.heads * config.head_dim, dtype=hidden_TH.dtype)
    for index, layer in enumerate(weights.layers):
        queries_THD, keys_TKD, values_TKD = projected(model, layer, hidden_TH, cos_T1D, sin_T1F)
        start = 0
        for order, length in enumerate(lengths):
            at = slice(start, start + length)
            attended_TE[at] = _causal(queries_THD[at], keys_TKD[at], values_TKD[at])
            if cache is not None:
                cache.write_prompt(index, slots[order], keys_TKD[at], values_TKD[at])
            start += length
        hidden_TH = mixed(config, layer, hidden_TH, attended_TE)
    return hidden_TH[:total]


def step(
    model: Model, weights: Weights, cache: KVCache, tokens: Sequence[int], positions: Sequence[int]
) -> Tensor:
    """The logits after row r's token at its position, whose keys and values go to slot r: [rows, vocab]."""
    config = model.config
    rows = len(tokens)
    padding = [0] * (model.ops.padded(rows) - rows)
    tokens_N = torch.tensor([*tokens, *padding])
    places = [*positions, *padding]
    positions_N = torch.tensor(places)
    cos_N1D, sin_N1F = model.cos_P1D[positions_N], model.sin_P1F[positions_N]
    write_at = cache.token_places(places)
    span = min(_span(config, max(positions) + 1), cache.tokens)
    mask = _span_mask(config, positions_N, span, weights.embedding_VH.dtype)
    hidden_NH = weights.embedding_VH[tokens_N]
    for index, layer in enumerate(weights.layers):
        queries_NHD, keys_NKD, values_NKD = projected(model, layer, hidden_NH, cos_N1D, sin_N1F)
        cache.write_tokens(index, write_at, keys_NKD, values_NKD)
        attended_NE = _cached(config, queries_NHD, cache.keys[index], cache.values[index], mask)
        hidden_NH = mixed(config, layer, hidden_NH, attended_NE)
    return logits(model, weights, hidden_NH)[:rows]


def logits(model: Model, weights: Weights, hidden_NH: Tensor) -> Tensor:
    """The head's output for each row of final hidden states: [rows, vocab]."""
    rows = hidden_NH.shape[0]
    missing = model.ops.padded(rows) - rows
    if missing:
        hidden_NH = torch.cat((hidden_NH, hidden_NH[:1].expand(missing, -1)))
    normed_NH = normed(hidden_NH, weights.norm, model.config.rms_norm_eps)
    return weights.head(normed_NH)[:rows]


def _causal(queries_THD: Tensor, keys_TKD: Tensor, values_TKD: Tensor) -> Tensor:
    """Causal attention within one sequence: [T, heads * D]."""
    attended_1HTD = scaled_dot_product_attention(
        queries_THD.transpose(0, 1)[None],
        keys_TKD.transpose(0, 1)[None],
        values_TKD.transpose(0, 1)[None],
        is_causal=True,
        enable_gqa=queries_THD.shape[1] != keys_TKD.shape[1],
    )
    return attended_1HTD[0].transpose(0, 1).reshape(queries_THD.shape[0], -1)


def _span(config: ModelConfig, positions: int) -> int:
    """How many cached positions attention reads where ``positions`` are filled.

    Multiples of ``STRIDE`` give every row the same sums whatever the longest row is.
    """
    group = config.heads // config.kv_heads * config.head_dim
    least = -(-_SMALL_PRODUCT // group)
    return -(-max(positions, least) // STRIDE) * STRIDE


def _span_mask(config: ModelConfig, positions_N: Tensor, span: int, dtype: torch.dtype) -> Tensor:
    """0 up to each row's position and -inf after it, once per key-value head: [N * kv_heads, 1, span]."""
    hidden = torch.arange(span)[None] > positions_N[:, None]
    mask_NS = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
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
