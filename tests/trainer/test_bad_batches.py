"""Batches at the edge: masked out, one token, nothing sampled, too long, and states cut short."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.forest import TASK, random_advantages, random_groups, trajectory
from helpers.networks import gradients, packed, some_batch
from helpers.tiny import make_tiny_model
from helpers.tiny_families import make_family
from palestra.algorithms.packing import partition
from palestra.batches import LossSpec
from palestra.errors import TrainerError
from palestra.trainer.settings import RECOMPUTE_BEYOND, TrainerSettings
from palestra.trainer.torch_trainer import TorchTrainer
from palestra.types import Group, SamplingParams

SETTINGS = TrainerSettings(threads=1, grad_clip=0.0)


@pytest.fixture(scope="module", params=["tiny", "qwen2", "qwen2-lora"])
def trainer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TorchTrainer:
    folder = tmp_path_factory.mktemp("model")
    kind, _, adapted = request.param.partition("-")
    if kind == "tiny":
        make_tiny_model(folder)
    else:
        make_family(folder, kind)
    torch.set_num_threads(1)
    return TorchTrainer(folder, replace(SETTINGS, lora_rank=2 if adapted else 0))


def masters(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer._masters.items()}


def test_a_batch_masked_out_entirely_has_loss_and_gradient_of_exactly_zero(trainer: TorchTrainer) -> None:
    batch = some_batch()
    masked = replace(batch, weights_N=array("f", [0.0] * batch.target_count))
    report = trainer.step(masked, LossSpec(), 0.0)
    assert (report.loss, report.grad_norm, report.applied) == (0.0, 0.0, True)
    assert all(not gradient.any() for gradient in gradients(trainer, masked).values())


def test_groups_without_signal_make_no_batch_and_a_batch_without_targets_is_refused(
    trainer: TorchTrainer,
) -> None:
    """Case 30: a step that can teach nothing must not become an update of rounding errors."""
    from palestra.algorithms.packing import pack

    groups = random_groups(1)
    nothing = {t.id: 0.0 for group in groups for t in group.rewarded}
    assert pack(groups, nothing, SamplingParams()) is None
    batch = some_batch()
    names = ("predictors_N", "targets_N", "weights_N", "sampler_logprobs_N", "sequence_ids_N")
    before = masters(trainer)
    with pytest.raises(TrainerError, match="holds no target"):
        trainer.step(replace(batch, **dict.fromkeys(names, ())), LossSpec(), 1e-3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer._masters.items())


def test_a_prompt_of_one_token_and_replies_of_one_token_train(trainer: TorchTrainer) -> None:
    members = tuple(trajectory(f"m{n}", [([40], False), ([50 + n], True)]) for n in range(3))
    batch = packed([Group("g", TASK, members)], {"m0": 1.0, "m1": -1.0, "m2": 0.5})
    assert batch.target_count == 3
    found = trainer.logprobs(batch)
    assert len(set(batch.predictors_N)) == 1, "one state predicts all three"
    assert all(-40 < value < 0 for value in found)
    assert trainer.step(batch, LossSpec(), 0.0).applied


def test_an_empty_reply_cannot_be_rewarded_and_changes_nothing_beside_others(trainer: TorchTrainer) -> None:
    sampled = trajectory("a", [([40, 41], False), ([50, 51], True)])
    silent = trajectory("b", [([40, 41], False), ([], True)], reward=None)
    with pytest.raises(ValueError, match="at least one sampled token"):
        trajectory("b", [([40, 41], False), ([], True)], reward=0.0)
    alone = packed([Group("g", TASK, (sampled,))], {"a": 1.0})
    beside = packed([Group("g", TASK, (sampled, silent))], {"a": 1.0})
    a, b = gradients(trainer, alone), gradients(trainer, beside)
    for name, gradient in a.items():
        torch.testing.assert_close(b[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_tree_larger_than_a_micro_batch_goes_alone_and_trains_the_same(trainer: TorchTrainer) -> None:
    """The limit on memory is one tree: it is not cut, and beyond four micro-batches computed twice."""
    groups = random_groups(8)
    batch = packed(groups, random_advantages(groups, 8))
    small = 3
    parts = partition(batch, small)
    assert any(part.batch.token_count > RECOMPUTE_BEYOND * small for part in parts)
    whole = gradients(trainer, batch)
    settings = trainer.settings
    trainer.settings = replace(settings, micro_batch_tokens=small)
    try:
        assert trainer.settings.recomputes(max(part.batch.token_count for part in parts))
        cut = gradients(trainer, batch)
    finally:
        trainer.settings = settings
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=1e-4, atol=2e-6)


def test_only_trees_that_need_it_are_computed_twice() -> None:
    settings = replace(SETTINGS, micro_batch_tokens=100)
    assert not settings.recomputes(100)
    assert not settings.recomputes(400)
    assert settings.recomputes(401)
    assert replace(settings, checkpoint_layers=True).recomputes(1)


@pytest.mark.parametrize("part", ["masters", "exp_avg", "exp_avg_sq"])
def test_a_state_cut_short_is_refused_and_changes_nothing(
    trainer: TorchTrainer, tmp_path: Path, part: str
) -> None:
    trainer.step(some_batch(2), LossSpec(), 1e-3)
    trainer.save_state(tmp_path)
    file = tmp_path / f"{part}.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    trainer.step(some_batch(3), LossSpec(), 1e-3)
    before, updates = masters(trainer), trainer.updates
    with pytest.raises(TrainerError, match="cut short") as caught:
        trainer.load_state(tmp_path)
    assert "earlier checkpoint" in caught.value.next_command
    assert trainer.updates == updates
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer._masters.items())
