"""Demonstrations as targets: the mean negative log-likelihood of the replies, and nothing of the prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.forest import TASK, double_model, trajectory
from helpers.tiny import make_tiny_model
from palestra.algorithms.sft import NLL, demonstration, pack_demonstrations
from palestra.trainer.settings import TrainerSettings
from palestra.trainer.torch_trainer import TorchTrainer

PAIRS = [([5, 6, 7], [8, 9]), ([5, 6, 7], [10, 11, 12, 13]), ([1], [2])]


def demonstrations():
    return [demonstration(f"d{n}", prompt, reply, TASK) for n, (prompt, reply) in enumerate(PAIRS)]


def test_only_the_reply_is_learnt_and_every_token_weighs_the_same() -> None:
    batch = pack_demonstrations(demonstrations())
    assert batch is not None
    assert list(batch.targets_N) == [8, 9, 10, 11, 12, 13, 2]
    assert list(batch.weights_N) == pytest.approx([1 / 7] * 7)
    assert batch.temperature == 1.0


def test_each_demonstration_may_weigh_the_same_instead() -> None:
    batch = pack_demonstrations(demonstrations(), aggregate="sequence")
    assert batch is not None
    assert list(batch.weights_N) == pytest.approx([1 / 6] * 2 + [1 / 12] * 4 + [1 / 3])


def test_the_loss_is_the_mean_cross_entropy_that_transformers_computes(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", seed=2)
    batch = pack_demonstrations(demonstrations())
    assert batch is not None
    model, terms = double_model(folder), []
    for prompt, reply in PAIRS:
        labels = torch.tensor([[-100] * len(prompt) + reply])
        mean = model(torch.tensor([prompt + reply]), labels=labels).loss
        terms.append(mean.item() * len(reply))
    report = TorchTrainer(folder, TrainerSettings(threads=1)).step(batch, NLL, 0.0)
    assert report.loss == pytest.approx(sum(terms) / 7, rel=1e-5)


def test_without_demonstrations_there_is_no_batch() -> None:
    assert pack_demonstrations([]) is None
    assert pack_demonstrations([trajectory("a", [((1,), False), ((2,), True)], reward=None)]) is None


def test_a_reply_without_a_prompt_is_refused_because_nothing_predicts_it() -> None:
    with pytest.raises(ValueError, match="begins with a sampled token"):
        pack_demonstrations([demonstration("d", [], [1, 2], TASK)])


def test_an_empty_reply_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sampled token"):
        demonstration("d", [1, 2], [], TASK)
