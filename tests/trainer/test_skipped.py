"""An update that is skipped leaves its batch behind, and the batch shows again why."""

from __future__ import annotations

import json
from array import array
from dataclasses import fields, replace
from pathlib import Path

import pytest

from helpers.networks import some_batch
from helpers.tiny import make_tiny_model
from palestra.batches import Batch, LossSpec
from palestra.errors import TrainerError
from palestra.trainer.settings import TrainerSettings
from palestra.trainer.skipped import load_batch, save_batch
from palestra.trainer.torch_trainer import TorchTrainer

SETTINGS = TrainerSettings(threads=1)


def exploding() -> Batch:
    batch = some_batch(3)
    return replace(batch, weights_N=array("f", [3e38] * batch.target_count), top_k=7)


def test_a_skipped_update_can_be_repeated_from_its_file(tmp_path: Path) -> None:
    trainer = TorchTrainer(make_tiny_model(tmp_path / "model"), SETTINGS)
    trainer.skipped_folder = tmp_path / "skipped"
    trainer.step(some_batch(), LossSpec(), 1e-3)
    report = trainer.step(exploding(), LossSpec(clip_high=0.4), 1e-3)
    assert not report.applied
    assert report.batch_file == str(tmp_path / "skipped" / "after-1.json")
    batch, loss = load_batch(Path(report.batch_file))
    assert loss == LossSpec(clip_high=0.4)
    for field in fields(Batch):
        assert getattr(batch, field.name) == getattr(exploding(), field.name), field.name
    assert not trainer.step(batch, loss, 1e-3).applied
    assert json.loads(Path(report.batch_file).read_text())["found"]["grad_norm"] in ("inf", "nan")


def test_an_applied_update_leaves_no_file(tmp_path: Path) -> None:
    trainer = TorchTrainer(make_tiny_model(tmp_path / "model"), SETTINGS)
    trainer.skipped_folder = tmp_path / "skipped"
    assert trainer.step(some_batch(), LossSpec(), 1e-3).batch_file == ""
    assert not (tmp_path / "skipped").exists()


def test_without_a_folder_a_skipped_update_is_only_reported(tmp_path: Path) -> None:
    trainer = TorchTrainer(make_tiny_model(tmp_path / "model"), SETTINGS)
    report = trainer.step(exploding(), LossSpec(), 1e-3)
    assert (report.applied, report.batch_file) == (False, "")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"batch": {}, "loss": {}}', '{"batch": 1}'])
def test_a_file_that_holds_no_batch_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "after-1.json").write_text(text)
    with pytest.raises(TrainerError, match="holds no batch"):
        load_batch(tmp_path / "after-1.json")


def test_a_file_cut_short_and_an_absent_one_are_refused(tmp_path: Path) -> None:
    path = save_batch(tmp_path, 4, some_batch(), LossSpec(), 0.5, float("nan"))
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(TrainerError, match="after-4"):
        load_batch(path)
    with pytest.raises(TrainerError, match="after-5"):
        load_batch(tmp_path / "after-5.json")
