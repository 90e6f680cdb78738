"""Memory of a long run: 200 updates take what the first ones take."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.networks import some_batch
from helpers.tiny import make_tiny_model
from helpers.tiny_families import make_family
from palestra.batches import LossSpec
from palestra.trainer.settings import TrainerSettings
from palestra.trainer.torch_trainer import TorchTrainer

SETTINGS = TrainerSettings(threads=1)


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def build(folder: Path, kind: str) -> TorchTrainer:
    if kind == "tiny":
        make_tiny_model(folder)
    else:
        make_family(folder, "qwen2")
    changes = {
        "lora": {"lora_rank": 2},
        "mean": {"reference_decay": 0.9},
        "twice": {"checkpoint_layers": True},
    }
    return TorchTrainer(folder, replace(SETTINGS, **changes.get(kind, {})))


@pytest.mark.parametrize("kind", ["tiny", "qwen2", "lora", "mean", "twice"])
def test_an_update_leaves_no_tensor_behind(tmp_path: Path, kind: str) -> None:
    torch.set_num_threads(1)
    trainer = build(tmp_path, kind)
    batches = [some_batch(seed) for seed in range(3)]
    counts = []
    for turn in range(5):
        for batch in batches:
            trainer.step(batch, LossSpec(), 1e-4)
            trainer.reference_logprobs(batch)
        if turn:
            counts.append(tensors())
    assert len(set(counts)) == 1, counts


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's own accounts")
@pytest.mark.parametrize("kind", ["tiny", "qwen2", "lora"])
def test_two_hundred_updates_have_a_memory_slope_of_zero(tmp_path: Path, kind: str) -> None:
    """Less than 2 KiB an update (half a page) over the last 150 of 200, when the allocator has settled."""
    torch.set_num_threads(1)
    trainer = build(tmp_path, kind)
    batches = [some_batch(seed) for seed in range(8)]
    seen = []
    for index in range(200):
        trainer.step(batches[index % 8], LossSpec(), 1e-4)
        seen.append(resident())
    settled = torch.tensor(seen[50:], dtype=torch.float64)
    steps = torch.arange(len(settled), dtype=torch.float64)
    slope = (steps - steps.mean()).dot(settled) / (steps - steps.mean()).square().sum()
    assert slope < 2048, f"{slope:.0f} bytes an update"
