"""Which tokens top-k and top-p keep: the one definition that sampling and training share.

Top-k keeps every token whose logit is at least the k-th largest. Top-p then
looks at the distribution renormalised over those and keeps the smallest set of
most probable ones whose probabilities sum to at least ``top_p``: the token that
crosses it is kept. So equal logits are kept or left out together, and the most
probable token always stays. Temperature comes before both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CANDIDATES = 1024
"""How many of the largest logits top-p looks at before it sorts the whole vocabulary."""


def least_kept(logits_RV: Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> Tensor:
    """For each row, the logit below which tokens are left out; -inf where all stay.

    ``top_k`` 0 and ``top_p`` 1 are off, row by row.
    """
    floor_R = _top_k_floor(logits_RV, top_k)
    if min(top_p) < 1:
        limited_RV = logits_RV.masked_fill(logits_RV < floor_R[:, None], -torch.inf)
        floor_R = torch.maximum(floor_R, _top_p_floor(limited_RV, top_p))
    return floor_R


def _top_k_floor(logits_RV: Tensor, top_k: Sequence[int]) -> Tensor:
    rows, vocab = logits_RV.shape
    width = max((k for k in top_k if k < vocab), default=0)
    if not width:
        return torch.full((rows,), -torch.inf)
    largest_RW = logits_RV.topk(width, dim=-1).values
    off_R = torch.tensor([not 0 < k < vocab for k in top_k])
    ranks_R = torch.tensor(top_k).clamp(1, width) - 1
    return largest_RW.gather(1, ranks_R[:, None])[:, 0].masked_fill(off_R, -torch.inf)


def _top_p_floor(logits_RV: Tensor, top_p: Sequence[float]) -> Tensor:
    vocab = logits_RV.shape[1]
    off_R = torch.tensor([p >= 1 for p in top_p])
    mass_R1 = torch.tensor(top_p, dtype=torch.float64).masked_fill(off_R, 0)[:, None]
    normaliser_R1 = torch.logsumexp(logits_RV.double(), dim=-1, keepdim=True)
    for width in (min(CANDIDATES, vocab), vocab):
        largest_RW = logits_RV.topk(width, dim=-1).values
        short_RW = (largest_RW.double() - normaliser_R1).exp().cumsum(dim=-1) < mass_R1
        if not short_RW[:, -1].any():
            break  # most distributions reach it within the candidates: no need to sort the vocabulary
    last_R1 = short_RW.sum(dim=-1, keepdim=True).clamp(max=width - 1)
    return largest_RW.gather(1, last_R1)[:, 0].masked_fill(off_R, -torch.inf)
