"""Converting GGUF: every tensor in its place, or an error that names what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch

from helpers.tiny import CHAT_TEMPLATE, make_tiny_model
from helpers.tiny_gguf import interleave, write_gguf
from palestra.errors import ModelSourceError
from palestra.models.config import ModelConfig
from palestra.models.folder import check_folder
from palestra.models.gguf import convert_gguf, unpermute
from palestra.models.tensors import load_tensors
from palestra.models.tokenizer import Tokenizer

Q8 = gguf.GGMLQuantizationType.Q8_0
F16 = gguf.GGMLQuantizationType.F16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), heads=4, kv_heads=2)


def convert(model: Path, tmp_path: Path, **options: Any) -> Path:
    folder = tmp_path / "converted"
    folder.mkdir()
    convert_gguf(write_gguf(model, tmp_path / "model.gguf", **options), folder, lambda line: None)
    return folder


def test_float_weights_come_out_bit_for_bit(model: Path, tmp_path: Path) -> None:
    converted, original = load_tensors(convert(model, tmp_path)), load_tensors(model)
    assert converted.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(converted[name], tensor), name
    assert {tensor.dtype for tensor in converted.values()} == {torch.float32}


def test_an_untied_output_matrix_is_kept(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "untied", tied=False)
    folder = convert(model, tmp_path)
    assert torch.equal(load_tensors(folder)["lm_head.weight"], load_tensors(model)["lm_head.weight"])
    assert not ModelConfig.from_folder(folder).tied_embeddings


def test_quantised_weights_come_out_as_bfloat16_near_the_original(model: Path, tmp_path: Path) -> None:
    folder = convert(model, tmp_path, kind=Q8)
    converted, original = load_tensors(folder), load_tensors(model)
    assert ModelConfig.from_folder(folder).dtype == "bfloat16"
    for name, tensor in original.items():
        assert converted[name].dtype == torch.bfloat16
        torch.testing.assert_close(converted[name].float(), tensor, rtol=0.01, atol=0.02)


def test_half_precision_weights_are_widened_so_that_nothing_is_lost(model: Path, tmp_path: Path) -> None:
    folder = convert(model, tmp_path, kind=F16)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(load_tensors(folder)[name], load_tensors(model)[name].half().float())


def test_the_config_comes_from_the_metadata(model: Path, tmp_path: Path) -> None:
    folder = convert(model, tmp_path)
    assert ModelConfig.from_folder(folder) == ModelConfig.from_folder(model)
    written = json.loads((folder / "config.json").read_text())
    assert written["rms_norm_eps"] == 1e-5
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 257, "eos_token_id": 258, "pad_token_id": 258}


def test_the_tokenizer_has_the_same_ids_template_and_special_tokens(model: Path, tmp_path: Path) -> None:
    ours, original = Tokenizer.from_folder(convert(model, tmp_path)), Tokenizer.from_folder(model)
    text = "<|im_start|>user\nhé 12 \t你<|im_end|>"
    assert ours.encode(text) == original.encode(text)
    assert ours.chat_template == CHAT_TEMPLATE
    assert ours.special_tokens == original.special_tokens
    assert ours.eos_token_ids == (258,)


def test_merges_apply_within_words_and_never_across_digits(model: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(convert(model, tmp_path, merges=True))
    assert tokenizer.encode("hello") == [261, ord("o")]
    assert tokenizer.encode("12") == [ord("1"), ord("2")], "smollm splits digits one by one before merging"


def test_the_gpt2_cut_keeps_digits_together(model: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(convert(model, tmp_path, merges=True, pre="gpt-2"))
    assert tokenizer.encode("12") == [262]


def test_transformers_loads_the_folder_and_computes_the_same_logits(model: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = convert(model, tmp_path, merges=True)
    ids = torch.tensor([[5, 17, 230, 99]])
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        original = transformers.AutoModelForCausalLM.from_pretrained(model)(ids).logits
    torch.testing.assert_close(theirs[..., :259], original)
    tokenizer, auto = Tokenizer.from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("hello 123 ½", "<|im_start|>hell\n<|im_end|>", "don't\u00a0stop"):
        assert auto(text, add_special_tokens=False).input_ids == tokenizer.encode(text)


def test_converting_twice_gives_the_same_bytes(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, two = convert(model, tmp_path / "a", kind=Q8), convert(model, tmp_path / "b", kind=Q8)
    for path in one.iterdir():
        assert path.read_bytes() == (two / path.name).read_bytes(), path.name
    check_folder(one)


@pytest.mark.parametrize(("rows", "heads"), [(8, 1), (32, 4), (24, 3)])
def test_unpermute_undoes_llama_cpps_order(rows: int, heads: int) -> None:
    array = np.random.default_rng(0).normal(size=(rows, 5)).astype(np.float32)
    shuffled = interleave(array, heads)
    assert not np.array_equal(shuffled, array)
    np.testing.assert_array_equal(unpermute(shuffled, heads), array)


def test_an_unknown_tensor_stops_the_conversion(model: Path, tmp_path: Path) -> None:
    def add_bias(arrays: dict[str, np.ndarray]) -> None:
        arrays["blk.0.attn_q.bias"] = np.zeros(32, np.float32)

    with pytest.raises(ModelSourceError, match=r"unknown tensor blk\.0\.attn_q\.bias") as caught:
        convert(model, tmp_path, change=add_bias)
    assert caught.value.nearest == "blk.0.attn_q.weight"


def test_a_missing_tensor_stops_the_conversion(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"lacks blk\.1\.ffn_up\.weight"):
        convert(model, tmp_path, change=lambda arrays: arrays.pop("blk.1.ffn_up.weight"))


def test_a_tensor_of_another_shape_stops_the_conversion(model: Path, tmp_path: Path) -> None:
    def widen(arrays: dict[str, np.ndarray]) -> None:
        arrays["blk.1.attn_k.weight"] = np.zeros((32, 32), np.float32)

    with pytest.raises(ModelSourceError, match=r"blk\.1\.attn_k\.weight has shape \(32, 32\)"):
        convert(model, tmp_path, change=widen)


def test_another_architecture_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="'qwen3' is not supported"):
        convert(model, tmp_path, arch="qwen3")


def test_scaled_rotary_positions_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="scaling of rotary positions"):
        convert(model, tmp_path, extra=lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN))


def test_an_unknown_cut_of_the_text_is_refused_because_it_would_give_other_tokens(
    model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelSourceError, match="cuts text by the rule 'llama-bpe'") as caught:
        convert(model, tmp_path, pre="llama-bpe")
    assert "smollm" in caught.value.expected


def test_another_kind_of_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="tokenizer of kind 'llama'"):
        convert(model, tmp_path, tokenizer="llama")


def test_an_automatic_start_token_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="start token"):
        convert(model, tmp_path, extra=lambda writer: writer.add_add_bos_token(True))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04 something else entirely", b"\x00" * 4096])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ModelSourceError, match="cannot be read as GGUF"):
        convert_gguf(tmp_path / "x.gguf", tmp_path, lambda line: None)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9, 0.999])
def test_a_gguf_that_was_cut_short_is_refused(model: Path, tmp_path: Path, share: float) -> None:
    path = write_gguf(model, tmp_path / "model.gguf")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelSourceError):
        convert_gguf(path, tmp_path, lambda line: None)


def test_special_tokens_are_marked_so_in_tokenizer_json(model: Path, tmp_path: Path) -> None:
    core = tokenizers.Tokenizer.from_file(str(convert(model, tmp_path) / "tokenizer.json"))
    added = core.get_added_tokens_decoder()
    assert {index: token.special for index, token in added.items()} == {256: True, 257: True, 258: True}


def test_progress_is_told_in_order(model: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    (tmp_path / "out").mkdir()
    convert_gguf(write_gguf(model, tmp_path / "m.gguf"), tmp_path / "out", lines.append)
    assert lines == ["converting m.gguf to safetensors (20 tensors)", "writing model.safetensors"]
