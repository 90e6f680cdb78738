"""Our Llama equals transformers' and refuses weights that are not its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.forest import double_model, trajectory
from helpers.tiny import make_tiny_model
from palestra.algorithms.packing import pack
from palestra.batches import Batch
from palestra.errors import ModelSourceError
from palestra.models.config import ModelConfig
from palestra.models.llama import Llama
from palestra.models.tensors import load_tensors
from palestra.trainer.tree_attention import TreeAttention
from palestra.types import Group, SamplingParams

torch.set_num_threads(1)
TOKENS = (5, 17, 99, 3, 250, 41, 8, 8, 120)


def one_sequence() -> Batch:
    member = trajectory("a", [(TOKENS, False), ((1,), True)])
    batch = pack([Group("g", member.task_hash, (member,))], {"a": 1.0}, SamplingParams())
    assert batch is not None
    return batch


def hidden_states(model: Llama) -> torch.Tensor:
    batch = one_sequence()
    return model(torch.tensor(batch.tokens_T), torch.tensor(batch.positions_T), TreeAttention(batch))


@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_every_gradient_equal_transformers_in_double_precision(tmp_path: Path, tied: bool) -> None:
    folder = make_tiny_model(tmp_path / "m", seed=3, layers=3, tied=tied)
    model = Llama.from_tensors(ModelConfig.from_folder(folder), load_tensors(folder))
    logits = hidden_states(model) @ model.head_weight.t()
    reference = double_model(folder)
    expected = reference(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    (logits * direction).sum().backward()
    (expected * direction.double()).sum().backward()
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        error = parameter.grad.double() - gradients[name]
        assert error.norm() < 1e-5 * gradients[name].norm(), name


def test_parameters_are_named_and_shaped_as_in_the_folder(tmp_path: Path) -> None:
    tensors = load_tensors(make_tiny_model(tmp_path / "m", tied=False))
    model = Llama.from_tensors(ModelConfig.from_folder(tmp_path / "m"), tensors)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: t.shape for n, t in tensors.items()}


def test_the_parameters_are_copies_so_training_never_writes_into_what_was_loaded(tmp_path: Path) -> None:
    tensors = load_tensors(make_tiny_model(tmp_path / "m"))
    before = tensors["model.norm.weight"].clone()
    model = Llama.from_tensors(ModelConfig.from_folder(tmp_path / "m"), tensors)
    model.model.norm.weight.data.zero_()
    assert torch.equal(tensors["model.norm.weight"], before)


def test_bf16_computes_near_fp32_with_fp32_masters_and_gradients(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m")
    config, tensors = ModelConfig.from_folder(folder), load_tensors(folder)
    exact = hidden_states(Llama.from_tensors(config, tensors))
    model = Llama.from_tensors(config, tensors, torch.bfloat16)
    found = hidden_states(model)
    assert found.dtype == torch.bfloat16
    assert (found.float() - exact).abs().mean() / exact.abs().mean() < 0.03
    found.float().square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32


def test_a_tied_model_that_also_carries_its_head_is_accepted(tmp_path: Path) -> None:
    tensors = load_tensors(make_tiny_model(tmp_path / "m"))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model = Llama.from_tensors(ModelConfig.from_folder(tmp_path / "m"), tensors)
    assert "lm_head.weight" not in dict(model.named_parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "lacks the tensor model.norm.weight"),
        (lambda t: t.update({"model.extra.bias": torch.zeros(1)}), "unknown tensor model.extra.bias"),
        (lambda t: t.update({"model.norm.weight": torch.ones(5)}), r"model.norm.weight has shape \[5\]"),
        (lambda t: t.pop("lm_head.weight"), "lacks the tensor lm_head.weight"),
    ],
)
def test_a_missing_unknown_or_misshapen_tensor_is_refused_by_name(tmp_path: Path, change, message) -> None:
    tensors = load_tensors(make_tiny_model(tmp_path / "m", tied=False))
    change(tensors)
    with pytest.raises(ModelSourceError, match=message):
        Llama.from_tensors(ModelConfig.from_folder(tmp_path / "m"), tensors)
