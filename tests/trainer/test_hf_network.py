"""Any causal model trains packed as it would one sequence at a time, or is refused by name."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from helpers.forest import naive_logprobs, naive_loss, naive_targets, random_advantages, random_groups
from helpers.networks import double, gradients, packed, some_batch
from helpers.tiny import make_tiny_model
from helpers.tiny_families import FAMILIES, make_family
from palestra.batches import LossSpec
from palestra.errors import MissingExtraError, ModelSourceError, TrainerError
from palestra.rollouts.native.engine import NativeEngine
from palestra.trainer.hf_network import HfNetwork
from palestra.trainer.network import OwnNetwork, load_network
from palestra.trainer.settings import TrainerSettings
from palestra.trainer.torch_trainer import TorchTrainer
from palestra.types import SamplingParams, Version
from palestra.weights.sync import WeightSync

SETTINGS = TrainerSettings(threads=1, micro_batch_tokens=10_000, grad_clip=0.0)
BEYOND = [name for name in FAMILIES if name not in ("llama", "llama-linear", "llama3")]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def by_transformers(folder: Path, settings: TrainerSettings = SETTINGS) -> TorchTrainer:
    return TorchTrainer(folder, settings, HfNetwork(folder, settings))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_loss_and_gradient_equal_sequences_one_by_one_in_double_precision(
    tmp_path: Path, family: str
) -> None:
    """Cases 11 and 12 (trl#4772, verl#2996): in every family no token may see another sequence."""
    make_family(tmp_path, family)
    groups = random_groups(7, groups=2, longest=6)
    advantages = random_advantages(groups, 7)
    model, targets = double(tmp_path), naive_targets(groups, advantages)
    logprobs = naive_logprobs(model, targets, 0.8)
    weights = torch.tensor([t.weight for t in targets], dtype=torch.float64)
    loss = naive_loss(LossSpec(), logprobs, None, weights)
    loss.backward()
    trainer = by_transformers(tmp_path)
    batch = packed(groups, advantages, SamplingParams(temperature=0.8))
    expected = logprobs.detach()[weights != 0]
    assert trainer.logprobs(batch) == pytest.approx(expected.tolist(), abs=1e-5)
    assert trainer.step(batch, LossSpec(), 0.0).loss == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    found = gradients(trainer, batch)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name].double(), parameter.grad, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.7, top_k=9, top_p=0.8)])
def test_both_networks_give_a_plain_llama_the_same_update(tmp_path: Path, sampling: SamplingParams) -> None:
    """Case 10 (trl#4159, OpenRLHF PR#853): temperature, top-k and top-p hold in both."""
    make_tiny_model(tmp_path, seed=3)
    groups = random_groups(11)
    batch = packed(groups, random_advantages(groups, 11), sampling)
    own, other = TorchTrainer(tmp_path, SETTINGS), by_transformers(tmp_path)
    assert isinstance(own._network, OwnNetwork)
    assert other.logprobs(batch) == pytest.approx(own.logprobs(batch), abs=1e-5)
    left, right = gradients(own, batch), gradients(other, batch)
    assert left.keys() == right.keys()
    for name, gradient in left.items():
        torch.testing.assert_close(right[name], gradient, rtol=1e-4, atol=1e-6)
    assert other.step(batch, LossSpec(), 1e-3).loss == pytest.approx(own.step(batch, LossSpec(), 1e-3).loss)


@pytest.mark.parametrize("family", ["qwen2", "qwen3-moe"])
@pytest.mark.parametrize("micro_batch_tokens", [1, 20])
def test_no_micro_batch_split_changes_loss_or_gradient(
    tmp_path: Path, family: str, micro_batch_tokens: int
) -> None:
    """Case 11 (verl#6280): the ratio depended on the micro-batch size."""
    make_family(tmp_path, family)
    batch = some_batch(11)
    whole = by_transformers(tmp_path)
    cut = by_transformers(tmp_path, replace(SETTINGS, micro_batch_tokens=micro_batch_tokens))
    a, b = whole.step(batch, LossSpec(), 0.0), cut.step(batch, LossSpec(), 0.0)
    assert b.loss == pytest.approx(a.loss, rel=1e-5, abs=1e-7)
    assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)
    left, right = gradients(whole, batch), gradients(cut, batch)
    for name, gradient in left.items():
        torch.testing.assert_close(right[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", BEYOND)
async def test_the_engine_serves_what_was_trained(tmp_path: Path, family: str) -> None:
    """Case 18: names and layout of the export are the ones every engine reads, experts included."""
    make_family(tmp_path, family)
    trainer = TorchTrainer(tmp_path, SETTINGS)
    engine = NativeEngine(tmp_path, dtype="fp32", threads=1, max_running=2, context_tokens=64)
    probe = (5, 80, 17, 203, 99, 4, 150)
    sync = WeightSync(trainer, engine, probe, "fp32")
    try:
        await sync.serve(Version("run", 0))
        assert trainer.step(some_batch(2), LossSpec(), 1e-2).applied
        report = await sync.serve(Version("run", 1))
        assert report.probe_gap_max < 1e-4
        assert report.changed_tensors == len(dict(trainer.export())), "every tensor has learned"
    finally:
        await engine.close()


@pytest.mark.parametrize("family", ["qwen2", "qwen3-moe-mixed"])
def test_a_saved_model_has_the_files_own_names_and_loads_everywhere(tmp_path: Path, family: str) -> None:
    make_family(tmp_path / "source", family)
    trainer = TorchTrainer(tmp_path / "source", SETTINGS)
    trainer.save_model(tmp_path / "same")
    before = load_file(tmp_path / "source" / "model.safetensors")
    after = load_file(tmp_path / "same" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    trainer.step(some_batch(3), LossSpec(), 1e-2)
    trainer.save_model(tmp_path / "trained")
    again = TorchTrainer(tmp_path / "trained", SETTINGS)
    assert again.logprobs(some_batch(4)) == trainer.logprobs(some_batch(4))


def test_a_state_comes_back_bit_for_bit_and_the_next_updates_are_the_same(tmp_path: Path) -> None:
    make_family(tmp_path / "model", "qwen3-moe")
    left = TorchTrainer(tmp_path / "model", SETTINGS)
    left.step(some_batch(1), LossSpec(), 1e-2)
    left.save_state(tmp_path / "state")
    right = TorchTrainer(tmp_path / "model", SETTINGS)
    right.load_state(tmp_path / "state")
    for seed in (2, 3):
        a, b = (t.step(some_batch(seed), LossSpec(), 1e-2) for t in (left, right))
        assert (a.loss, a.grad_norm) == (b.loss, b.grad_norm)
    assert all(torch.equal(t, right._masters[name]) for name, t in left._masters.items())
    assert right.updates == 3


def test_layers_computed_twice_give_the_very_same_gradients(tmp_path: Path) -> None:
    make_family(tmp_path, "qwen3-moe")
    plain = by_transformers(tmp_path)
    twice = by_transformers(tmp_path, replace(SETTINGS, checkpoint_layers=True))
    left, right = gradients(plain, some_batch()), gradients(twice, some_batch())
    assert all(torch.equal(gradient, right[name]) for name, gradient in left.items())


def test_bf16_compute_over_fp32_masters_is_near_fp32(tmp_path: Path) -> None:
    make_family(tmp_path, "qwen3")
    wide, narrow = by_transformers(tmp_path), by_transformers(tmp_path, replace(SETTINGS, dtype="bf16"))
    assert all(master.dtype == torch.float32 for master in narrow._masters.values())
    gaps = torch.tensor(wide.logprobs(some_batch())) - torch.tensor(narrow.logprobs(some_batch()))
    assert 0 < gaps.abs().mean() < 0.05
    a, b = gradients(wide, some_batch()), gradients(narrow, some_batch())
    for name, gradient in a.items():
        assert (b[name] - gradient).norm() < 0.1 * gradient.norm(), name


def odd_model(folder: Path, kind: str, **changes: Any) -> Path:
    common = {
        "vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(kind, **{**common, **changes})
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("gemma2", {"head_dim": 8}, "final_logit_softcapping = 30.0"),
        ("granite", {"logits_scaling": 3.0}, "logits_scaling = 3.0"),
        ("cohere", {}, "logit_scale"),
        ("phi", {}, "a head that is more than one matrix"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ("gpt_oss", {"num_local_experts": 4, "head_dim": 8}, "does more than scale and mask"),
        ("mamba", {}, "do not get this model's own logits"),
        ("bloom", {}, "do not get this model's own logits"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "do not get this model's own logits"),
        ("mistral", {"sliding_window": 8}, "longer than the model's attention window"),
    ],
)
def test_a_family_that_computes_something_else_is_refused_and_not_trained_wrong(
    tmp_path: Path, kind: str, changes: dict[str, Any], why: str
) -> None:
    """Case 12: packing leaked state between sequences in families nobody had checked."""
    with pytest.raises(TrainerError, match=why):
        HfNetwork(odd_model(tmp_path, kind, **changes), SETTINGS)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gemma", {"head_dim": 8}),
        ("granite", {"attention_multiplier": 0.3}),
        ("mistral", {"sliding_window": 64}),
        ("olmo2", {}),
        ("phi3", {}),
    ],
)
def test_families_that_nobody_named_train_like_themselves(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    odd_model(tmp_path, kind, **changes)
    groups = random_groups(3, groups=2, longest=5)
    advantages = {t.id: 1.0 for g in groups for t in g.rewarded}
    with torch.no_grad():
        expected = naive_logprobs(double(tmp_path), naive_targets(groups, advantages), 1.0)
    found = TorchTrainer(tmp_path, SETTINGS).logprobs(packed(groups, advantages))
    torch.testing.assert_close(torch.tensor(found).double(), expected, rtol=0, atol=3e-4)


def test_a_sequence_beyond_a_sliding_window_is_refused(tmp_path: Path) -> None:
    trainer = TorchTrainer(odd_model(tmp_path, "mistral", sliding_window=12), SETTINGS)
    with pytest.raises(TrainerError, match="longer than the model's attention window") as caught:
        trainer.logprobs(some_batch(1))
    assert "12 tokens" in caught.value.expected


def test_damaged_and_incomplete_files_are_model_source_errors(tmp_path: Path) -> None:
    make_family(tmp_path, "qwen2")
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(ModelSourceError, match="cut short"):
        load_network(tmp_path, SETTINGS)
    tensors = load_file(make_family_again(tmp_path) / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    from palestra.models.tensors import save_tensors

    save_tensors(tmp_path, tensors)
    with pytest.raises(ModelSourceError, match=r"lack model\.layers\.1\.mlp\.up_proj"):
        load_network(tmp_path, SETTINGS)


def make_family_again(folder: Path) -> Path:
    make_family(folder, "qwen2")
    return folder


def test_without_transformers_a_plain_llama_trains_and_others_name_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_family(tmp_path / "qwen", "qwen2")
    make_tiny_model(tmp_path / "llama")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert isinstance(load_network(tmp_path / "llama", SETTINGS), OwnNetwork)
    with pytest.raises(MissingExtraError, match="transformers") as caught:
        load_network(tmp_path / "qwen", SETTINGS)
    assert "'hf'" in caught.value.expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_an_absent_device_is_said_before_any_weight_is_read(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="no CUDA device"):
        load_network(tmp_path / "nothing", replace(SETTINGS, device="cuda"))
