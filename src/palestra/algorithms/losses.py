"""The loss of each target, from its logprob and its weight; pure functions of tensors.

A loss is a sum over targets of one term each, and a term depends on nothing but
its own target: that is why packing, chunking and micro-batches cannot change
it, and why a caller may take the gradient with respect to a logprob before the
other logprobs exist. Weights already contain advantage and normaliser; nothing
here averages. A term that is clipped has a gradient of exactly 0, even where
its ratio overflows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from palestra.types import LossSpec


class TargetLoss(NamedTuple):
    terms_N: Tensor
    """Sums to the loss; differentiable in the logprobs."""
    clipped_N: Tensor
    """True where the clip was what decided the term."""


def target_loss(
    spec: LossSpec, logprobs_N: Tensor, old_logprobs_N: Tensor | None, weights_N: Tensor
) -> TargetLoss:
    """``spec``'s term for each target.

    ``policy``: ``-min(r w, clip(r, 1 - clip_low, 1 + clip_high) w)`` with
    ``r = exp(logprob - old)`` (PPO, arXiv:1707.06347; unequal sides are DAPO's
    clip-higher, arXiv:2503.14476). Without old logprobs r is exactly 1, with the
    gradient of the logprob. ``nll``: ``-w logprob``.
    """
    if spec.kind == "nll":
        return TargetLoss(-weights_N * logprobs_N, torch.zeros_like(weights_N, dtype=torch.bool))
    old = logprobs_N.detach() if old_logprobs_N is None else old_logprobs_N
    log_ratio = logprobs_N - old
    highest, lowest = 1 + spec.clip_high, 1 - spec.clip_low
    with torch.no_grad():
        above = (weights_N > 0) & (log_ratio > math.log(highest))
        below = (weights_N < 0) & (log_ratio < (math.log(lowest) if lowest > 0 else -math.inf))
        clipped = above | below
        bound = torch.where(above, weights_N.new_tensor(highest), weights_N.new_tensor(lowest))
    # The ratio of a clipped target is never formed: 0 times its overflow would be nan in the backward.
    ratio = torch.where(clipped, torch.zeros_like(log_ratio), log_ratio).exp()
    return TargetLoss(-weights_N * torch.where(clipped, bound, ratio), clipped)
