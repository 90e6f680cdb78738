"""The tiny model as a GGUF file and as a wheel around it: what the converter is tested on."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import gguf.quants
import numpy as np

from helpers.tiny import CHAT_TEMPLATE, SPECIALS
from palestra.models.config import ModelConfig
from palestra.models.tensors import load_tensors
from palestra.models.tokenizer import byte_alphabet

TOKENS = [byte_alphabet()[byte] for byte in range(256)] + list(SPECIALS)
MERGED = ["he", "ll", "hell", "12"]
"""Entries that merges make; "12" is unreachable where digits are split one by one."""
MERGES = ["h e", "l l", "he ll", "1 2"]
_SHORT_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(hf_name: str) -> str:
    outer = {
        "model.embed_tokens.weight": "token_embd",
        "model.norm.weight": "output_norm",
        "lm_head.weight": "output",
    }
    if hf_name in outer:
        return outer[hf_name] + ".weight"
    _, _, layer, rest = hf_name.split(".", 3)
    return f"blk.{layer}.{_SHORT_NAMES[rest.removesuffix('.weight')]}.weight"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of rotary rows, written row by row."""
    size = rows.shape[0] // heads
    out = np.empty_like(rows)
    for head in range(heads):
        for pair in range(size // 2):
            out[head * size + 2 * pair] = rows[head * size + pair]
            out[head * size + 2 * pair + 1] = rows[head * size + size // 2 + pair]
    return out


def write_gguf(
    model: Path,
    file: Path,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    arch: str = "llama",
    pre: str = "smollm",
    merges: bool = False,
    tokenizer: str = "gpt2",
    change: Callable[[dict[str, np.ndarray]], object] | None = None,
    extra: Callable[[gguf.GGUFWriter], object] | None = None,
) -> Path:
    """Write the tiny ``model`` as GGUF, its matrices stored as ``kind``.

    ``change`` may alter the named arrays and ``extra`` add metadata before they are written.
    """
    config = ModelConfig.from_folder(model)
    arrays = {}
    for name, tensor in load_tensors(model).items():
        array = tensor.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            array = interleave(array, config.heads if "q_proj" in name else config.kv_heads)
        arrays[gguf_name(name)] = array
    tokens = TOKENS + (MERGED if merges else [])
    if merges:
        rows = np.zeros((len(MERGED), config.hidden_size), np.float32)
        arrays["token_embd.weight"] = np.concatenate([arrays["token_embd.weight"], rows])
    if change:
        change(arrays)
    writer = gguf.GGUFWriter(file, arch)
    _write_metadata(writer, config, tokens, pre, tokenizer, MERGES if merges else [])
    if extra:
        extra(writer)
    for name, array in arrays.items():
        if array.ndim > 1 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _write_metadata(
    writer: gguf.GGUFWriter,
    config: ModelConfig,
    tokens: list[str],
    pre: str,
    tokenizer: str,
    merges: list[str],
) -> None:
    writer.add_block_count(config.layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIALS else 1 for token in tokens])
    if merges:
        writer.add_token_merges(merges)
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_pad_token_id(258)
    writer.add_unk_token_id(256)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_wheel(
    folder: Path, members: Mapping[str, bytes], *, name: str = "tiny_model", version: str = "1.0"
) -> Path:
    """A wheel that pip accepts, with ``members`` beside its metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def rewrite_json(path: Path, **changes: object) -> None:
    """Change top-level keys of a JSON file; None removes the key."""
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))
