from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.fakes import FakeTrainer, MirrorEngine
from palestra.errors import WeightsError
from palestra.models.tensors import entry_of, tensor_digest
from palestra.types import Version
from palestra.weights.manifests import full_manifest
from palestra.weights.sync import WeightSync, probe_batch

PROBE = (3, 4, 5, 6)


def pair() -> tuple[FakeTrainer, MirrorEngine, WeightSync]:
    trainer, engine = FakeTrainer(), MirrorEngine()
    return trainer, engine, WeightSync(trainer, engine, PROBE, "fp32")


async def test_a_first_sync_starts_the_engine_at_the_trainers_version() -> None:
    trainer, engine, sync = pair()
    report = await sync.serve(Version("run", 0))
    assert engine.version == Version("run", 0)
    assert torch.equal(engine.weight, trainer.weight)
    assert report.probe_gap_max == 0.0
    assert report.nbytes == 32
    assert sync.served is not None
    assert sync.served.version == Version("run", 0)


async def test_every_update_reaches_the_engine_and_says_what_changed() -> None:
    trainer, engine, sync = pair()
    await sync.serve(Version("run", 0))
    trainer.weight = trainer.weight + 0.25
    report = await sync.serve(Version("run", 1))
    assert torch.equal(engine.weight, trainer.weight)
    assert report.changed_tensors == 1, "the zero-size tensor did not change"


async def test_sync_with_no_changed_weight_is_refused() -> None:
    """verl#7495, unsloth PR#8701 (cases 1, 2): syncs that shipped nothing looked like slow learning."""
    _, engine, sync = pair()
    await sync.serve(Version("run", 0))
    with pytest.raises(WeightsError, match="changed no weight since run@0"):
        await sync.serve(Version("run", 1))
    assert engine.version == Version("run", 0)
    await sync.serve(Version("run", 1), allow_unchanged=True)


async def test_a_flipped_bit_on_the_way_is_found_before_the_version_is_served() -> None:
    trainer, engine, sync = pair()
    await sync.serve(Version("run", 0))
    trainer.weight = trainer.weight + 1
    engine.flip_bit = True
    with pytest.raises(WeightsError, match="received other bytes"):
        await sync.serve(Version("run", 1))
    assert engine.version == Version("run", 0)
    assert sync.served is not None
    assert sync.served.version.number == 0


async def test_an_engine_that_goes_on_computing_with_old_weights_is_found() -> None:
    """trl#5312 (case 3): the right bytes arrived and the engine did not use them."""
    trainer, engine, sync = pair()
    await sync.serve(Version("run", 0))
    trainer.weight = trainer.weight + 1
    engine.keep_old_weights = True
    with pytest.raises(WeightsError, match="probe logprobs differ"):
        await sync.serve(Version("run", 1))


async def test_an_engine_that_reports_another_version_is_found() -> None:
    trainer, engine, sync = pair()
    await sync.serve(Version("run", 0))
    trainer.weight = trainer.weight + 1
    engine.stale_version = True
    with pytest.raises(WeightsError, match="serves run@0 after a sync of run@1"):
        await sync.serve(Version("run", 1))


async def test_weights_that_are_not_numbers_are_never_proven() -> None:
    trainer, _, sync = pair()
    trainer.weight = trainer.weight * float("nan")
    with pytest.raises(WeightsError, match="probe logprobs differ"):
        await sync.serve(Version("run", 0))


def test_a_probe_needs_two_tokens() -> None:
    with pytest.raises(ValueError, match="two tokens"):
        WeightSync(FakeTrainer(), MirrorEngine(), (1,), "fp32")
    batch = probe_batch(PROBE)
    assert list(batch.targets_N) == [4, 5, 6]
    assert list(batch.predictors_N) == [0, 1, 2]


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=64), st.data())
def test_the_digest_is_of_the_bytes(values: list[float], data: st.DataObject) -> None:
    tensor = torch.tensor(values)
    digest = tensor_digest(tensor)
    assert digest == tensor_digest(tensor.clone())
    flipped = tensor.clone()
    flipped.view(torch.uint8)[data.draw(st.integers(0, 4 * len(values) - 1))] ^= 1 << data.draw(
        st.integers(0, 7)
    )
    assert digest != tensor_digest(flipped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_entries_name_dtype_shape_and_size(dtype: torch.dtype) -> None:
    entry = entry_of("w", torch.zeros(2, 3, dtype=dtype))
    assert entry.shape == (2, 3)
    assert entry.nbytes == 6 * dtype.itemsize
    assert entry.dtype == {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[str(dtype).split(".")[1]]


def test_a_transposed_view_has_the_digest_of_its_row_major_copy() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    assert tensor_digest(tensor) == tensor_digest(tensor.contiguous())
    assert tensor_digest(tensor) != tensor_digest(torch.arange(6.0))


def test_a_manifest_of_real_tensors_names_each_once() -> None:
    manifest = full_manifest(Version("r", 1), [("a", torch.ones(2)), ("b", torch.zeros(0, 4))])
    assert [e.name for e in manifest.tensors] == ["a", "b"]
    assert manifest.nbytes == 8
    with pytest.raises(ValueError, match="twice"):
        full_manifest(Version("r", 1), [("a", torch.ones(2)), ("a", torch.ones(2))])
