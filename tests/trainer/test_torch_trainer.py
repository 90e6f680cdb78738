"""An update equals the unpacked definition in double precision, however the batch is cut."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.forest import (
    TASK,
    double_model,
    naive_logprobs,
    naive_loss,
    naive_targets,
    random_advantages,
    random_groups,
    trajectory,
)
from helpers.tiny import make_tiny_model
from palestra.algorithms.packing import pack
from palestra.batches import Batch, LossSpec
from palestra.errors import ModelSourceError, TrainerError
from palestra.trainer.settings import TrainerSettings
from palestra.trainer.torch_trainer import TorchTrainer
from palestra.types import Group, SamplingParams

SETTINGS = TrainerSettings(threads=1, micro_batch_tokens=10_000, grad_clip=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1)


def packed(groups: list[Group], advantages: dict[str, float], temperature: float = 1.0) -> Batch:
    batch = pack(groups, advantages, SamplingParams(temperature=temperature))
    assert batch is not None
    return batch


def some_batch(seed: int = 5, temperature: float = 1.0) -> Batch:
    groups = random_groups(seed)
    return packed(groups, random_advantages(groups, seed), temperature)


def gradients(trainer: TorchTrainer, batch: Batch, spec: LossSpec) -> dict[str, torch.Tensor]:
    """What one step accumulates; a learning rate of 0 leaves the masters alone."""
    return step_and_gradients(trainer, batch, spec, 0.0)


def step_and_gradients(
    trainer: TorchTrainer, batch: Batch, spec: LossSpec, rate: float
) -> dict[str, torch.Tensor]:
    """One step, and the gradients as the optimiser found them: afterwards they are gone."""
    optimizer, seen = trainer._prepare(), {}
    update = optimizer.update

    def spy(learning_rate: float, norm: float) -> None:
        seen.update({name: master.grad.clone() for name, master in trainer._masters.items()})
        update(learning_rate, norm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "update", spy)
        trainer.step(batch, spec, rate)
    return seen


def with_old(batch: Batch, old: torch.Tensor) -> Batch:
    return replace(batch, old_logprobs_N=array("f", old.tolist()))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprobs_agree_with_transformers(folder: Path, temperature: float) -> None:
    """Case 10 (trl#4159, NeMo-RL PR#316, OpenRLHF PR#853): temperature applied on one side only."""
    groups = random_groups(2)
    advantages = {t.id: 1.0 for g in groups for t in g.rewarded}
    found = TorchTrainer(folder, SETTINGS).logprobs(packed(groups, advantages, temperature))
    with torch.no_grad():
        expected = naive_logprobs(double_model(folder), naive_targets(groups, advantages), temperature)
    torch.testing.assert_close(torch.tensor(found).double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("spec", [LossSpec(), LossSpec("nll")], ids=["policy", "nll"])
@pytest.mark.parametrize("on_policy", [True, False])
def test_loss_and_gradient_equal_sequences_one_by_one_in_double_precision(
    folder: Path, spec: LossSpec, on_policy: bool
) -> None:
    """Case 11 (trl#4772, verl#2996): packing, shared prompts and left-out trajectories change no gradient."""
    groups = random_groups(7)
    advantages = random_advantages(groups, 7)
    batch = packed(groups, advantages, 0.8)
    model = double_model(folder)
    targets = naive_targets(groups, advantages)  # zero advantages included
    logprobs = naive_logprobs(model, targets, 0.8)
    noise = 0.4 * torch.randn(len(targets), generator=torch.Generator().manual_seed(0)).double()
    old = None if on_policy else logprobs.detach() + noise
    weights = torch.tensor([t.weight for t in targets], dtype=torch.float64)
    loss = naive_loss(spec, logprobs, old, weights)
    loss.backward()
    if old is not None:
        batch = with_old(batch, old[weights != 0])
    trainer = TorchTrainer(folder, SETTINGS)
    report = trainer.step(batch, spec, 0.0)
    assert report.loss == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    found = gradients(trainer, batch, spec)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name].double(), parameter.grad, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("micro_batch_tokens", [1, 20, 45, 10_000])
@pytest.mark.parametrize("spec", [LossSpec(), LossSpec("nll")], ids=["policy", "nll"])
def test_no_micro_batch_split_changes_loss_gradient_or_logprobs(
    folder: Path, micro_batch_tokens: int, spec: LossSpec
) -> None:
    """Case 11 (verl#6280): the ratio depended on the micro-batch size."""
    batch = some_batch(11)
    whole = TorchTrainer(folder, SETTINGS)
    old = torch.tensor(whole.logprobs(batch)) + 0.3 * torch.randn(
        batch.target_count, generator=torch.Generator().manual_seed(3)
    )
    batch = with_old(batch, old)
    cut = TorchTrainer(folder, replace(SETTINGS, micro_batch_tokens=micro_batch_tokens))
    assert cut.logprobs(batch) == pytest.approx(whole.logprobs(batch), abs=1e-5)
    a, b = whole.step(batch, spec, 0.0), cut.step(batch, spec, 0.0)
    assert b.loss == pytest.approx(a.loss, rel=1e-5, abs=1e-7)
    assert b.clip_fraction == a.clip_fraction
    assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)
    left, right = gradients(whole, batch, spec), gradients(cut, batch, spec)
    for name, gradient in left.items():
        torch.testing.assert_close(right[name], gradient, rtol=1e-4, atol=1e-6)


def test_logprobs_come_in_the_order_of_the_batch_however_it_is_cut(folder: Path) -> None:
    batch = some_batch(4)
    names = ("predictors_N", "targets_N", "weights_N", "sampler_logprobs_N", "sequence_ids_N")
    turned = replace(batch, **{name: getattr(batch, name)[::-1] for name in names})
    trainer = TorchTrainer(folder, replace(SETTINGS, micro_batch_tokens=8))
    assert trainer.logprobs(turned) == pytest.approx(trainer.logprobs(batch)[::-1], abs=1e-6)


def test_nll_falls_when_the_same_sequences_are_trained(folder: Path) -> None:
    batch = packed(
        [Group("g", TASK, (trajectory("a", [((1, 2, 3), False), ((9, 8, 7, 6), True)]),))], {"a": 1.0}
    )
    trainer = TorchTrainer(folder, replace(SETTINGS, grad_clip=1.0))
    losses = [trainer.step(batch, LossSpec("nll"), 5e-3).loss for _ in range(12)]
    assert losses[-1] < 0.2 * losses[0]
    assert trainer.updates == 12


def test_a_policy_step_makes_good_samples_likelier_and_bad_ones_rarer(folder: Path) -> None:
    good = trajectory("good", [((1, 2, 3), False), ((9, 8, 7), True)])
    bad = trajectory("bad", [((1, 2, 3), False), ((50, 60), True)])
    batch = packed([Group("g", TASK, (good, bad))], {"good": 1.0, "bad": -1.0})
    trainer = TorchTrainer(folder, replace(SETTINGS, grad_clip=1.0))
    before = trainer.logprobs(batch)
    assert trainer.step(batch, LossSpec(), 1e-3).applied
    change = [b - a for a, b in zip(before, trainer.logprobs(batch), strict=True)]
    assert all(c > 0 for c in change[:3])
    assert all(c < 0 for c in change[3:])


def test_the_report_says_what_the_batch_and_the_samplers_logprobs_were(folder: Path) -> None:
    trainer = TorchTrainer(folder, SETTINGS)
    batch = some_batch(6)
    own = torch.tensor(trainer.logprobs(batch)).double()
    shift = torch.linspace(-0.2, 0.3, batch.target_count).double()
    batch = replace(batch, sampler_logprobs_N=array("f", (own - shift).clamp(max=0).tolist()))
    gap = own - torch.tensor(list(batch.sampler_logprobs_N)).double()
    report = trainer.step(batch, LossSpec(), 1e-4)
    assert report.logprob_mean == pytest.approx(own.mean().item(), abs=1e-5)
    assert report.mismatch_mean == pytest.approx(gap.abs().mean().item(), abs=1e-5)
    assert report.mismatch_max == pytest.approx(gap.abs().max().item(), abs=1e-5)
    assert report.mismatch_kl == pytest.approx((gap.exp() - 1 - gap).mean().item(), abs=1e-5)
    assert 0 < report.entropy_mean < torch.tensor(259.0).log()
    assert (report.tokens, report.targets) == (batch.token_count, batch.target_count)
    assert report.clip_fraction == 0
    assert report.learning_rate == 1e-4
    assert report.applied


def test_clip_fraction_counts_the_targets_whose_ratio_was_clipped(folder: Path) -> None:
    trainer = TorchTrainer(folder, SETTINGS)
    batch = packed(
        [Group("g", TASK, (trajectory("a", [((1, 2), False), ((3, 4, 5, 6), True)]),))], {"a": 1.0}
    )
    old = torch.tensor(trainer.logprobs(batch)) - torch.tensor([0.5, 0.0, 0.0, -0.5])
    assert trainer.step(with_old(batch, old), LossSpec(), 0.0).clip_fraction == 0.25


def test_the_gradient_is_clipped_by_its_global_norm(folder: Path) -> None:
    """With beta1 = 0 and one update, exp_avg is the gradient that was applied."""
    batch = some_batch(8)
    norm = TorchTrainer(folder, SETTINGS).step(batch, LossSpec(), 0.0).grad_norm
    for limit, expected in ((norm / 4, norm / 4), (norm * 4, norm)):
        trainer = TorchTrainer(folder, replace(SETTINGS, grad_clip=limit, beta1=0.0))
        assert trainer.step(batch, LossSpec(), 0.0).grad_norm == pytest.approx(norm, rel=1e-6)
        assert trainer._optimizer is not None
        applied = torch.cat([m.flatten() for m in trainer._optimizer.moments["exp_avg"].values()]).norm()
        assert applied.item() == pytest.approx(expected, rel=1e-5)


def test_updates_equal_torchs_adamw_and_decay_spares_the_norms(folder: Path) -> None:
    settings = replace(SETTINGS, weight_decay=0.1, beta1=0.8, beta2=0.9, epsilon=1e-6)
    trainer = TorchTrainer(folder, settings)
    copies = {name: t.clone().requires_grad_() for name, t in trainer.export()}
    oracle = torch.optim.AdamW(
        [
            {"params": [p for p in copies.values() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in copies.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.8, 0.9),
        eps=1e-6,
        foreach=False,
    )
    for seed in (1, 2, 3):
        found = step_and_gradients(trainer, some_batch(seed), LossSpec(), 1e-2)
        for name, copy in copies.items():
            copy.grad = found[name]
        oracle.step()
    for name, tensor in trainer.export():
        torch.testing.assert_close(tensor, copies[name].detach(), rtol=1e-5, atol=1e-6)


def test_equal_inputs_give_equal_bits(folder: Path) -> None:
    runs = []
    for _ in range(2):
        trainer = TorchTrainer(folder, replace(SETTINGS, micro_batch_tokens=30))
        reports = [trainer.step(some_batch(seed), LossSpec(), 1e-3) for seed in (1, 2)]
        runs.append(([r.loss for r in reports], {n: t.clone() for n, t in trainer.export()}))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(t, runs[1][1][n]) for n, t in runs[0][1].items())


def test_a_gradient_that_is_not_finite_changes_nothing(folder: Path) -> None:
    trainer = TorchTrainer(folder, replace(SETTINGS, grad_clip=1.0))
    batch = some_batch(3)
    trainer.step(batch, LossSpec(), 1e-3)
    assert trainer._optimizer is not None
    kept = {n: t.clone() for n, t in trainer.export()}
    moments = {m: {n: t.clone() for n, t in d.items()} for m, d in trainer._optimizer.moments.items()}
    huge = replace(batch, weights_N=array("f", [3e38] * batch.target_count))
    report = trainer.step(huge, LossSpec(), 1e-3)
    assert not report.applied
    assert trainer.updates == 1
    assert all(torch.equal(t, kept[n]) for n, t in trainer.export())
    for moment, tensors in trainer._optimizer.moments.items():
        assert all(torch.equal(t, moments[moment][n]) for n, t in tensors.items())
    after = trainer.step(batch, LossSpec(), 1e-3)
    assert after.applied, "the bad gradient must not linger"


@pytest.mark.parametrize("weight", [1.0, 3e38, None], ids=["applied", "not finite", "failed"])
def test_no_gradient_outlives_its_step(
    folder: Path, weight: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients take as much memory as the weights, and the engine samples next."""
    trainer = TorchTrainer(folder, SETTINGS)
    batch = some_batch(3)
    if weight is None:

        def explode() -> float:
            raise RuntimeError("no memory, say")

        monkeypatch.setattr(trainer._prepare(), "gradient_norm", explode)
        with pytest.raises(TrainerError, match="no memory, say"):
            trainer.step(batch, LossSpec(), 1e-3)
    else:
        weights = array("f", [w * weight for w in batch.weights_N])
        assert trainer.step(replace(batch, weights_N=weights), LossSpec(), 1e-3).applied == (weight == 1.0)
    assert [name for name, master in trainer._masters.items() if master.grad is not None] == []


def test_scoring_builds_no_gradient(folder: Path) -> None:
    trainer = TorchTrainer(folder, SETTINGS)
    trainer.logprobs(some_batch(3))
    assert all(master.grad is None for master in trainer._masters.values())


@pytest.mark.parametrize(("field", "bad"), [("tokens_T", 259), ("targets_N", 259), ("targets_N", -1)])
def test_a_token_outside_the_vocabulary_is_refused_by_its_number(folder: Path, field: str, bad: int) -> None:
    batch = some_batch(1)
    column = getattr(batch, field)[:]
    column[1] = bad
    trainer = TorchTrainer(folder, SETTINGS)
    for call in (lambda b: trainer.step(b, LossSpec(), 1e-3), trainer.logprobs):
        with pytest.raises(TrainerError, match=rf"{field} holds the token {bad}"):
            call(replace(batch, **{field: column}))
    assert trainer.updates == 0


def test_a_batch_without_targets_is_refused(folder: Path) -> None:
    with pytest.raises(TrainerError, match="no target"):
        TorchTrainer(folder, SETTINGS).step(Batch([1], [0], [0], [-1], [], [], [], [], []), LossSpec(), 1e-3)


def test_a_tree_without_targets_adds_nothing(folder: Path) -> None:
    one = Batch([1, 2, 3], [0, 1, 2], [0, 0, 0], [-1], [2], [4], [1.0], [-1.0], [0])
    two = Batch([1, 2, 3, 7], [0, 1, 2, 0], [0, 0, 0, 1], [-1, -1], [2], [4], [1.0], [-1.0], [0])
    trainer = TorchTrainer(folder, replace(SETTINGS, micro_batch_tokens=3))
    first, second = gradients(trainer, one, LossSpec()), gradients(trainer, two, LossSpec())
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("rate", [-1e-3, float("nan"), float("inf")])
def test_a_learning_rate_that_makes_no_sense_is_refused(folder: Path, rate: float) -> None:
    with pytest.raises(TrainerError, match="learning rate"):
        TorchTrainer(folder, SETTINGS).step(some_batch(), LossSpec(), rate)


def test_fp32_export_is_a_view_of_the_masters_under_hugging_face_names(folder: Path) -> None:
    trainer = TorchTrainer(folder, SETTINGS)
    exported = dict(trainer.export())
    assert list(exported) == [name for name, _ in trainer.export()]
    assert "lm_head.weight" not in exported
    for name, tensor in exported.items():
        assert tensor.dtype == torch.float32
        assert not tensor.requires_grad
        assert tensor.data_ptr() == trainer._masters[name].data_ptr()
    assert set(exported) == set(double_model(folder).state_dict()) - {"lm_head.weight"}


def test_bf16_export_is_the_rounded_master(folder: Path) -> None:
    trainer = TorchTrainer(folder, replace(SETTINGS, rollout_dtype="bf16"))
    for name, tensor in trainer.export():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, trainer._masters[name].detach().bfloat16())


def test_an_export_under_way_outlives_the_trainer(folder: Path) -> None:
    """A run that is stopped while the engine takes its weights closes the trainer under the iterator."""
    trainer = TorchTrainer(folder, SETTINGS)
    expected = {name: tensor.clone() for name, tensor in trainer.export()}
    export = trainer.export()
    first = next(export)
    trainer.close()
    found = dict([first, *export])
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert list(found) == list(expected)


def test_an_update_reaches_what_is_exported(folder: Path) -> None:
    """Case 1 (verl#7495): what was shipped at every sync was the frozen base."""
    trainer = TorchTrainer(folder, SETTINGS)
    before = {name: tensor.clone() for name, tensor in trainer.export()}
    trainer.step(some_batch(2), LossSpec(), 1e-3)
    assert all(not torch.equal(tensor, before[name]) for name, tensor in trainer.export())


def test_an_untied_model_trains_its_head_and_its_embedding(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "untied", tied=False)
    trainer = TorchTrainer(folder, SETTINGS)
    found = gradients(trainer, some_batch(2), LossSpec())
    assert found["lm_head.weight"].abs().sum() > 0
    assert found["model.embed_tokens.weight"].abs().sum() > 0
    assert "lm_head.weight" in dict(trainer.export())


def test_bf16_compute_trains_fp32_masters(folder: Path) -> None:
    exact, found = (TorchTrainer(folder, replace(SETTINGS, dtype=d)) for d in ("fp32", "bf16"))
    batch = some_batch(9)
    left, right = gradients(exact, batch, LossSpec()), gradients(found, batch, LossSpec())
    whole = torch.cat([g.flatten() for g in left.values()])
    error = torch.cat([right[n].flatten() for n in left]) - whole
    assert error.norm() / whole.norm() < 0.05
    assert all(t.dtype == torch.float32 for t in found._masters.values())


def test_the_processs_thread_count_is_left_as_it_was(folder: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        TorchTrainer(folder, SETTINGS).step(some_batch(), LossSpec(), 1e-3)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_closed_trainer_says_so(folder: Path, tmp_path: Path) -> None:
    trainer = TorchTrainer(folder, SETTINGS)
    trainer.close()
    trainer.close()
    calls = (
        lambda: trainer.step(some_batch(), LossSpec(), 1e-3),
        lambda: trainer.logprobs(some_batch()),
        trainer.export,
        lambda: trainer.save_state(tmp_path / "s"),
        lambda: trainer.load_state(tmp_path / "s"),
        lambda: trainer.save_model(tmp_path / "m"),
    )
    for call in calls:
        with pytest.raises(TrainerError, match="closed"):
            call()


def test_a_folder_without_a_model_is_a_model_source_error(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError):
        TorchTrainer(tmp_path, SETTINGS)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "fp16"},
        {"rollout_dtype": "int8"},
        {"threads": -1},
        {"micro_batch_tokens": 0},
        {"beta1": 1.0},
        {"beta2": -0.1},
        {"epsilon": 0.0},
        {"weight_decay": -1.0},
        {"grad_clip": float("nan")},
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_refused_by_name(change: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        TrainerSettings(**change)
