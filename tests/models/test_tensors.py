"""Reading and writing weights: whole or an error that names the file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from helpers.tiny import make_tiny_model
from palestra.errors import ModelSourceError
from palestra.models import tensors as module
from palestra.models.tensors import INDEX, load_tensors, save_tensors, weight_files, write_safetensors


def shards(folder: Path) -> dict[str, torch.Tensor]:
    """Split a model in two shards with an index, as large models are published."""
    tensors = load_tensors(folder)
    names = sorted(tensors)
    parts = {"model-1-of-2.safetensors": names[:5], "model-2-of-2.safetensors": names[5:]}
    for file, held in parts.items():
        save_file({name: tensors[name].clone() for name in held}, folder / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    return tensors


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(
        torch.equal(left[name], right[name]) and left[name].dtype == right[name].dtype for name in left
    )


def test_what_is_saved_is_loaded_bit_for_bit_in_its_own_type(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16(), "c": torch.arange(6).view(2, 3).T}
    save_tensors(tmp_path / "new", tensors)
    assert_same(load_tensors(tmp_path / "new"), tensors)


MIXED = {
    "b.w": torch.randn(3, 5),
    "a.w": torch.randn(7),
    "odd": torch.randn(3).bfloat16(),
    "half": torch.randn(2, 2).half(),
    "count": torch.arange(3),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(2.5),
    "\u00e9": torch.arange(6.0).view(2, 3).T,
}


@pytest.mark.parametrize("names", [tuple(MIXED), tuple(reversed(MIXED))])
def test_a_file_is_what_the_safetensors_library_writes_byte_for_byte(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    """So a digest of a model folder says nothing of who wrote it."""
    tensors = {name: MIXED[name] for name in names if name != "half"}  # of one width the order is ours
    size, digest = write_safetensors(tmp_path / "ours", tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "theirs", {"format": "pt"})
    content = (tmp_path / "ours").read_bytes()
    assert content == (tmp_path / "theirs").read_bytes()
    assert (size, digest) == (len(content), xxhash.xxh3_128_hexdigest(content))


def test_every_type_comes_back_whatever_lies_beside_it(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "all", MIXED)
    assert_same(load_file(tmp_path / "all"), MIXED)


def test_tensors_are_saved_in_the_types_that_are_asked_for(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5)}
    save_tensors(tmp_path, tensors, {"a": torch.bfloat16, "unknown": torch.float16})
    assert_same(load_tensors(tmp_path), {"a": tensors["a"].bfloat16(), "b": tensors["b"]})


def test_a_tensor_is_converted_only_when_it_is_its_turn_to_be_written() -> None:
    """A checkpoint needs memory for one tensor, not for a second model."""
    tensors = {"a": torch.zeros(4), "b": torch.zeros(4)}
    blocks = module._safetensors_blocks(tensors, dict.fromkeys(tensors, torch.bfloat16))
    next(blocks)
    next(blocks)
    tensors["b"].fill_(7)
    assert bytes(next(blocks)) == bytes(module.tensor_bytes(torch.full((4,), 7, dtype=torch.bfloat16)))


def test_parameters_that_require_gradients_can_be_saved(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    save_tensors(tmp_path, {"p": parameter})
    assert torch.equal(load_tensors(tmp_path)["p"], torch.ones(2))


def test_a_sharded_model_loads_like_the_single_file(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    expected = shards(tmp_path)
    assert [path.name for path in weight_files(tmp_path)] == [
        "model-1-of-2.safetensors",
        "model-2-of-2.safetensors",
    ]
    assert_same(load_tensors(tmp_path), expected)


def test_a_single_file_wins_over_an_index_beside_it(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    expected = shards(tmp_path)
    save_tensors(tmp_path, {name: tensor + 1 for name, tensor in expected.items()})
    assert_same(load_tensors(tmp_path), {name: tensor + 1 for name, tensor in expected.items()})


def test_an_absent_shard_is_named(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    shards(tmp_path)
    (tmp_path / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ModelSourceError, match=r"lacks the shard model-2-of-2\.safetensors"):
        load_tensors(tmp_path)


def test_a_tensor_that_the_index_names_and_no_shard_holds_is_named(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    shards(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["model.layers.9.lost.weight"] = "model-1-of-2.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelSourceError, match=r"layers\.9\.lost"):
        load_tensors(tmp_path)


@pytest.mark.parametrize(
    "index", [{}, {"weight_map": []}, {"weight_map": {"a": "../../outside.safetensors"}}]
)
def test_an_index_that_names_no_files_or_files_elsewhere_is_refused(tmp_path: Path, index: object) -> None:
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelSourceError, match="weight_map"):
        load_tensors(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_file_that_was_cut_short_is_an_error_that_names_it(tmp_path: Path, keep: int) -> None:
    path = make_tiny_model(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelSourceError, match="damaged or cut short") as caught:
        load_tensors(tmp_path)
    assert caught.value.where == str(path)


def test_pickled_weights_are_pointed_at_but_never_opened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(ModelSourceError, match="no safetensors") as caught:
        load_tensors(tmp_path)
    assert "pytorch_model.bin" in caught.value.nearest


def test_tied_weights_given_twice_are_refused_by_name(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    with pytest.raises(ValueError, match="lm_head and embed"):
        save_tensors(tmp_path, {"embed": weight, "lm_head": weight})
    assert list(tmp_path.iterdir()) == []


def test_two_views_of_one_buffer_are_different_tensors(tmp_path: Path) -> None:
    buffer = torch.randn(2, 4)
    save_tensors(tmp_path, {"first": buffer[0], "second": buffer[1]})
    assert_same(load_tensors(tmp_path), {"first": buffer[0], "second": buffer[1]})


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tensors(tmp_path, {"w": torch.zeros(3)})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_tensors(tmp_path, {"w": torch.ones(3)})
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert torch.equal(load_tensors(tmp_path)["w"], torch.zeros(3))


def test_a_saved_file_can_be_read_by_others(tmp_path: Path) -> None:
    path = save_tensors(tmp_path, {"w": torch.zeros(3)})
    assert os.stat(path).st_mode & 0o044 == 0o044


def test_loaded_tensors_outlive_the_replacement_of_their_file(tmp_path: Path) -> None:
    save_tensors(tmp_path, {"w": torch.zeros(1000)})
    old = load_tensors(tmp_path)["w"]
    save_tensors(tmp_path, {"w": torch.ones(1000)})
    assert torch.equal(old, torch.zeros(1000))
    assert torch.equal(load_tensors(tmp_path)["w"], torch.ones(1000))
