"""The loss of each target, from its logprob and its weight; pure functions of tensors.

A loss is a sum over targets of one term each, and a term depends on nothing but
its own target and, at most, on its own sequence's ratio as a constant: that is
why packing, chunking and micro-batches cannot change it, and why a caller may
take the gradient with respect to a logprob before the other logprobs exist.
Weights already contain advantage and normaliser; nothing here averages. A term
that is clipped has a gradient of exactly 0, even where its ratio overflows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from palestra.batches import Estimator, LossSpec, Ratio

_LARGEST_LOG = 20.0
"""exp of more than this is cut off where the term is bounded anyway (SAPO's gate) or lost (k3)."""


class TargetLoss(NamedTuple):
    terms_N: Tensor
    """Sums to the loss; differentiable in the logprobs."""
    clipped_N: Tensor
    """True where a bound of the ratio was what decided the term."""


class SequenceRatio(NamedTuple):
    """What targets of one sequence share; a constant to the gradient."""

    log_N: Tensor
    share_N: Tensor
    """A term counts this much in the loss's value; its gradient is not touched."""


def sequence_ratio(ratio: Ratio, sequence_ids_N: Tensor, log_ratio_N: Tensor | None) -> SequenceRatio | None:
    """The ratio of each target's sequence; None where every token has its own.

    ``sequence``: the geometric mean of the tokens' ratios, GSPO's
    ``s = exp(sum(lp - old) / n)`` (arXiv:2507.18071). ``product``: the sequence's
    probability ratio ``exp(sum(lp - old))`` (RLOO, arXiv:2402.14740): one term per
    sequence, of which each of its n targets carries a share of 1/n.
    ``log_ratio_N`` None means that every ratio is 1.
    """
    if ratio == "token":
        return None
    _, sequence_N, length_S = torch.unique(sequence_ids_N, return_inverse=True, return_counts=True)
    length_N = length_S[sequence_N]
    if log_ratio_N is None:
        log_ratio_N = torch.zeros(len(sequence_ids_N))
    sum_S = log_ratio_N.new_zeros(len(length_S), dtype=torch.float64)
    sum_S.index_add_(0, sequence_N, log_ratio_N.detach().double())
    log_N = sum_S[sequence_N]
    if ratio == "sequence":
        return SequenceRatio((log_N / length_N).to(log_ratio_N.dtype), torch.ones_like(log_ratio_N))
    return SequenceRatio(log_N.to(log_ratio_N.dtype), (1 / length_N.double()).to(log_ratio_N.dtype))


def target_loss(
    spec: LossSpec,
    logprobs_N: Tensor,
    old_logprobs_N: Tensor | None,
    weights_N: Tensor,
    *,
    sequence: SequenceRatio | None = None,
    ref_logprobs_N: Tensor | None = None,
    kl_weights_N: Tensor | None = None,
) -> TargetLoss:
    """``spec``'s term for each target, with ``r = exp(logprob - old)``; r is 1 without old logprobs.

    ``policy``: ``-min(r w, clip(r, 1 - clip_low, 1 + clip_high) w)`` (PPO,
    arXiv:1707.06347; unequal sides are DAPO's clip-higher, arXiv:2503.14476), of
    which ``dual_clip`` bounds r where w < 0 (arXiv:1912.09729; INTELLECT-2's
    two-sided delta, arXiv:2505.07291, is the same). With ``spec.ratio`` other than
    ``token``, r is the sequence's as a constant times ``exp(lp - sg[lp])``: the
    gradient of GSPO. ``cispo``: ``-sg[clip(r)] w logprob`` (MiniMax-M1,
    arXiv:2506.13585). ``sapo``: ``-w (4 / T) sigmoid(T (r - 1))`` with one T for
    w > 0 and one for the rest (arXiv:2511.20347). ``nll``: ``-w logprob``.
    To each, `kl_estimate` times ``kl_coef`` and ``kl_weights_N`` is added where
    there are reference logprobs. Raises ValueError where a column is missing.
    """
    old = logprobs_N.detach() if old_logprobs_N is None else old_logprobs_N
    log_ratio_N = logprobs_N - old
    nothing = torch.zeros_like(weights_N, dtype=torch.bool)
    if spec.kind == "nll":
        found = TargetLoss(-weights_N * logprobs_N, nothing)
    elif spec.kind == "cispo":
        found = _cispo(spec, logprobs_N, log_ratio_N.detach(), weights_N)
    elif spec.kind == "sapo":
        found = TargetLoss(_sapo(spec, log_ratio_N, weights_N), nothing)
    else:
        if spec.ratio != "token":
            if sequence is None:
                raise ValueError(f"the ratio of a {spec.ratio} needs the sequences' ratios")
            log_ratio_N = sequence.log_N + (logprobs_N - logprobs_N.detach())
        found = _policy(spec, log_ratio_N, weights_N, sequence)
    if not spec.kl_coef:
        return found
    if ref_logprobs_N is None or kl_weights_N is None:
        raise ValueError("kl_coef is set, and there are no reference logprobs or no kl_weights_N")
    kl_N = kl_estimate(spec.kl, logprobs_N - ref_logprobs_N)
    if spec.kl_ratio_corrected:  # DeepSeek-V3.2, arXiv:2512.02556
        kl_N = kl_N * (logprobs_N - old).exp()
    return TargetLoss(found.terms_N + spec.kl_coef * kl_weights_N * kl_N, found.clipped_N)


def _policy(
    spec: LossSpec, log_ratio_N: Tensor, weights_N: Tensor, sequence: SequenceRatio | None
) -> TargetLoss:
    highest, lowest = 1 + spec.clip_high, 1 - spec.clip_low
    with torch.no_grad():
        above = (weights_N > 0) & (log_ratio_N > math.log(highest))
        below = (weights_N < 0) & (log_ratio_N < (math.log(lowest) if lowest > 0 else -math.inf))
        bound = torch.where(above, weights_N.new_tensor(highest), weights_N.new_tensor(lowest))
        clipped = above | below
        if spec.dual_clip:
            far = (weights_N < 0) & (log_ratio_N > math.log(spec.dual_clip))
            bound[far] = spec.dual_clip
            clipped |= far
    # The ratio of a clipped target is never formed: 0 times its overflow would be nan in the backward.
    ratio = torch.where(clipped, torch.zeros_like(log_ratio_N), log_ratio_N).exp()
    chosen = torch.where(clipped, bound, ratio)
    if sequence is not None and spec.ratio == "product":
        chosen = chosen + (sequence.share_N - 1) * chosen.detach()
    return TargetLoss(-weights_N * chosen, clipped)


def _cispo(spec: LossSpec, logprobs_N: Tensor, log_ratio_N: Tensor, weights_N: Tensor) -> TargetLoss:
    ratio = log_ratio_N.exp()
    bounded = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    return TargetLoss(-bounded * weights_N * logprobs_N, bounded != ratio)


def _sapo(spec: LossSpec, log_ratio_N: Tensor, weights_N: Tensor) -> Tensor:
    ratio = log_ratio_N.clamp(max=_LARGEST_LOG).exp()
    sharpness = torch.where(
        weights_N > 0,
        weights_N.new_tensor(spec.temperature_positive),
        weights_N.new_tensor(spec.temperature_negative),
    )
    return -weights_N * 4 / sharpness * torch.sigmoid(sharpness * (ratio - 1))


def kl_estimate(estimator: Estimator, difference_N: Tensor) -> Tensor:
    """KL(policy || reference) of each token from ``d = lp - ref`` (Schulman 2020, joschu.net/blog/kl-approx).

    ``k1``: d, ``k2``: d^2 / 2, ``k3``: exp(-d) - 1 + d (GRPO's). ``k3+`` has k3's
    value and k2's gradient, whose expectation is the KL's own. As a loss term k1's
    gradient has expectation 0: it measures, and does not hold the policy.
    """
    if estimator == "k1":
        return difference_N
    k2_N = difference_N.square() / 2
    if estimator == "k2":
        return k2_N
    k3_N = (-difference_N).clamp(max=_LARGEST_LOG).exp() + difference_N - 1
    return k3_N if estimator == "k3" else k2_N + (k3_N - k2_N).detach()
