"""The reference of a KL term: the starting model or a running mean, by the network that trains."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.networks import gradients, some_batch
from helpers.tiny import make_tiny_model
from helpers.tiny_families import make_family
from palestra.batches import Batch, LossSpec
from palestra.errors import TrainerError
from palestra.trainer.settings import TrainerSettings
from palestra.trainer.torch_trainer import TorchTrainer

SETTINGS = TrainerSettings(threads=1, grad_clip=0.0)
MEAN = replace(SETTINGS, reference_decay=0.75)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["tiny", "qwen2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    if request.param == "tiny":
        return make_tiny_model(made, seed=1)
    make_family(made, request.param)
    return made


def with_reference(batch: Batch, ref: tuple[float, ...]) -> Batch:
    normaliser = array("f", [1 / batch.target_count] * batch.target_count)
    return replace(batch, ref_logprobs_N=array("f", ref), kl_weights_N=normaliser)


def test_the_reference_stays_the_starting_model_whatever_is_trained(folder: Path) -> None:
    trainer = TorchTrainer(folder, SETTINGS)
    start = trainer.logprobs(some_batch())
    for seed in range(3):
        trainer.step(some_batch(seed), LossSpec(), 1e-2)
    now = trainer.logprobs(some_batch())
    assert trainer.reference_logprobs(some_batch()) == start
    assert trainer.logprobs(some_batch()) == now != start


def test_a_continued_run_has_the_same_reference(folder: Path, tmp_path: Path) -> None:
    trainer = TorchTrainer(folder, SETTINGS)
    start = trainer.logprobs(some_batch())
    trainer.step(some_batch(1), LossSpec(), 1e-2)
    trainer.save_state(tmp_path / "state")
    again = TorchTrainer(folder, SETTINGS)
    again.load_state(tmp_path / "state")
    assert again.reference_logprobs(some_batch()) == start


def test_asking_the_reference_changes_no_weight_and_no_later_update(folder: Path) -> None:
    asked, silent = TorchTrainer(folder, SETTINGS), TorchTrainer(folder, SETTINGS)
    for seed in range(3):
        asked.reference_logprobs(some_batch(seed))
        a, b = (t.step(some_batch(seed), LossSpec(), 1e-2) for t in (asked, silent))
        assert (a.loss, a.grad_norm) == (b.loss, b.grad_norm)
    for name, tensor in silent._masters.items():
        assert torch.equal(tensor, asked._masters[name])


def test_without_being_asked_the_reference_takes_no_memory(folder: Path) -> None:
    trainer = TorchTrainer(folder, SETTINGS)
    trainer.step(some_batch(), LossSpec(), 1e-2)
    assert trainer._reference._values == {}
    assert trainer._state().keys() == {"masters", "exp_avg", "exp_avg_sq"}


def test_the_running_mean_is_what_its_formula_says(folder: Path) -> None:
    trainer = TorchTrainer(folder, MEAN)
    expected = {name: tensor.detach().clone() for name, tensor in trainer._masters.items()}
    for seed in range(3):
        trainer.step(some_batch(seed), LossSpec(), 1e-2)
        for name, tensor in trainer._masters.items():
            expected[name] = 0.75 * expected[name] + 0.25 * tensor.detach()
    for name, tensor in trainer._reference.mean().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
    start = TorchTrainer(folder, SETTINGS).logprobs(some_batch())
    assert trainer.reference_logprobs(some_batch()) not in (start, trainer.logprobs(some_batch()))


def test_a_skipped_update_leaves_the_running_mean_alone(folder: Path) -> None:
    trainer = TorchTrainer(folder, MEAN)
    trainer.step(some_batch(), LossSpec(), 1e-2)
    before = trainer.reference_logprobs(some_batch())
    bad = some_batch(3)
    bad = replace(bad, weights_N=array("f", [3e38] * bad.target_count))
    assert not trainer.step(bad, LossSpec(), 1e-2).applied
    assert trainer.reference_logprobs(some_batch()) == before


def test_the_running_mean_comes_back_with_the_state(folder: Path, tmp_path: Path) -> None:
    left = TorchTrainer(folder, MEAN)
    left.step(some_batch(1), LossSpec(), 1e-2)
    left.save_state(tmp_path / "state")
    right = TorchTrainer(folder, MEAN)
    right.load_state(tmp_path / "state")
    assert right.reference_logprobs(some_batch()) == left.reference_logprobs(some_batch())
    with pytest.raises(TrainerError, match=r"reference_decay 0\.75"):
        TorchTrainer(folder, replace(MEAN, reference_decay=0.5)).load_state(tmp_path / "state")
    (tmp_path / "state" / "reference.safetensors").write_bytes(b"short")
    with pytest.raises(TrainerError, match=r"reference\.safetensors is cut short"):
        TorchTrainer(folder, MEAN).load_state(tmp_path / "state")


def test_the_running_mean_of_an_adapter_is_of_the_adapter(tmp_path: Path) -> None:
    make_family(tmp_path, "qwen2")
    trainer = TorchTrainer(tmp_path, replace(MEAN, lora_rank=2))
    start = trainer.logprobs(some_batch())
    for seed in range(2):
        trainer.step(some_batch(seed), LossSpec(), 3e-2)
    assert trainer._reference.mean().keys() == trainer._masters.keys()
    assert trainer.reference_logprobs(some_batch()) != pytest.approx(start, abs=1e-3)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_pull_to_the_reference_brings_the_policy_back(tmp_path: Path, rank: int) -> None:
    make_family(tmp_path, "qwen2")
    trainer = TorchTrainer(tmp_path, replace(SETTINGS, lora_rank=rank))
    for seed in range(3):
        trainer.step(some_batch(seed), LossSpec(), 1e-2)
    batch = some_batch(9)
    batch = with_reference(batch, trainer.reference_logprobs(batch))
    batch = replace(batch, weights_N=array("f", [0.0] * batch.target_count))
    kl = [trainer.step(batch, LossSpec(kl_coef=1.0), 1e-3).kl_mean for _ in range(12)]
    assert kl[-1] < 0.5 * kl[0]


def test_a_closed_trainer_has_no_reference(folder: Path) -> None:
    trainer = TorchTrainer(folder, SETTINGS)
    trainer.close()
    with pytest.raises(TrainerError, match="closed"):
        trainer.reference_logprobs(some_batch())


def test_our_own_layers_computed_twice_give_the_very_same_gradients(tmp_path: Path) -> None:
    """Gradient checkpointing drops activations, never a digit."""
    make_tiny_model(tmp_path, layers=3)
    plain = TorchTrainer(tmp_path, SETTINGS)
    twice = TorchTrainer(tmp_path, replace(SETTINGS, checkpoint_layers=True))
    left, right = gradients(plain, some_batch()), gradients(twice, some_batch())
    assert all(torch.equal(gradient, right[name]) for name, gradient in left.items())
    assert twice._network._model.checkpoint_layers  # type: ignore[attr-defined]


def test_a_layer_computed_twice_saves_nothing_of_the_layers_width(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, layers=3)
    held = {}
    for again in (False, True):
        trainer = TorchTrainer(tmp_path, replace(SETTINGS, checkpoint_layers=again))
        sizes: list[int] = []

        def keep(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(0 if isinstance(tensor, torch.nn.Parameter) else tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            trainer._hidden(some_batch())
        held[again] = sum(sizes)
    assert held[True] < 0.35 * held[False]
