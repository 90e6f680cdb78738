"""The losses as their papers write them: one sequence at a time, detached where the paper detaches.

Slow and plain on purpose: autograd goes through the sequence's ratio itself, so
the trick by which the trainer takes gradients target by target is not repeated here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from palestra.batches import LossSpec


def naive_spec_loss(
    spec: LossSpec,
    logprobs: Tensor,
    old: Tensor | None,
    weights: Tensor,
    sequence_ids: Sequence[int],
    ref: Tensor | None = None,
    kl_weights: Tensor | None = None,
) -> Tensor:
    """The sum over sequences; weights are constant within a sequence where its ratio is shared."""
    old = logprobs.detach() if old is None else old
    loss = logprobs.new_zeros(())
    for sequence in sorted(set(sequence_ids)):
        rows = [n for n, own in enumerate(sequence_ids) if own == sequence]
        loss = loss + _sequence_loss(spec, logprobs[rows], old[rows], weights[rows])
    if spec.kl_coef:
        assert ref is not None
        assert kl_weights is not None
        for n in range(len(sequence_ids)):
            term = _kl(spec.kl, logprobs[n] - ref[n])
            if spec.kl_ratio_corrected:
                term = term * (logprobs[n] - old[n]).exp()
            loss = loss + spec.kl_coef * kl_weights[n] * term
    return loss


def _sequence_loss(spec: LossSpec, lp: Tensor, old: Tensor, w: Tensor) -> Tensor:
    if spec.kind == "nll":
        return -(w * lp).sum()
    if spec.ratio == "product":
        return _clipped(spec, (lp.sum() - old.sum()).exp(), w[0])
    if spec.ratio == "sequence":
        ratio = (lp - old).mean().exp()
        return sum((_clipped(spec, ratio, weight) for weight in w), start=lp.new_zeros(()))
    loss = lp.new_zeros(())
    for logprob, before, weight in zip(lp, old, w, strict=True):
        ratio = (logprob - before).exp()
        if spec.kind == "policy":
            loss = loss + _clipped(spec, ratio, weight)
        elif spec.kind == "cispo":
            bounded = min(max(ratio.item(), 1 - spec.clip_low), 1 + spec.clip_high)
            loss = loss - bounded * weight * logprob
        else:
            sharpness = spec.temperature_positive if weight > 0 else spec.temperature_negative
            loss = loss - weight * 4 / sharpness / (1 + (-sharpness * (ratio - 1)).exp())
    return loss


def _clipped(spec: LossSpec, ratio: Tensor, weight: Tensor) -> Tensor:
    loss = torch.maximum(-ratio * weight, -ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high) * weight)
    if spec.dual_clip and weight < 0:
        loss = torch.minimum(loss, -spec.dual_clip * weight)
    return loss


def _kl(estimator: str, d: Tensor) -> Tensor:
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d**2
    k3 = (-d).exp() - 1 + d
    if estimator == "k3":
        return k3
    return k3.detach() + 0.5 * d**2 - (0.5 * d**2).detach()
