"""What a config.json may say, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.tiny import make_tiny_model
from helpers.tiny_gguf import rewrite_json
from palestra.errors import ModelSourceError
from palestra.models.config import ModelConfig, read_eos_token_ids


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
    rewrite_json(model / "config.json", architectures=["Qwen3ForCausalLM"])
    with pytest.raises(ModelSourceError, match="Qwen3ForCausalLM") as caught:
        ModelConfig.from_folder(model)
    assert "LlamaForCausalLM" in caught.value.expected
    assert caught.value.where.endswith("config.json")


def test_a_config_that_names_no_architecture_is_refused(model: Path) -> None:
    rewrite_json(model / "config.json", architectures=None)
    with pytest.raises(ModelSourceError, match="none named"):
        ModelConfig.from_folder(model)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("quantization_config", {"quant_method": "gptq"}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 10000.0}),
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
