"""Tiny random models of every supported family, made and saved by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from helpers.tiny import IM_END, IM_START, SPECIALS, write_tiny_tokenizer

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-untied": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-biased": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3-moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3-moe-mixed": (
        "qwen3_moe",
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "head_dim": 16},
    ),
}
"""By name: transformers' model type, and what differs from the common sizes."""
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def make_family(folder: Path, name: str, *, seed: int = 0) -> Any:
    """Write the model into ``folder``; transformers' own network of it, for reference."""
    kind, changes = FAMILIES[name]
    common = {
        "vocab_size": 256 + len(SPECIALS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": IM_START,
        "eos_token_id": IM_END,
        "tie_word_embeddings": False,
    }
    experts = _EXPERTS if kind == "qwen3_moe" else {}
    config = transformers.AutoConfig.for_model(kind, **{**common, **experts, **changes})
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            drawn = torch.randn(parameter.shape, generator=random)
            if parameter.dim() == 1 and parameter.eq(1).all():
                parameter.copy_(1 + 0.1 * drawn)
            else:
                parameter.copy_(drawn * (0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5))
    network.save_pretrained(folder)
    write_tiny_tokenizer(folder)
    return network
