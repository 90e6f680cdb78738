"""Whole runs that train adapters, other families and against a running mean, killed and continued too."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import palestra as pa
from helpers.tiny import make_tiny_model
from helpers.tiny_families import make_family
from palestra.errors import PalestraError
from palestra.job import Job, TrainerConfig
from palestra.run import Run


def noise() -> Callable[[pa.Task, str], float]:
    """Made here, so a worker need not import this file."""

    def reward(task: pa.Task, reply: str) -> float:
        return zlib.crc32(reply.encode()) / 2**32

    return reward


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Job]:
    def build(family: str = "qwen2", **changes: Any) -> Job:
        folder = tmp_path / "models" / family
        if not folder.exists():
            if family == "tiny":
                make_tiny_model(folder, seed=1)
            else:
                make_family(folder, family)
        settings: dict[str, Any] = {
            "model": str(folder), "name": "tiny", "runs_dir": tmp_path / "runs", "steps": 2, "threads": 1,
            "environment": pa.SingleTurn([pa.Task(f"task {n}") for n in range(4)], noise()),
            "prompts_per_step": 2, "algorithm": pa.GRPO(group_size=4),
            "sampling": pa.Sampling(max_new_tokens=5), "optimizer": pa.Optimizer(learning_rate=1e-2),
            "evaluation": pa.Evaluation(before=False, after=False),
        }  # fmt: skip
        return Job(**{**settings, **changes})

    return build


def series(run: Run, name: str) -> list[float]:
    return [value for _, value in run.records.series(name)]


@pytest.mark.parametrize("family", ["qwen2", "qwen3-moe"])
def test_other_families_train_and_every_version_is_proven_in_the_engine(
    make: Callable[..., Job], family: str
) -> None:
    """Case 18: a family's export that the engine read otherwise would fail the proof of each sync."""
    run = make(family).train(panel=False)
    assert run.status == "finished"
    assert series(run, "train/applied") == [1.0, 1.0]
    assert max(series(run, "train/mismatch_max")) < 1e-3
    assert max(series(run, "sync/probe_gap_max")) < 1e-4


@pytest.mark.parametrize("family", ["tiny", "qwen2"])
def test_a_run_of_adapters_trains_and_leaves_both_the_adapter_and_the_merged_model(
    make: Callable[..., Job], family: str, tmp_path: Path
) -> None:
    job = make(family, trainer=TrainerConfig(lora="2:6:q_proj,v_proj"))
    run = job.train(panel=False)
    assert run.status == "finished"
    assert series(run, "sync/changed_tensors")[1:] == [4.0, 4.0], "two layers of two kinds"
    checkpoint = max((tmp_path / "runs" / "tiny" / "checkpoints").iterdir())
    adapter = load_file(checkpoint / "adapter" / "adapter_model.safetensors")
    assert len(adapter) == 8
    assert {len(t) for name, t in adapter.items() if "lora_A" in name} == {2}
    before = load_file(tmp_path / "models" / family / "model.safetensors")
    after = load_file(checkpoint / "model.safetensors")
    assert sum(not after[name].equal(before[name]) for name in before) == 4


def test_a_continued_run_of_adapters_arrives_where_the_whole_run_does(
    make: Callable[..., Job], tmp_path: Path
) -> None:
    lora = TrainerConfig(lora="2")
    whole = make(name="whole", steps=4, trainer=lora).train(panel=False)
    make(name="parts", steps=2, trainer=lora).train(panel=False)
    parts = make(name="parts", steps=4, trainer=lora).train(panel=False)
    assert series(parts, "train/loss") == series(whole, "train/loss")
    left, right = (
        load_file(max((tmp_path / "runs" / n / "checkpoints").iterdir()) / "model.safetensors")
        for n in ("whole", "parts")
    )
    assert all(tensor.equal(right[name]) for name, tensor in left.items())


def test_a_continued_run_may_not_change_its_adapter(make: Callable[..., Job]) -> None:
    make(trainer=TrainerConfig(lora="2")).train(panel=False)
    with pytest.raises(PalestraError, match=r"started with trainer\.lora = '2'"):
        make(steps=3, trainer=TrainerConfig(lora="4")).train(panel=False)


@pytest.mark.parametrize("lora", ["", "2"])
def test_a_running_mean_is_a_nearer_reference_than_the_start(make: Callable[..., Job], lora: str) -> None:
    far, near = (
        make(name=f"r{n}", steps=4, trainer=TrainerConfig(lora=lora),
             algorithm=pa.GRPO(group_size=4, kl_coef=1e-6, reference=reference)).train(panel=False)
        for n, reference in enumerate(("", "mean:0.5"))
    )  # fmt: skip
    assert series(near, "train/kl_reference")[-1] < 0.5 * series(far, "train/kl_reference")[-1]


@pytest.mark.parametrize("reference", ["mean:1.5", "mean:0", "mean:", "mean:x"])
def test_a_running_mean_without_a_decay_is_refused(make: Callable[..., Job], reference: str) -> None:
    with pytest.raises(PalestraError, match=r"nearest: mean:0\.99"):
        make(algorithm=pa.GRPO(kl_coef=0.1, reference=reference)).train(panel=False)


@pytest.mark.parametrize(
    ("lora", "parts"),
    [
        ("", (0, 0.0, ())),
        ("16", (16, 32.0, ())),
        ("8:4.5", (8, 4.5, ())),
        ("8:16:q_proj,v_proj", (8, 16.0, ("q_proj", "v_proj"))),
    ],
)
def test_an_adapter_is_written_in_one_word(lora: str, parts: tuple[int, float, tuple[str, ...]]) -> None:
    assert TrainerConfig(lora=lora).adapter() == parts


@pytest.mark.parametrize("lora", ["0", "-1", "8:", "8:x", "8:1:", "q_proj", "8,16", "8:1:a,,b"])
def test_what_is_no_adapter_is_refused(lora: str) -> None:
    with pytest.raises(PalestraError, match="as in 16, 16:32"):
        TrainerConfig(lora=lora)
