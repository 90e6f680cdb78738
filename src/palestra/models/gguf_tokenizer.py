"""The tokenizer inside a GGUF file becomes tokenizer.json and tokenizer_config.json.

A byte-level BPE is rebuilt from the vocabulary and merges under the same ids. How
text is cut before merging is not stored in a GGUF but only named there; an unknown
name is refused, because a wrong cut gives other tokens and no error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from palestra.errors import ModelSourceError, nearest

PRE_TOKENIZERS = ("smollm", "gpt-2")
"""The cuts that are known here: smollm splits digits one by one, then both cut as GPT-2 does."""
_CONTROL, _USER_DEFINED = 3, 4
_ROLES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def write_tokenizer(meta: Mapping[str, Any], folder: Path, file: Path) -> None:
    """Write both files from GGUF metadata; ModelSourceError for a kind of tokenizer not known here."""
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    _tokenizer(meta, tokens, file).save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        # transformers rebuilds the cut of other classes and would lose the split of digits.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
    }
    settings |= {role: tokens[meta[key]] for role, key in _ROLES.items() if key in meta}
    if "tokenizer.chat_template" in meta:
        settings["chat_template"] = meta["tokenizer.chat_template"]
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _tokenizer(meta: Mapping[str, Any], tokens: list[str], file: Path) -> tokenizers.Tokenizer:
    kind = meta.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelSourceError(
            f"{file.name} has a tokenizer of kind {kind!r}, which is not supported",
            where=str(file),
            expected="byte-level BPE ('gpt2')",
        )
    if meta.get("tokenizer.ggml.add_bos_token", False):
        raise ModelSourceError(
            f"{file.name} wants a start token before every text, which is not supported", where=str(file)
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ValueError("the vocabulary names a token twice")
    pairs = (merge.split(" ") for merge in meta.get("tokenizer.ggml.merges", []))
    merges = [(left, right) for left, right in pairs]
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = _pre_tokenizer(meta, file)
    core.decoder = decoders.ByteLevel()
    types: list[int] = meta["tokenizer.ggml.token_type"]
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (_CONTROL, _USER_DEFINED):
            core.add_tokens([AddedToken(token, normalized=False, special=token_type == _CONTROL)])
    return core


def _pre_tokenizer(meta: Mapping[str, Any], file: Path) -> pre_tokenizers.PreTokenizer:
    name = str(meta.get("tokenizer.ggml.pre"))
    if name not in PRE_TOKENIZERS:
        raise ModelSourceError(
            f"{file.name} cuts text by the rule {name!r}, which is not supported",
            where=str(file),
            expected=f"one of {', '.join(PRE_TOKENIZERS)}",
            nearest=nearest(name, PRE_TOKENIZERS),
        )
    prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", False))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return byte_level
