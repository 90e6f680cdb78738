"""Loss and gradient equal TRL's implementation on the same tensors, for every algorithm that it has.

Runs where TRL is installed (the ``oracle`` extra); `test_losses.py` holds the same
formulas to a reference of our own everywhere.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from palestra.algorithms.aggregation import Aggregate, token_weights
from palestra.algorithms.corrections import Correction
from palestra.algorithms.losses import sequence_ratio, target_loss
from palestra.batches import LossSpec

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'palestra[oracle]'")
pytest.importorskip("accelerate", reason="TRL needs accelerate: pip install 'palestra[oracle]'")

LENGTHS = [7, 3, 1, 5, 7, 2]
LONGEST = 9


@dataclass(frozen=True)
class Case:
    spec: LossSpec
    aggregate: Aggregate
    theirs: dict[str, Any]
    trainer: str = "grpo"
    correction: str = "none"
    columns: tuple[str, ...] = field(default=("old_per_token_logps",))


def policy(**values: Any) -> LossSpec:
    return LossSpec("policy", 0.2, 0.28, **values)


CLIPS = {"epsilon_low": 0.2, "epsilon_high": 0.28}
REF = ("old_per_token_logps", "ref_per_token_logps")
RHO = ("old_per_token_logps", "importance_sampling_ratio")
CASES = {
    "grpo": Case(policy(), "sequence", {"loss_type": "grpo", **CLIPS}),
    "on policy": Case(policy(), "sequence", {"loss_type": "grpo", **CLIPS}, columns=()),
    "dapo": Case(policy(), "token", {"loss_type": "dapo", **CLIPS}),
    "dr_grpo": Case(policy(), "constant", {"loss_type": "dr_grpo", **CLIPS}),
    "two-sided delta": Case(policy(dual_clip=1.5), "token", {"loss_type": "dapo", "delta": 1.5, **CLIPS}),
    "gspo": Case(
        LossSpec("policy", 0.05, 0.06, ratio="sequence"), "sequence",
        {"loss_type": "grpo", "importance_sampling_level": "sequence",
         "epsilon_low": 0.05, "epsilon_high": 0.06},
    ),
    "luspo": Case(
        policy(ratio="sequence"), "sum",
        {"loss_type": "luspo", "importance_sampling_level": "sequence", **CLIPS},
    ),
    "cispo": Case(
        LossSpec("cispo", 1.0, 0.3), "token", {"loss_type": "cispo", "epsilon_high": 1.3}
    ),
    "sapo": Case(LossSpec("sapo"), "sequence", {"loss_type": "sapo"}),
    "rloo": Case(policy(ratio="product"), "sum", CLIPS, trainer="rloo", columns=("old_logps",)),
    "kl": Case(
        policy(kl_coef=0.3), "sequence", {"loss_type": "grpo", "beta": 0.3, **CLIPS}, columns=REF
    ),
    "kl, corrected by the ratio": Case(
        policy(kl_coef=0.3, kl_ratio_corrected=True), "token",
        {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": True, **CLIPS}, columns=REF,
    ),
    "tis": Case(policy(), "token", {"loss_type": "dapo", **CLIPS}, correction="tis:1.2", columns=RHO),
    "icepop": Case(
        policy(), "token", {"loss_type": "dapo", **CLIPS}, correction="icepop:0.8:1.2", columns=RHO
    ),
    "sequence tis": Case(
        policy(), "sequence", {"loss_type": "grpo", **CLIPS}, correction="tis-sequence:1.2", columns=RHO
    ),
    "sequence mis": Case(
        policy(), "token", {"loss_type": "dapo", **CLIPS}, correction="mis:0.7:1.4", columns=RHO
    ),
    "cispo and tis": Case(
        LossSpec("cispo", 1.0, 0.3), "token", {"loss_type": "cispo", "epsilon_high": 1.3},
        correction="tis:1.2", columns=RHO,
    ),
    "kl beside tis": Case(
        policy(kl_coef=0.3), "token", {"loss_type": "dapo", "beta": 0.3, **CLIPS}, correction="tis:1.2",
        columns=(*REF, "importance_sampling_ratio"),
    ),
    "off-policy sequence mask": Case(
        policy(), "token",
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.1, **CLIPS},
        correction=f"negatives:{math.exp(-0.1)}:1",
        columns=("old_per_token_logps", "sampling_per_token_logps"),
    ),
}  # fmt: skip


def tensors(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), max(LENGTHS))
    old = -2 * torch.rand(shape, generator=draw, dtype=torch.float64) - 0.1
    rows = {"old": old, "advantages": torch.randn(len(LENGTHS), generator=draw, dtype=torch.float64)}
    for name, spread in (("logprobs", 0.3), ("ref", 0.5), ("sampler", 0.2)):
        rows[name] = old + spread * torch.randn(shape, generator=draw, dtype=torch.float64)
    return rows


def expected_rho(case: Case, rows: dict[str, Tensor], mask: Tensor) -> Tensor:
    """TRL's ratio, as it is computed where rollouts are scored."""
    if "importance_sampling_ratio" not in case.columns:
        return torch.ones(1)
    difference = (rows["old"] - rows["sampler"]) * mask
    kind, _, limits = case.correction.partition(":")
    low, high = ([0.0, *map(float, limits.split(":"))])[-2:]
    if kind in ("tis-sequence", "mis"):
        difference = difference.sum(-1, keepdim=True)
    rho = difference.exp()
    if kind in ("tis", "tis-sequence"):
        return rho.clamp(max=high)
    return torch.where((rho < low) | (rho > high), 0.0, rho)


def theirs(case: Case, rows: dict[str, Tensor], mask: Tensor) -> tuple[float, Tensor]:
    from helpers.trl_oracle import trl_loss

    given = {
        "old_per_token_logps": rows["old"],
        "old_logps": (rows["old"] * mask).sum(1),
        "ref_per_token_logps": rows["ref"],
        "sampling_per_token_logps": rows["sampler"],
        "importance_sampling_ratio": expected_rho(case, rows, mask),
    }
    columns = {"advantages": rows["advantages"], **{name: given[name] for name in case.columns}}
    leaf = rows["logprobs"].clone().requires_grad_()
    settings = {
        **case.theirs,
        "max_completion_length": LONGEST,
        "use_vllm": "importance_sampling_ratio" in columns,
    }
    # TRL's mask looks at the present logprobs, ours at those before the step: compared at its start.
    if "sampling_per_token_logps" in columns:
        leaf = rows["old"].clone().requires_grad_()
    loss = trl_loss(case.trainer, leaf, mask, columns, **settings)
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.item(), grad[mask]


def ours(case: Case, rows: dict[str, Tensor], mask: Tensor) -> tuple[float, Tensor]:
    ids = torch.tensor([row for row, length in enumerate(LENGTHS) for _ in range(length)])
    normalizers = torch.tensor(token_weights(LENGTHS, case.aggregate, LONGEST), dtype=torch.float64)[ids]
    weights = rows["advantages"][ids] * normalizers
    logprobs, old, ref, sampler = (rows[name][mask] for name in ("logprobs", "old", "ref", "sampler"))
    correction = Correction.parse(case.correction)
    if correction is not None:
        found = correction.factors(old.tolist(), sampler.tolist(), ids.tolist(), weights.tolist())
        weights = weights * torch.tensor(found.factors_N, dtype=torch.float64)
    if "sampling_per_token_logps" in case.columns:
        logprobs = old
    before = old if case.columns else None
    leaf = logprobs.clone().requires_grad_()
    terms, _ = target_loss(
        case.spec, leaf, before, weights,
        sequence=sequence_ratio(case.spec.ratio, ids, None if before is None else logprobs - before),
        ref_logprobs_N=ref, kl_weights_N=normalizers,
    )  # fmt: skip
    (grad,) = torch.autograd.grad(terms.sum(), leaf)
    return terms.sum().item(), grad


@pytest.mark.parametrize(("name", "seed"), list(itertools.product(CASES, range(3))))
def test_loss_and_gradient_equal_trl(name: str, seed: int) -> None:
    case, rows = CASES[name], tensors(seed)
    mask = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]
    value, gradient = ours(case, rows, mask)
    expected, expected_gradient = theirs(case, rows, mask)
    assert value == pytest.approx(expected, rel=1e-6, abs=1e-7)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-7)
    assert gradient.abs().sum() > 0
