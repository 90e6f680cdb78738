"""A random Llama of a few thousand weights in Hugging Face layout, for every room's tests.

Token id b is byte b; 256 to 258 are <|endoftext|>, <|im_start|>, <|im_end|>. The
weights are spread enough that logits differ clearly, norms are not all ones, and
the same seed gives the same bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from palestra.models.tensors import save_tensors
from palestra.models.tokenizer import byte_alphabet

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT, IM_START, IM_END = 256, 257, 258
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: Literal["bytes"] = "bytes",
    max_positions: int = 256,
    chat_template: bool = True,
    tied: bool = True,
) -> Path:
    """Write the model into ``folder`` (created) and return it."""
    assert vocab == "bytes"
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 256 + len(SPECIALS),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tied,
        "bos_token_id": IM_START,
        "eos_token_id": IM_END,
        "pad_token_id": IM_END,
        "dtype": "float32",
    }
    generation = {"bos_token_id": IM_START, "eos_token_id": IM_END, "pad_token_id": IM_END}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    write_tiny_tokenizer(folder, chat_template=chat_template)
    save_tensors(folder, tiny_tensors(config, seed))
    return folder


def write_tiny_tokenizer(folder: Path, *, chat_template: bool = True) -> None:
    core = tokenizers.Tokenizer(models.BPE(vocab={c: b for b, c in byte_alphabet().items()}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIALS])
    core.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
    }
    if chat_template:
        settings["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def tiny_tensors(config: dict, seed: int) -> dict[str, torch.Tensor]:
    """Random weights for ``config`` under their Hugging Face names."""
    random = torch.Generator().manual_seed(seed)

    def linear(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) / columns**0.5

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(config["hidden_size"], generator=random)

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    embedding = (config["vocab_size"], hidden)
    tensors = {"model.embed_tokens.weight": 0.3 * torch.randn(*embedding, generator=random)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.input_layernorm.weight": norm(),
            f"{at}.self_attn.q_proj.weight": linear(hidden, hidden),
            f"{at}.self_attn.k_proj.weight": linear(kv, hidden),
            f"{at}.self_attn.v_proj.weight": linear(kv, hidden),
            f"{at}.self_attn.o_proj.weight": linear(hidden, hidden),
            f"{at}.post_attention_layernorm.weight": norm(),
            f"{at}.mlp.gate_proj.weight": linear(inner, hidden),
            f"{at}.mlp.up_proj.weight": linear(inner, hidden),
            f"{at}.mlp.down_proj.weight": linear(hidden, inner),
        }
    tensors["model.norm.weight"] = norm()
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = 0.3 * torch.randn(*embedding, generator=random)
    return tensors
