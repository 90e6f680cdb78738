"""A small random Llama over single characters, as a complete model folder: a model without a download.

Equal arguments give equal bytes. One token is one character, so what a model
writes can be judged letter by letter; a character outside the alphabet is an
error of the tokenizer, never a token that quietly goes missing. The folder
appears whole or not at all, and no existing model is overwritten.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from torch import Tensor

from palestra.errors import ModelSourceError
from palestra.models.cache import build_folder
from palestra.models.config import ModelConfig
from palestra.models.llama import Llama
from palestra.models.tensors import save_tensors
from palestra.models.tokenizer import byte_alphabet

PAD, EOS = "<pad>", "<eos>"
"""Tokens 0 and 1; the alphabet's characters follow in its order."""


def make_character_model(
    folder: Path,
    *,
    alphabet: str,
    layers: int = 4,
    hidden: int = 128,
    intermediate: int = 384,
    heads: int = 4,
    kv_heads: int | None = None,
    max_positions: int = 64,
    seed: int = 0,
) -> Path:
    """Write the model into ``folder``, which must not exist or be empty, and return it.

    The defaults make 0.86M parameters with an alphabet of a dozen characters.
    ``kv_heads`` None is ``heads``. Raises ValueError for an alphabet with a repeated
    or non-ASCII character, or sizes that make no model, and ModelSourceError if the
    folder holds something or cannot be written.
    """
    _check_alphabet(alphabet)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelSourceError(
            "the folder for the new model is not empty",
            where=str(folder),
            expected="a folder that does not exist yet: an existing model is never overwritten",
        )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 2 + len(alphabet),
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        "head_dim": hidden // heads if heads > 0 else 0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": max_positions,
        "initializer_range": round(hidden**-0.5, 4) if hidden > 0 else 0,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "dtype": "float32",
    }

    def fill(target: Path) -> None:
        _write_json(target / "config.json", config)
        _write_json(target / "generation_config.json", {"eos_token_id": 1, "pad_token_id": 0})
        _write_tokenizer(target, alphabet, max_positions)
        try:
            parsed = ModelConfig.from_folder(target)
        except ModelSourceError as error:
            raise ValueError(f"these sizes make no model: {error.what}") from error
        save_tensors(target, dict(_random_tensors(parsed, seed)))

    folder.parent.mkdir(parents=True, exist_ok=True)
    build_folder(folder, fill)
    return folder


def _check_alphabet(alphabet: str) -> None:
    if not alphabet:
        raise ValueError("the alphabet is empty")
    if len(set(alphabet)) != len(alphabet):
        twice = next(char for char in alphabet if alphabet.count(char) > 1)
        raise ValueError(f"the alphabet holds {twice!r} twice")
    if not alphabet.isascii():
        foreign = next(char for char in alphabet if not char.isascii())
        raise ValueError(f"the alphabet holds {foreign!r}, which is not ASCII: it would be several tokens")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _write_tokenizer(folder: Path, alphabet: str, max_positions: int) -> None:
    spelt = byte_alphabet()
    vocabulary = {PAD: 0, EOS: 1, **{spelt[ord(char)]: 2 + index for index, char in enumerate(alphabet)}}
    # Without an unknown token in the vocabulary, WordLevel raises where other models drop the character.
    core = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )  # pyright: ignore[reportAttributeAccessIssue]  # the stubs know no setter
    core.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    core.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in (PAD, EOS)])
    core.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_positions,
        },
    )


def _random_tensors(config: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Norms of 1 and matrices N(0, 1/hidden), drawn in the order of the module's parameters.

    The usual N(0, 0.02^2) is meant for wide models: at width 128 it took three times as many steps.
    """
    random = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        module = Llama(config)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            yield name, torch.ones(parameter.shape)
        else:
            yield name, torch.randn(parameter.shape, generator=random) * config.hidden_size**-0.5
