"""What a trainer saves comes back bit for bit, or not at all."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.forest import random_advantages, random_groups
from helpers.tiny import make_tiny_model
from palestra.algorithms.packing import pack
from palestra.batches import Batch, LossSpec
from palestra.errors import TrainerError
from palestra.models.tensors import load_tensors, save_tensors
from palestra.trainer.settings import TrainerSettings
from palestra.trainer.torch_trainer import TorchTrainer
from palestra.types import SamplingParams

SETTINGS = TrainerSettings(threads=1, micro_batch_tokens=30, weight_decay=0.01)
FILES = ["masters.safetensors", "exp_avg.safetensors", "exp_avg_sq.safetensors", "trainer.json"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1)


def batch(seed: int) -> Batch:
    groups = random_groups(seed)
    made = pack(groups, {**random_advantages(groups, seed), "g0m0": 1.0}, SamplingParams())
    assert made is not None
    return made


def train(trainer: TorchTrainer, seeds: range) -> list[float]:
    return [trainer.step(batch(seed), LossSpec(), 1e-3).loss for seed in seeds]


def everything(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    """Copies of every master and moment."""
    return {f"{part}.{n}": t.detach().clone() for part, d in trainer._state().items() for n, t in d.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[n]) for n, t in a.items())


def test_six_steps_equal_three_saved_loaded_and_three_more_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    whole = TorchTrainer(folder, SETTINGS)
    losses = train(whole, range(6))
    first = TorchTrainer(folder, SETTINGS)
    train(first, range(3))
    first.save_state(tmp_path / "state")
    second = TorchTrainer(folder, SETTINGS)
    second.load_state(tmp_path / "state")
    assert second.updates == 3
    assert train(second, range(3, 6)) == losses[3:]
    assert second.updates == 6
    assert same(everything(second), everything(whole))


def test_loading_replaces_what_a_trainer_had_learnt_meanwhile(folder: Path, tmp_path: Path) -> None:
    trainer = TorchTrainer(folder, SETTINGS)
    train(trainer, range(2))
    trainer.save_state(tmp_path / "state")
    saved = everything(trainer)
    train(trainer, range(2, 5))
    trainer.load_state(tmp_path / "state")
    assert trainer.updates == 2
    assert same(everything(trainer), saved)


def test_a_trainer_that_never_stepped_can_be_saved_and_restored(folder: Path, tmp_path: Path) -> None:
    TorchTrainer(folder, SETTINGS).save_state(tmp_path / "state")
    trainer = TorchTrainer(folder, SETTINGS)
    train(trainer, range(1))
    trainer.load_state(tmp_path / "state")
    assert trainer.updates == 0
    assert same(everything(trainer), everything(TorchTrainer(folder, SETTINGS)))


def test_state_files_are_plain_safetensors_named_by_an_index(folder: Path, tmp_path: Path) -> None:
    trainer = TorchTrainer(folder, SETTINGS)
    train(trainer, range(1))
    trainer.save_state(tmp_path / "state")
    assert sorted(p.name for p in (tmp_path / "state").iterdir()) == sorted(FILES)
    masters = load_file(tmp_path / "state" / "masters.safetensors")
    assert same(masters, {name: m.detach() for name, m in trainer._masters.items()})
    index = json.loads((tmp_path / "state" / "trainer.json").read_text())
    assert index["schema"] == 1
    assert index["updates"] == 1
    assert sorted(index["files"]) == sorted(FILES[:3])


def test_saving_again_over_a_state_replaces_it_whole(folder: Path, tmp_path: Path) -> None:
    trainer = TorchTrainer(folder, SETTINGS)
    trainer.save_state(tmp_path / "state")
    train(trainer, range(2))
    trainer.save_state(tmp_path / "state")
    other = TorchTrainer(folder, SETTINGS)
    other.load_state(tmp_path / "state")
    assert other.updates == 2
    assert same(everything(other), everything(trainer))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [_cut, _flip, _empty, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_state_is_refused_by_its_file_and_changes_nothing(
    folder: Path, tmp_path: Path, name: str, damage
) -> None:
    source = TorchTrainer(folder, SETTINGS)
    train(source, range(2))
    source.save_state(tmp_path / "state")
    damage(tmp_path / "state" / name)
    trainer = TorchTrainer(folder, SETTINGS)
    train(trainer, range(1))
    before = everything(trainer)
    with pytest.raises(TrainerError) as caught:
        trainer.load_state(tmp_path / "state")
    assert name in str(caught.value)
    assert trainer.updates == 1
    assert same(everything(trainer), before)


def test_the_state_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    TorchTrainer(make_tiny_model(tmp_path / "wide", hidden=48), SETTINGS).save_state(tmp_path / "state")
    trainer = TorchTrainer(folder, SETTINGS)
    with pytest.raises(TrainerError, match="another model"):
        trainer.load_state(tmp_path / "state")


def test_a_file_of_another_state_is_refused_although_it_is_whole(folder: Path, tmp_path: Path) -> None:
    trainer = TorchTrainer(folder, SETTINGS)
    trainer.save_state(tmp_path / "a")
    train(trainer, range(1))
    trainer.save_state(tmp_path / "b")
    (tmp_path / "a" / "masters.safetensors").replace(tmp_path / "b" / "masters.safetensors")
    with pytest.raises(TrainerError, match=r"masters\.safetensors"):
        trainer.load_state(tmp_path / "b")


def test_a_state_saved_with_another_optimiser_is_refused_by_the_settings_name(
    folder: Path, tmp_path: Path
) -> None:
    TorchTrainer(folder, SETTINGS).save_state(tmp_path / "state")
    other = TorchTrainer(folder, replace(SETTINGS, beta2=0.5))
    with pytest.raises(TrainerError, match="beta2"):
        other.load_state(tmp_path / "state")


def test_settings_that_change_only_rounding_may_differ_at_a_resume(folder: Path, tmp_path: Path) -> None:
    TorchTrainer(folder, SETTINGS).save_state(tmp_path / "state")
    other = replace(SETTINGS, threads=2, micro_batch_tokens=500, rollout_dtype="bf16")
    TorchTrainer(folder, other).load_state(tmp_path / "state")


def test_a_state_that_names_a_setting_this_version_no_longer_has_is_loaded(
    folder: Path, tmp_path: Path
) -> None:
    TorchTrainer(folder, SETTINGS).save_state(tmp_path / "state")
    index = json.loads((tmp_path / "state" / "trainer.json").read_text())
    index["fingerprint"]["seed"] = 17
    (tmp_path / "state" / "trainer.json").write_text(json.dumps(index))
    trainer = TorchTrainer(folder, SETTINGS)
    trainer.load_state(tmp_path / "state")
    assert trainer.updates == 0


def test_a_folder_that_holds_no_state_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match=r"trainer\.json"):
        TorchTrainer(folder, SETTINGS).load_state(tmp_path)


@pytest.mark.parametrize("what", ["save_state", "save_model"])
def test_a_full_disk_is_a_trainer_error_with_the_path_and_training_goes_on(
    folder: Path, tmp_path: Path, what: str
) -> None:
    """The file-size limit fails a write as a full disk does: a part is there, the rest is refused."""
    trainer = TorchTrainer(folder, SETTINGS)
    train(trainer, range(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(TrainerError) as caught:
            getattr(trainer, what)(tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(tmp_path / "out") in str(caught.value)
    weights = [p.name for p in (tmp_path / "out").iterdir() if "safetensors" in p.name]
    assert weights == [], "no half-written file stays behind"
    assert trainer.step(batch(1), LossSpec(), 1e-3).applied
    getattr(trainer, what)(tmp_path / "out")


def test_a_target_that_is_a_file_is_a_trainer_error_with_its_path(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("here")
    trainer = TorchTrainer(folder, SETTINGS)
    for call in (trainer.save_state, trainer.save_model):
        with pytest.raises(TrainerError, match="taken"):
            call(tmp_path / "taken")


def test_a_saved_model_loads_in_transformers_and_says_what_the_trainer_says(
    folder: Path, tmp_path: Path
) -> None:
    trainer = TorchTrainer(folder, SETTINGS)
    train(trainer, range(2))
    trainer.save_model(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer("hello")["input_ids"]) == "hello"
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            assert torch.equal(tensor, dict(trainer.export())[name])
    one = Batch([1, 2, 3], [0, 1, 2], [0] * 3, [-1], [2], [4], [1.0], [-1.0], [0])
    expected = model(torch.tensor([[1, 2, 3]])).logits[0, -1].log_softmax(-1)[4].item()
    assert trainer.logprobs(one)[0] == pytest.approx(expected, abs=1e-4)


def test_a_saved_model_keeps_the_sources_dtype(folder: Path, tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "bf16")
    save_tensors(source, {name: t.bfloat16() for name, t in load_tensors(source).items()})
    trainer = TorchTrainer(source, SETTINGS)
    train(trainer, range(1))
    trainer.save_model(tmp_path / "out")
    for name, tensor in load_tensors(tmp_path / "out").items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, trainer._masters[name].detach().bfloat16())


def test_a_saved_model_can_be_the_next_trainers_start(folder: Path, tmp_path: Path) -> None:
    trainer = TorchTrainer(folder, SETTINGS)
    train(trainer, range(2))
    trainer.save_model(tmp_path / "out")
    again = TorchTrainer(tmp_path / "out", SETTINGS)
    assert again.updates == 0
    assert same(dict(again.export()), dict(trainer.export()))
