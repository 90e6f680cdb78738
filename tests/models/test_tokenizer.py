"""Tokens and their bytes, held against transformers' own reading of the same folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from helpers.tiny import IM_END, IM_START, make_tiny_model, write_tiny_tokenizer
from helpers.tiny_gguf import rewrite_json
from palestra.errors import ModelSourceError
from palestra.models.tokenizer import Tokenizer, byte_alphabet

TRICKY = (
    "",
    " ",
    "  two  spaces \n\n\ttab",
    "12345 6.7e-10 ½ ²",
    "don't WE'LL",
    "naïve café",
    "e\u0301 combining",
    "你好，世界",
    "مرحبا १२३",
    "👩‍👩‍👧‍👦 family",
    "\x00\x01\x7f\u200b\u00a0",
    "\ud7ff\U0010ffff",
    "\r\n\r\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    " <|im_end|> ",
    "<|im_start",
    "<|endoftext|><|endoftext|>",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def test_it_agrees_with_transformers_on_tricky_text(folder: Path, tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TRICKY:
        ids = theirs(text, add_special_tokens=False).input_ids
        assert tokenizer.encode(text) == ids, text
        decoded = theirs.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids) == decoded == text
    assert theirs.chat_template == tokenizer.chat_template
    assert theirs.eos_token_id in tokenizer.eos_token_ids


@given(st.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_any_text_comes_back_unchanged(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.lists(st.integers(0, 258), max_size=20), st.lists(st.integers(0, 258), max_size=20))
@settings(max_examples=100, deadline=None)
def test_decoding_is_joining_the_bytes_of_the_tokens(
    tokenizer: Tokenizer, left: list[int], right: list[int]
) -> None:
    """Regression for trl#5224, SkyRL#123 (CASES row 13): decode then re-encode drifted."""
    joined = b"".join(tokenizer.token_bytes(index) for index in left + right)
    assert tokenizer.decode(left + right) == joined.decode("utf-8", errors="replace")


def test_a_character_cut_in_two_keeps_its_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é")
    assert len(ids) == 2
    assert tokenizer.decode(ids[:1]) == "\ufffd"
    assert b"".join(map(tokenizer.token_bytes, ids)) == "é".encode()


def test_special_tokens_in_the_text_become_their_ids_and_none_is_added(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_start|>a<|im_end|>") == [IM_START, ord("a"), IM_END]
    assert tokenizer.encode("a") == [ord("a")]


def test_special_tokens_stay_in_decoded_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([IM_START, ord("a"), IM_END]) == "<|im_start|>a<|im_end|>"


def test_the_names_and_ids_of_special_tokens_are_known(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_tokens["bos_token"] == "<|im_start|>"
    assert tokenizer.token_id("<|im_end|>") == IM_END
    assert tokenizer.token_id("<|nothing|>") is None
    assert tokenizer.eos_token_ids == (IM_END,)
    assert tokenizer.vocab_size == 259


def test_the_tokenizers_own_end_token_ends_a_completion_too(folder: Path, tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    rewrite_json(tmp_path / "generation_config.json", eos_token_id=256)
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (256, IM_END)


def test_rows_beyond_the_vocabulary_are_empty_and_ids_beyond_the_rows_are_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    rewrite_json(tmp_path / "config.json", vocab_size=300)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.vocab_size == 259
    assert tokenizer.decode([ord("a"), 299, ord("b")]) == "ab"
    for wrong in (300, -1):
        with pytest.raises(ValueError, match="outside the vocabulary of 300"):
            tokenizer.decode([wrong])


def test_truncation_and_padding_written_in_the_file_do_not_apply(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    core = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    core.enable_truncation(4)
    core.enable_padding(length=8)
    core.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).encode("abcdefgh") == list(b"abcdefgh")
    assert Tokenizer.from_folder(tmp_path).encode("ab") == list(b"ab")


def test_a_template_file_wins_over_the_one_in_the_settings(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    assert "im_start" in str(Tokenizer.from_folder(tmp_path).chat_template)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_folder(tmp_path).chat_template == "from the file"


def test_of_several_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    rewrite_json(tmp_path / "tokenizer_config.json", chat_template=named)
    assert Tokenizer.from_folder(tmp_path).chat_template == "D"


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, chat_template=False)
    assert Tokenizer.from_folder(tmp_path).chat_template is None
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.from_folder(tmp_path).chat_template is None


def test_special_tokens_written_as_objects_are_read(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    rewrite_json(tmp_path / "tokenizer_config.json", pad_token={"content": "<|endoftext|>", "special": True})
    assert Tokenizer.from_folder(tmp_path).special_tokens["pad_token"] == "<|endoftext|>"


def test_a_sentencepiece_style_vocabulary_gives_bytes_too(tmp_path: Path) -> None:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581hi": 256, "\u2581": 257}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    core.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.token_bytes(256) == b" hi"
    assert tokenizer.token_bytes(0xC3) == b"\xc3"
    assert tokenizer.decode([256, 0xC3, 0xA9]) == " hié"


def test_a_tokenizer_whose_bytes_are_unknown_is_refused(tmp_path: Path) -> None:
    core = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelSourceError, match="which bytes"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["{", "{}", json.dumps({"model": {"type": "Nothing"}})])
def test_a_broken_tokenizer_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelSourceError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_an_absent_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_the_byte_alphabet_is_the_one_of_the_tokenizers_library() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert (alphabet[ord(" ")], alphabet[ord("\n")], alphabet[ord("a")]) == ("Ġ", "Ċ", "a")
