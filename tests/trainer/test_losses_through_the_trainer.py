"""Every declared loss, packed and cut, against sequences one by one in double precision."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from helpers.forest import double_model, naive_logprobs, naive_targets, random_groups
from helpers.naive_losses import naive_spec_loss
from helpers.tiny import make_tiny_model
from palestra.algorithms.packing import pack
from palestra.batches import Batch, LossSpec
from palestra.errors import TrainerError
from palestra.trainer.settings import TrainerSettings
from palestra.trainer.torch_trainer import TorchTrainer
from palestra.types import SamplingParams

SETTINGS = TrainerSettings(threads=1, micro_batch_tokens=10_000, grad_clip=0.0)
SPECS = {
    "policy": LossSpec(dual_clip=1.5),
    "policy and k3": LossSpec(kl_coef=0.3),
    "policy and corrected k3": LossSpec(kl_coef=0.3, kl_ratio_corrected=True),
    "policy and k3+": LossSpec(kl_coef=0.3, kl="k3+"),
    "gspo": LossSpec(ratio="sequence", clip_low=0.01, clip_high=0.01),
    "rloo": LossSpec(ratio="product", clip_low=0.5, clip_high=0.5),
    "cispo": LossSpec("cispo", clip_low=1.0, clip_high=0.3),
    "sapo": LossSpec("sapo"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1)


def noise(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Naive:
    batch: Batch
    model: LlamaForCausalLM
    logprobs: torch.Tensor
    weights: torch.Tensor
    old: torch.Tensor
    ref: torch.Tensor


@pytest.fixture(scope="module")
def naive(folder: Path) -> Naive:
    """The packed batch, and its logprobs from a forward of each target's own, still in autograd's graph."""
    groups = random_groups(7, groups=5, longest=5)
    members = [t for g in groups for t in g.rewarded]
    advantages = {t.id: 0.5 + n if n % 2 else -0.7 for n, t in enumerate(members)}
    batch = pack(groups, advantages, SamplingParams(temperature=0.8))
    assert batch is not None
    model, targets = double_model(folder), naive_targets(groups, advantages)
    logprobs = naive_logprobs(model, targets, 0.8)
    old = logprobs.detach() + 0.3 * noise(len(targets), 0)
    ref = logprobs.detach() + 0.3 * noise(len(targets), 1)
    weights = torch.tensor([t.weight for t in targets], dtype=torch.float64)
    batch = replace(
        batch,
        old_logprobs_N=array("f", old.tolist()),
        ref_logprobs_N=array("f", ref.tolist()),
        kl_weights_N=array("f", weights.abs().tolist()),
    )
    return Naive(batch, model, logprobs, weights, old, ref)


@pytest.mark.parametrize("micro_batch_tokens", [1, 45, 10_000])
@pytest.mark.parametrize("name", SPECS)
def test_loss_and_gradient_equal_the_papers_formula_for_every_split(
    folder: Path, naive: Naive, name: str, micro_batch_tokens: int
) -> None:
    """Case 11 (trl#4772, verl#2996, verl#6280): packing and splits change no sequence's ratio either."""
    spec = SPECS[name]
    ids = naive.batch.sequence_ids_N.tolist()
    loss = naive_spec_loss(
        spec, naive.logprobs, naive.old, naive.weights, ids, naive.ref, naive.weights.abs()
    )
    expected = torch.autograd.grad(loss, tuple(naive.model.parameters()), retain_graph=True)
    trainer = TorchTrainer(folder, replace(SETTINGS, micro_batch_tokens=micro_batch_tokens))
    report, found = gradients(trainer, naive.batch, spec)
    assert report.loss == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert (report.clip_fraction > 0) == (spec.kind in ("policy", "cispo"))
    difference = naive.logprobs.detach() - naive.ref
    assert report.kl_mean == pytest.approx(((-difference).exp() - 1 + difference).mean().item(), rel=1e-3)
    for (key, _), gradient in zip(naive.model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(found[key].double(), gradient, rtol=1e-4, atol=2e-6)


def gradients(trainer: TorchTrainer, batch: Batch, spec: LossSpec):
    optimizer, seen = trainer._prepare(), {}
    update = optimizer.update

    def spy(learning_rate: float, norm: float) -> None:
        seen.update({name: master.grad.clone() for name, master in trainer._masters.items()})
        update(learning_rate, norm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "update", spy)
        report = trainer.step(batch, spec, 0.0)
    return report, seen


def some_batch(folder: Path) -> tuple[TorchTrainer, Batch]:
    groups = random_groups(3)
    batch = pack(groups, {t.id: 1.0 for g in groups for t in g.rewarded}, SamplingParams())
    assert batch is not None
    return TorchTrainer(folder, SETTINGS), batch


@pytest.mark.parametrize("ratio", ["sequence", "product"])
def test_on_policy_a_sequences_ratio_is_exactly_one(folder: Path, ratio: str) -> None:
    """The trainer's own old logprobs and none at all give the same bits."""
    trainer, batch = some_batch(folder)
    spec = LossSpec(ratio=ratio, clip_low=0.0, clip_high=0.0)  # type: ignore[arg-type]
    old = replace(batch, old_logprobs_N=array("f", trainer.logprobs(batch)))
    reports = [gradients(trainer, made, spec) for made in (batch, old)]
    assert reports[0][0].clip_fraction == reports[1][0].clip_fraction == 0
    assert reports[0][0].loss == reports[1][0].loss
    for name, gradient in reports[0][1].items():
        assert torch.equal(gradient, reports[1][1][name])


def test_a_kl_term_without_reference_logprobs_is_refused_and_nothing_is_updated(folder: Path) -> None:
    trainer, batch = some_batch(folder)
    with pytest.raises(TrainerError, match="no reference logprobs"):
        trainer.step(batch, LossSpec(kl_coef=0.1), 1e-3)
    assert trainer.updates == 0
    assert trainer.step(batch, LossSpec(), 1e-3).kl_mean == 0.0
