"""What a config.json may say, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.tiny import make_tiny_model
from helpers.tiny_gguf import rewrite_json
from palestra.errors import ModelSourceError
from palestra.models.config import ModelConfig, RopeScaling, read_eos_token_ids


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny")


def test_every_field_comes_from_the_folder(model: Path) -> None:
    assert ModelConfig.from_folder(model) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        rope_theta=10_000.0,
        rms_norm_eps=1e-5,
        tied_embeddings=True,
        max_positions=256,
        eos_token_ids=(258,),
        bos_token_id=257,
        dtype="float32",
    )


def test_head_dim_and_kv_heads_follow_from_the_others_when_absent(model: Path) -> None:
    rewrite_json(model / "config.json", head_dim=None, num_key_value_heads=None)
    config = ModelConfig.from_folder(model)
    assert (config.head_dim, config.kv_heads) == (8, 4)


def test_rope_theta_is_read_in_the_old_and_the_new_spelling(model: Path) -> None:
    rewrite_json(model / "config.json", rope_theta=5000.0)
    assert ModelConfig.from_folder(model).rope_theta == 5000.0
    rewrite_json(
        model / "config.json", rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 7.0}
    )
    assert ModelConfig.from_folder(model).rope_theta == 7.0


def test_the_old_name_of_the_dtype_is_read(model: Path) -> None:
    rewrite_json(model / "config.json", dtype=None, torch_dtype="bfloat16")
    assert ModelConfig.from_folder(model).dtype == "bfloat16"


def test_end_tokens_of_the_generation_settings_win_over_the_config(model: Path) -> None:
    rewrite_json(model / "generation_config.json", eos_token_id=[256, 258])
    assert read_eos_token_ids(model) == (256, 258)
    (model / "generation_config.json").unlink()
    assert read_eos_token_ids(model) == (258,)
    rewrite_json(model / "config.json", eos_token_id=None)
    assert read_eos_token_ids(model) == ()


def test_another_architecture_is_refused_and_the_supported_ones_are_named(model: Path) -> None:
    rewrite_json(model / "config.json", architectures=["Qwen3NextForCausalLM"])
    with pytest.raises(ModelSourceError, match="Qwen3NextForCausalLM") as caught:
        ModelConfig.from_folder(model)
    for name in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
        assert name in caught.value.expected
    assert caught.value.where.endswith("config.json")


def test_a_config_that_names_no_architecture_is_refused(model: Path) -> None:
    rewrite_json(model / "config.json", architectures=None)
    with pytest.raises(ModelSourceError, match="none named"):
        ModelConfig.from_folder(model)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "gptq"}),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("partial_rotary_factor", 0.5),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}),
        ("rope_scaling", {"rope_type": "longrope", "short_factor": [1.0]}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 10000.0}),
        ("rope_parameters", {"full_attention": {"rope_type": "linear", "factor": 2.0}}),
        ("rope_parameters", {"rope_type": "default", "mrope_section": [16, 24, 24]}),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.25}),
    ],
)
def test_a_setting_that_changes_the_mathematics_is_refused_not_ignored(
    model: Path, key: str, value: object
) -> None:
    rewrite_json(model / "config.json", **{key: value})
    with pytest.raises(ModelSourceError, match="does not compute"):
        ModelConfig.from_folder(model)


def test_settings_that_change_nothing_are_accepted(model: Path) -> None:
    expected = ModelConfig.from_folder(model)
    rewrite_json(model / "config.json", attention_bias=False, rope_scaling={}, use_cache=True, unknown_key=1)
    assert ModelConfig.from_folder(model) == expected


def test_a_bias_that_the_family_does_not_know_is_refused(model: Path) -> None:
    rewrite_json(model / "config.json", architectures=["Qwen3ForCausalLM"], mlp_bias=True)
    with pytest.raises(ModelSourceError, match="mlp_bias = True for Qwen3ForCausalLM"):
        ModelConfig.from_folder(model)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"rope_scaling": LLAMA3}, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeScaling("linear", 2.0)),
        ({"rope_scaling": {"rope_type": "default"}}, None),
        ({"rope_scaling": None}, None),
    ],
)
def test_scaled_rotary_positions_are_read_in_both_spellings(
    model: Path, rope: dict[str, object], scaling: RopeScaling | None
) -> None:
    rewrite_json(model / "config.json", rope_theta=5e5, **rope)
    config = ModelConfig.from_folder(model)
    assert (config.rope_theta, config.rope_scaling) == (5e5, scaling)
    assert config.beyond_llama() == ()


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "original_max_position_embeddings"])
def test_a_missing_number_of_the_scaling_is_named(model: Path, key: str) -> None:
    rewrite_json(model / "config.json", rope_scaling={k: v for k, v in LLAMA3.items() if k != key})
    with pytest.raises(ModelSourceError, match=f"lacks {key} for rotary positions of type 'llama3'"):
        ModelConfig.from_folder(model)


@pytest.mark.parametrize(
    "changes",
    [{"factor": 0}, {"factor": "x"}, {"low_freq_factor": 4.0}, {"original_max_position_embeddings": 0}],
)
def test_scaling_that_makes_no_sense_is_refused(model: Path, changes: dict[str, object]) -> None:
    rewrite_json(model / "config.json", rope_scaling=LLAMA3 | changes)
    with pytest.raises(ModelSourceError, match="inconsistent"):
        ModelConfig.from_folder(model)


def test_scaling_that_is_no_table_is_refused(model: Path) -> None:
    rewrite_json(model / "config.json", rope_scaling=2.0)
    with pytest.raises(ModelSourceError, match=r"inconsistent: rotary positions are described by 2\.0"):
        ModelConfig.from_folder(model)


@pytest.mark.parametrize(
    ("architecture", "settings", "beyond"),
    [
        ("LlamaForCausalLM", {}, ()),
        ("LlamaForCausalLM", {"attention_bias": True}, ("qkv_bias", "output_bias")),
        ("LlamaForCausalLM", {"mlp_bias": True}, ("mlp_bias",)),
        ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 4096}, ("qkv_bias",)),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention"] * 2}, ("qk_norm",)),
        ("Qwen3ForCausalLM", {"attention_bias": True}, ("qkv_bias", "output_bias", "qk_norm")),
    ],
)
def test_each_family_has_its_biases_and_norms(
    model: Path, architecture: str, settings: dict[str, object], beyond: tuple[str, ...]
) -> None:
    rewrite_json(model / "config.json", architectures=[architecture], **settings)
    assert ModelConfig.from_folder(model).beyond_llama() == beyond


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, {0, 1, 2, 3, 4, 5}),
        ({"decoder_sparse_step": 2}, {1, 3, 5}),
        ({"mlp_only_layers": [0, 3]}, {1, 2, 4, 5}),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, {1, 5}),
        ({"num_experts": 0}, set()),
    ],
)
def test_the_layers_with_experts_follow_from_the_step_and_the_exceptions(
    model: Path, changes: dict[str, object], sparse: set[int]
) -> None:
    rewrite_json(model / "config.json", **(EXPERTS | changes))
    assert ModelConfig.from_folder(model).sparse_layers == sparse


def test_the_number_of_experts_is_read_in_the_old_and_the_new_spelling(model: Path) -> None:
    rewrite_json(model / "config.json", **EXPERTS, norm_topk_prob=True)
    old = ModelConfig.from_folder(model)
    rewrite_json(model / "config.json", num_experts=None, num_local_experts=8)
    assert ModelConfig.from_folder(model) == old
    assert (old.experts, old.experts_per_token, old.moe_intermediate_size) == (8, 2, 24)
    assert old.norm_topk_prob
    rewrite_json(model / "config.json", norm_topk_prob=None)
    assert not ModelConfig.from_folder(model).norm_topk_prob


@pytest.mark.parametrize("key", ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])
def test_a_missing_size_of_the_experts_is_named(model: Path, key: str) -> None:
    rewrite_json(model / "config.json", **(EXPERTS | {key: None}))
    with pytest.raises(ModelSourceError, match=f"lacks {key}"):
        ModelConfig.from_folder(model)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts_per_tok": 9},
        {"num_experts_per_tok": 0},
        {"decoder_sparse_step": 0},
        {"mlp_only_layers": 3},
    ],
)
def test_experts_that_do_not_fit_together_are_refused(model: Path, changes: dict[str, object]) -> None:
    rewrite_json(model / "config.json", **(EXPERTS | changes))
    with pytest.raises(ModelSourceError, match="inconsistent"):
        ModelConfig.from_folder(model)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers"])
def test_a_missing_size_is_named(model: Path, key: str) -> None:
    rewrite_json(model / "config.json", **{key: None})
    with pytest.raises(ModelSourceError, match=f"lacks {key}"):
        ModelConfig.from_folder(model)


@pytest.mark.parametrize("changes", [{"num_key_value_heads": 3}, {"head_dim": 7}, {"num_attention_heads": 0}])
def test_sizes_that_do_not_fit_together_are_refused(model: Path, changes: dict[str, object]) -> None:
    rewrite_json(model / "config.json", **changes)
    with pytest.raises(ModelSourceError, match="inconsistent"):
        ModelConfig.from_folder(model)


@pytest.mark.parametrize(("text", "problem"), [("{", "JSON"), ("[]", "no JSON object"), ("\udcff", "JSON")])
def test_a_malformed_file_is_named(model: Path, text: str, problem: str) -> None:
    (model / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelSourceError, match=problem):
        ModelConfig.from_folder(model)


def test_an_absent_config_says_what_a_model_folder_holds(model: Path) -> None:
    (model / "config.json").unlink()
    with pytest.raises(ModelSourceError, match=r"has no config\.json") as caught:
        ModelConfig.from_folder(model)
    assert "safetensors" in caught.value.expected


def test_the_tiny_model_is_the_same_for_the_same_seed_and_another_for_another(tmp_path: Path) -> None:
    one, same = make_tiny_model(tmp_path / "a", seed=1), make_tiny_model(tmp_path / "b", seed=1)
    other = make_tiny_model(tmp_path / "c", seed=2)
    read = [(folder / "model.safetensors").read_bytes() for folder in (one, same, other)]
    assert read[0] == read[1] != read[2]


def test_the_tiny_model_can_be_made_without_a_chat_template(tmp_path: Path) -> None:
    settings = json.loads(
        (make_tiny_model(tmp_path, chat_template=False) / "tokenizer_config.json").read_text()
    )
    assert "chat_template" not in settings
    assert settings["eos_token"] == "<|im_end|>"
