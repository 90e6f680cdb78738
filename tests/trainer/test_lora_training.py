"""LoRA: only the adapter learns, what is exported is the merged model, what is saved is PEFT's layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from helpers.forest import naive_logprobs, naive_targets, random_groups
from helpers.networks import double, gradients, packed, some_batch
from helpers.tiny import make_tiny_model
from helpers.tiny_families import make_family
from helpers.tiny_lora import dense
from palestra.batches import LossSpec
from palestra.errors import ModelSourceError, TrainerError, WeightsError
from palestra.models.lora import merged, parse_adapter, read_adapter
from palestra.rollouts.native.engine import NativeEngine
from palestra.trainer.settings import TrainerSettings
from palestra.trainer.torch_trainer import ADAPTER, TorchTrainer
from palestra.types import Version
from palestra.weights.sync import WeightSync

SETTINGS = TrainerSettings(threads=1, micro_batch_tokens=10_000, grad_clip=0.0, lora_rank=3, lora_alpha=6.0)
FAMILIES = ("llama", "qwen2", "qwen3-moe")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def trained(folder: Path, settings: TrainerSettings = SETTINGS, updates: int = 3) -> TorchTrainer:
    trainer = TorchTrainer(folder, settings)
    for seed in range(updates):
        assert trainer.step(some_batch(seed), LossSpec(), 3e-2).applied
    return trainer


@pytest.mark.parametrize("family", FAMILIES)
def test_the_untrained_adapter_is_the_base_model(tmp_path: Path, family: str) -> None:
    make_family(tmp_path, family)
    whole = TorchTrainer(tmp_path, replace(SETTINGS, lora_rank=0))
    fresh = TorchTrainer(tmp_path, SETTINGS)
    assert fresh.logprobs(some_batch()) == pytest.approx(whole.logprobs(some_batch()), abs=1e-5)
    before = dict(whole.export())
    for name, tensor in fresh.export():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_adapter_has_optimiser_state_and_only_it_learns(tmp_path: Path, family: str) -> None:
    make_family(tmp_path, family)
    trainer = TorchTrainer(tmp_path, SETTINGS)
    frozen = [tensor.clone() for tensor in trainer._network.frozen()]
    adapter = {name: tensor.clone() for name, tensor in trainer._masters.items()}
    trainer.step(some_batch(), LossSpec(), 1e-2)
    trainer.step(some_batch(), LossSpec(), 1e-2)
    assert all(torch.equal(a, b) for a, b in zip(frozen, trainer._network.frozen(), strict=True))
    assert all(tensor.grad is None for tensor in trainer._network.frozen())
    assert all(not torch.equal(tensor, adapter[name]) for name, tensor in trainer._masters.items())
    assert all(".lora_A." in name or ".lora_B." in name for name in trainer._masters)
    assert trainer._prepare().moments["exp_avg"].keys() == trainer._masters.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_adapters_gradient_is_that_of_the_whole_weight_times_the_other_half(
    tmp_path: Path, family: str
) -> None:
    """By the chain rule: d/dB = scale * dW A^T and d/dA = scale * B^T dW, with dW of the merged model."""
    make_family(tmp_path / "base", family)
    trainer = trained(tmp_path / "base")
    trainer.save_model(tmp_path / "merged")
    whole = gradients(TorchTrainer(tmp_path / "merged", replace(SETTINGS, lora_rank=0)), some_batch(7))
    found = gradients(trainer, some_batch(7))
    for name, grad in found.items():
        layer, half = name.removesuffix(".weight").rsplit(".", 1)
        weight = whole[f"{layer}.weight"]
        up, down = (trainer._masters[f"{layer}.{h}.weight"].detach() for h in ("lora_B", "lora_A"))
        expected = 2.0 * (weight @ down.t() if half == "lora_B" else up.t() @ weight)
        torch.testing.assert_close(grad, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_export_is_the_merged_model_under_the_files_own_names(tmp_path: Path, family: str) -> None:
    make_family(tmp_path / "base", family)
    trainer = trained(tmp_path / "base")
    trainer.export_adapter(tmp_path / "adapter")
    base = load_file(tmp_path / "base" / "model.safetensors")
    expected = dense(base, load_file(tmp_path / "adapter" / "adapter_model.safetensors"), 2.0)
    exported = dict(trainer.export())
    assert exported.keys() == base.keys()
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
    assert sum(not torch.equal(exported[name], base[name]) for name in base) == len(trainer._masters) // 2


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_engine_serves_the_merged_weights(tmp_path: Path, family: str) -> None:
    make_family(tmp_path, family)
    trainer = TorchTrainer(tmp_path, SETTINGS)
    engine = NativeEngine(tmp_path, dtype="fp32", threads=1, max_running=2, context_tokens=64)
    sync = WeightSync(trainer, engine, (5, 80, 17, 203, 99, 4, 150), "fp32")
    try:
        await sync.serve(Version("run", 0))
        assert trainer.step(some_batch(2), LossSpec(), 3e-2).applied
        report = await sync.serve(Version("run", 1))
        assert report.probe_gap_max < 1e-4
        assert report.changed_tensors == len(trainer._masters) // 2
    finally:
        await engine.close()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_saved_adapter_is_accepted_by_the_engines_reader_and_gives_the_merged_model(
    tmp_path: Path, family: str
) -> None:
    make_family(tmp_path / "base", family)
    trainer = trained(tmp_path / "base")
    trainer.save_model(tmp_path / "saved")
    base = load_file(tmp_path / "base" / "model.safetensors")
    config, tensors = read_adapter(tmp_path / "saved" / ADAPTER)
    changes = parse_adapter(config, tensors.items(), {n: tuple(t.shape) for n, t in base.items()})
    whole = load_file(tmp_path / "saved" / "model.safetensors")
    for name, tensor in merged(base.items(), changes):
        torch.testing.assert_close(whole[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_what_is_saved_and_computes_the_same(tmp_path: Path, family: str) -> None:
    peft = pytest.importorskip("peft")
    make_family(tmp_path / "base", family)
    trainer = trained(tmp_path / "base")
    trainer.export_adapter(tmp_path / "adapter")
    groups = random_groups(9, groups=2, longest=5)
    advantages = {t.id: 1.0 for g in groups for t in g.rewarded}
    model = peft.PeftModel.from_pretrained(double(tmp_path / "base"), tmp_path / "adapter").double()
    with torch.no_grad():
        expected = naive_logprobs(model, naive_targets(groups, advantages), 1.0)
    found = torch.tensor(trainer.logprobs(packed(groups, advantages))).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_an_adapter_that_peft_saved_is_taken_up(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    make_family(tmp_path / "base", "qwen2")
    auto: Any = transformers.AutoModelForCausalLM
    targets = ["q_proj", "down_proj"]
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(auto.from_pretrained(tmp_path / "base", dtype=torch.float32), config)
    model.save_pretrained(tmp_path / "adapter")
    trainer = TorchTrainer(tmp_path / "base", replace(SETTINGS, lora_targets=("q_proj", "down_proj")))
    trainer.load_adapter(tmp_path / "adapter")
    groups = random_groups(9, groups=2, longest=5)
    advantages = {t.id: 1.0 for g in groups for t in g.rewarded}
    with torch.no_grad():
        expected = naive_logprobs(model.double(), naive_targets(groups, advantages), 1.0)
    found = torch.tensor(trainer.logprobs(packed(groups, advantages))).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_the_reference_over_an_adapter_is_the_base_and_costs_no_memory(tmp_path: Path) -> None:
    make_family(tmp_path, "qwen2")
    before = TorchTrainer(tmp_path, SETTINGS).logprobs(some_batch(4))
    trainer = trained(tmp_path)
    assert trainer.reference_logprobs(some_batch(4)) == pytest.approx(before, abs=1e-6)
    assert trainer.logprobs(some_batch(4)) != pytest.approx(before, abs=1e-2)
    assert trainer._reference._values == {}


@pytest.mark.parametrize("micro_batch_tokens", [1, 20])
@pytest.mark.parametrize("checkpoint_layers", [False, True])
def test_no_split_and_no_recomputation_changes_the_adapters_update(
    tmp_path: Path, micro_batch_tokens: int, checkpoint_layers: bool
) -> None:
    """Case 11 (verl#6280), over an adapter."""
    make_family(tmp_path / "base", "qwen2")
    whole = trained(tmp_path / "base")
    whole.export_adapter(tmp_path / "adapter")
    settings = replace(SETTINGS, micro_batch_tokens=micro_batch_tokens, checkpoint_layers=checkpoint_layers)
    cut = TorchTrainer(tmp_path / "base", settings)
    cut.load_adapter(tmp_path / "adapter")
    left, right = gradients(whole, some_batch(8)), gradients(cut, some_batch(8))
    for name, gradient in left.items():
        torch.testing.assert_close(right[name], gradient, rtol=1e-4, atol=2e-6)


def test_a_plain_llama_trains_adapters_too_and_in_bf16_the_frozen_weights_are_bf16(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    trainer = trained(tmp_path, replace(SETTINGS, dtype="bf16"))
    assert {tensor.dtype for tensor in trainer._network.frozen()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in trainer._masters.values()} == {torch.float32}
    wide = TorchTrainer(tmp_path, SETTINGS)
    trainer.export_adapter(tmp_path / "adapter")
    wide.load_adapter(tmp_path / "adapter")
    gap = torch.tensor(trainer.logprobs(some_batch(6))) - torch.tensor(wide.logprobs(some_batch(6)))
    assert 0 < gap.abs().mean() < 0.06


def test_a_state_of_adapters_comes_back_bit_for_bit(tmp_path: Path) -> None:
    make_family(tmp_path / "base", "qwen2")
    left = trained(tmp_path / "base")
    left.save_state(tmp_path / "state")
    right = TorchTrainer(tmp_path / "base", SETTINGS)
    right.load_state(tmp_path / "state")
    assert right.updates == 3
    for seed in (5, 6):
        a, b = (t.step(some_batch(seed), LossSpec(), 1e-2) for t in (left, right))
        assert (a.loss, a.grad_norm) == (b.loss, b.grad_norm)
    assert all(torch.equal(t, right._masters[name]) for name, t in left._masters.items())


def test_a_state_of_adapters_is_refused_over_other_weights_and_other_settings(tmp_path: Path) -> None:
    make_family(tmp_path / "base", "qwen2")
    make_family(tmp_path / "other", "qwen2", seed=1)
    trained(tmp_path / "base", updates=1).save_state(tmp_path / "state")
    with pytest.raises(TrainerError, match="saved with another base"):
        TorchTrainer(tmp_path / "other", SETTINGS).load_state(tmp_path / "state")
    with pytest.raises(TrainerError, match="another lora_alpha"):
        TorchTrainer(tmp_path / "base", replace(SETTINGS, lora_alpha=7.0)).load_state(tmp_path / "state")
    with pytest.raises(TrainerError, match="another model and lora_rank"):
        TorchTrainer(tmp_path / "base", replace(SETTINGS, lora_rank=4)).load_state(tmp_path / "state")


def test_an_adapter_of_another_rank_alpha_or_place_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    make_family(tmp_path / "base", "qwen2")
    trained(tmp_path / "base", updates=1).export_adapter(tmp_path / "adapter")
    for changes, told in (
        ({"lora_rank": 4}, "rank 3 and alpha 6 for"),
        ({"lora_alpha": 3.0}, "rank 3 and alpha 6 for"),
    ):
        trainer = TorchTrainer(tmp_path / "base", replace(SETTINGS, **changes))
        before = trainer.logprobs(some_batch())
        with pytest.raises(TrainerError, match=told):
            trainer.load_adapter(tmp_path / "adapter")
        assert trainer.logprobs(some_batch()) == before
    few = TorchTrainer(tmp_path / "base", replace(SETTINGS, lora_targets=("q_proj",)))
    with pytest.raises(WeightsError, match="fits no weight"):
        few.load_adapter(tmp_path / "adapter")


def test_a_damaged_adapter_and_one_that_lies_about_its_rank_are_refused(tmp_path: Path) -> None:
    make_family(tmp_path / "base", "qwen2")
    trainer = trained(tmp_path / "base", updates=1)
    trainer.export_adapter(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({**config, "r": 5}))
    with pytest.raises(WeightsError, match="has shape"):
        trainer.load_adapter(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(load_file(file), file)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ModelSourceError, match="cut short"):
        trainer.load_adapter(tmp_path / "adapter")


def test_targets_that_no_layer_has_are_named_with_the_nearest(tmp_path: Path) -> None:
    make_family(tmp_path, "qwen2")
    with pytest.raises(TrainerError, match="no linear layer called q_prj") as caught:
        TorchTrainer(tmp_path, replace(SETTINGS, lora_targets=("q_prj",)))
    assert caught.value.nearest == "q_proj"


def test_a_trainer_of_whole_weights_has_no_adapter_to_save(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    trainer = TorchTrainer(tmp_path / "model", replace(SETTINGS, lora_rank=0))
    with pytest.raises(TrainerError, match="every weight is trained"):
        trainer.export_adapter(tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lora_rank": -1}, "lora_rank must be >= 0"),
        ({"lora_alpha": 0.0}, "lora_alpha must be above 0"),
        ({"reference_decay": 1.0}, "reference_decay must be in"),
        ({"device": "tpu"}, "device must be cpu or cuda"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replace(SETTINGS, **changes)
