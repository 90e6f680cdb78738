"""Model folders: complete or refused with all absent parts; digests; copying companions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.tiny import make_tiny_model
from palestra.errors import ModelSourceError
from palestra.models.config import ModelConfig
from palestra.models.folder import check_folder, copy_model_files, fingerprint, folder_digest, nearest_folder
from palestra.models.tensors import load_tensors, save_tensors
from palestra.models.tokenizer import Tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny")


def test_a_complete_folder_passes(model: Path) -> None:
    check_folder(model)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_one_absent_part_is_named(model: Path, name: str) -> None:
    (model / name).unlink()
    with pytest.raises(ModelSourceError, match=f"lacks {name}"):
        check_folder(model)


def test_all_absent_parts_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError) as caught:
        check_folder(tmp_path)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert name in caught.value.what


@pytest.mark.parametrize("other", ["model.gguf", "pytorch_model.bin"])
def test_weights_in_another_format_are_pointed_at(model: Path, other: str) -> None:
    (model / "model.safetensors").rename(model / other)
    with pytest.raises(ModelSourceError) as caught:
        check_folder(model)
    assert other in caught.value.nearest
    assert "convert" in caught.value.nearest


@pytest.mark.parametrize("keep", [7, 500, -1])
def test_truncated_weights_are_found_before_anything_is_loaded(model: Path, keep: int) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelSourceError, match="damaged or cut short"):
        check_folder(model)


def test_an_unsupported_architecture_is_found_by_the_check(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(ModelSourceError, match="MambaForCausalLM"):
        check_folder(model)


def test_the_digest_is_that_of_the_content_not_of_the_place(model: Path, tmp_path: Path) -> None:
    again = make_tiny_model(tmp_path / "again")
    (again / "README.md").write_text("does not matter")
    assert folder_digest(fingerprint(model)) == folder_digest(fingerprint(again))


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
def test_one_changed_byte_changes_the_digest(model: Path, name: str) -> None:
    before = folder_digest(fingerprint(model))
    content = bytearray((model / name).read_bytes())
    content[-3] ^= 1
    (model / name).write_bytes(content)
    assert folder_digest(fingerprint(model)) != before


def test_a_removed_template_changes_the_digest(model: Path) -> None:
    (model / "chat_template.jinja").write_text("x")
    before = folder_digest(fingerprint(model))
    (model / "chat_template.jinja").unlink()
    assert folder_digest(fingerprint(model)) != before


def test_copying_takes_everything_but_the_weights(model: Path, tmp_path: Path) -> None:
    (model / "chat_template.jinja").write_text("template")
    (model / "notes.txt").write_text("not part of the model")
    names = copy_model_files(model, tmp_path / "export")
    expected = {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert set(names) == expected
    assert {path.name for path in (tmp_path / "export").iterdir()} == expected
    for name in names:
        assert (tmp_path / "export" / name).read_bytes() == (model / name).read_bytes()


def test_a_copy_with_weights_is_a_complete_model(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "export"
    copy_model_files(model, target, dtype="bfloat16")
    save_tensors(target, {name: tensor.bfloat16() for name, tensor in load_tensors(model).items()})
    check_folder(target)
    assert ModelConfig.from_folder(target).dtype == "bfloat16"
    assert Tokenizer.from_folder(target).encode("hi") == [104, 105]


def test_the_dtype_of_a_copy_replaces_both_spellings(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")
    (model / "config.json").write_text(json.dumps(config))
    copy_model_files(model, tmp_path / "export", dtype="bfloat16")
    written = json.loads((tmp_path / "export" / "config.json").read_text())
    assert written["dtype"] == "bfloat16"
    assert "torch_dtype" not in written


def test_the_nearest_folder_is_a_sibling_or_nothing(model: Path) -> None:
    assert nearest_folder(model.parent / "tiny2") == str(model)
    assert nearest_folder(model.parent / "completely-different") == ""
    assert nearest_folder(model.parent / "absent" / "tiny") == ""
