"""Text to token ids and back, exactly as the model's own tokenizer.json says.

Every token has bytes, and decoding is the concatenation of those bytes: joining
two id sequences and decoding equals decoding each and joining (up to a character
cut in two). Encoding adds nothing of its own; special tokens written in the text
become their ids. Nothing here needs transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from palestra.errors import ModelSourceError
from palestra.models.config import read_eos_token_ids, read_json

_SPECIAL_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
_HEX_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level vocabularies.

    Printable Latin-1 bytes stand for themselves; the others take the characters
    from U+0100 upwards in byte order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {byte: chr(byte if byte in printable else next(others)) for byte in range(256)}


_BYTE_OF = {char: byte for byte, char in byte_alphabet().items()}


@dataclass(frozen=True)
class Tokenizer:
    """One model's tokenizer. Build it with ``from_folder``."""

    vocab_size: int
    """Tokens the tokenizer knows; the model's embedding may have more rows."""
    eos_token_ids: tuple[int, ...]
    """What ends a completion: the generation settings' tokens and the tokenizer's own eos."""
    special_tokens: dict[str, str]
    """bos_token, eos_token, pad_token, unk_token: those the tokenizer names."""
    chat_template: str | None
    _core: tokenizers.Tokenizer = field(repr=False)
    _bytes_by_id: dict[int, bytes] = field(repr=False)
    _model_vocab_size: int = field(repr=False)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and the chat template of a model folder."""
        path = folder / "tokenizer.json"
        raw = read_json(path)
        try:
            core = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # `tokenizers` raises bare Exception
            raise ModelSourceError(f"tokenizer.json cannot be loaded: {error}", where=str(path)) from error
        core.no_truncation()
        core.no_padding()
        settings = read_json(p) if (p := folder / "tokenizer_config.json").is_file() else {}
        special = _special_tokens(settings)
        ends = list(read_eos_token_ids(folder))
        own = core.token_to_id(special.get("eos_token", ""))
        if own is not None and own not in ends:
            ends.append(own)
        size = max(core.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        model_size = read_json(p).get("vocab_size", size) if (p := folder / "config.json").is_file() else size
        return cls(
            vocab_size=size,
            eos_token_ids=tuple(ends),
            special_tokens=special,
            chat_template=_chat_template(folder, settings),
            _core=core,
            _bytes_by_id=_bytes_by_id(core, raw, path),
            _model_vocab_size=max(size, model_size),
        )

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``. No special token is added; those written in the text are parsed."""
        return self._core.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens included; a broken character becomes U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes one token stands for: possibly part of a character.

        Rows of the embedding beyond the tokenizer's vocabulary are empty; an id
        the model does not have raises ValueError.
        """
        found = self._bytes_by_id.get(token_id)
        if found is not None:
            return found
        if 0 <= token_id < self._model_vocab_size:
            return b""
        raise ValueError(f"token {token_id} is outside the vocabulary of {self._model_vocab_size}")

    def token_id(self, token: str) -> int | None:
        """The id of one vocabulary entry or special token, as it is spelt in tokenizer.json."""
        return self._core.token_to_id(token)


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for role in _SPECIAL_ROLES:
        value = settings.get(role)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[role] = text
    return found


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """``chat_template.jinja`` wins over tokenizer_config.json; of several named ones, ``default``."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = settings.get("chat_template")
    if isinstance(value, list):
        return {item["name"]: item["template"] for item in value}.get("default")
    return value if isinstance(value, str) else None


def _bytes_by_id(core: tokenizers.Tokenizer, raw: dict[str, Any], path: Path) -> dict[int, bytes]:
    decoders = json.dumps(raw.get("decoder"))
    if '"ByteLevel"' in decoders:
        to_bytes = _byte_level
    elif '"ByteFallback"' in decoders:
        to_bytes = _byte_fallback
    else:
        raise ModelSourceError(
            "tokenizer.json's decoder does not say which bytes a token stands for",
            where=str(path),
            expected="a ByteLevel or a ByteFallback decoder",
        )
    table = {index: to_bytes(token) for token, index in core.get_vocab(with_added_tokens=False).items()}
    added = core.get_added_tokens_decoder()
    return table | {index: token.content.encode() for index, token in added.items()}


def _byte_level(token: str) -> bytes:
    if all(char in _BYTE_OF for char in token):
        return bytes(_BYTE_OF[char] for char in token)
    return token.encode()


def _byte_fallback(token: str) -> bytes:
    found = _HEX_BYTE.fullmatch(token)
    return bytes([int(found[1], 16)]) if found else token.replace("\u2581", " ").encode()
