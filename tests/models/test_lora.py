"""LoRA adapters: what is computed, and what is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.tiny import make_tiny_model
from helpers.tiny_lora import ATTENTION, dense, make_lora, peft_name
from palestra.errors import ModelSourceError, WeightsError
from palestra.models.lora import LowRank, merged, parse_adapter, read_adapter
from palestra.models.tensors import load_tensors, write_safetensors

Q0 = "model.layers.0.self_attn.q_proj.weight"
DOWN1 = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return load_tensors(make_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


def parsed(
    model: dict[str, Tensor], config: dict[str, Any], tensors: dict[str, Tensor]
) -> dict[str, LowRank]:
    return parse_adapter(config, tensors.items(), {name: tuple(t.shape) for name, t in model.items()})


def refusal(model: dict[str, Tensor], config: dict[str, Any], tensors: dict[str, Tensor]) -> WeightsError:
    with pytest.raises(WeightsError) as caught:
        parsed(model, config, tensors)
    assert caught.value.where
    return caught.value


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    return folder


def test_merged_weights_are_the_dense_sum_in_the_weights_own_type(model: dict[str, Tensor]) -> None:
    config, tensors = make_lora(model, rank=4, alpha=6)
    for dtype in (torch.float32, torch.bfloat16):
        typed = {name: tensor.to(dtype) for name, tensor in model.items()}
        ours = dict(merged(typed.items(), parsed(model, config, tensors)))
        theirs = dense(typed, tensors, scale=6 / 4)
        assert list(ours) == list(typed)
        for name, tensor in ours.items():
            assert tensor.dtype == dtype
            assert torch.allclose(tensor, theirs[name], atol=1e-6, rtol=1e-2), name
            if dtype == torch.bfloat16:  # rounded once: a sum of rounded changes would differ in many places
                assert (tensor != theirs[name]).float().mean() < 0.01, name


def test_merging_leaves_the_model_as_it_was_and_takes_tensors_one_by_one(model: dict[str, Tensor]) -> None:
    config, tensors = make_lora(model)
    before = {name: tensor.clone() for name, tensor in model.items()}
    taken: list[str] = []

    def source() -> Any:
        for name, tensor in model.items():
            taken.append(name)
            yield name, tensor

    stream = merged(source(), parsed(model, config, tensors))
    first, _ = next(stream)
    assert taken == [first]
    list(stream)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.items())


def test_rank_stabilised_adapters_are_scaled_by_the_root_of_the_rank(model: dict[str, Tensor]) -> None:
    config, tensors = make_lora(model, rank=4, alpha=6)
    assert parsed(model, config, tensors)[Q0].scale == 6 / 4
    assert parsed(model, config | {"use_rslora": True}, tensors)[Q0].scale == 6 / math.sqrt(4)


def test_patterns_give_some_modules_their_own_rank_and_alpha(model: dict[str, Tensor]) -> None:
    config, tensors = make_lora(model, rank=4, alpha=6)
    _, wider = make_lora(model, rank=8, alpha=6)
    for name in (*wider,):
        if "layers.1" in name and "down_proj" in name:
            tensors[name] = wider[name]
    config |= {
        "rank_pattern": {r"layers\.1\.mlp\.down_proj": 8},
        "alpha_pattern": {"q_proj": 2, r".*\.down_proj": 16},
    }
    found = parsed(model, config, tensors)
    assert found[DOWN1].down_RI.shape[0] == 8
    assert found[DOWN1].scale == 16 / 8
    assert found[DOWN1.replace("layers.1", "layers.0")].scale == 16 / 4
    assert found[Q0].scale == 2 / 4
    assert found[Q0.replace("q_proj", "k_proj")].scale == 6 / 4
    # a name that merely ends alike is another module: "proj" fits none
    found = parsed(model, config | {"alpha_pattern": {"proj": 2, r".*\.down_proj": 16}}, tensors)
    assert found[Q0].scale == 6 / 4


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, ("q_proj", "v_proj")),
        ({"target_modules": r".*\.self_attn\.[qv]_proj"}, ("q_proj", "v_proj")),
        ({"target_modules": list(ATTENTION), "exclude_modules": ["k_proj", "o_proj"]}, ("q_proj", "v_proj")),
        ({"target_modules": "all-linear"}, (*ATTENTION, "gate_proj", "up_proj", "down_proj")),
    ],
)
def test_targets_are_given_as_names_as_an_expression_or_as_all(
    model: dict[str, Tensor], changes: dict[str, Any], names: tuple[str, ...]
) -> None:
    config, tensors = make_lora(model, targets=names)
    found = parsed(model, config | changes, tensors)
    assert set(found) == {name for name in model if name.split(".")[-2] in names}


def test_an_adapter_may_change_some_layers_only(model: dict[str, Tensor]) -> None:
    config, tensors = make_lora(model, targets=ATTENTION)
    second = {name: tensor for name, tensor in tensors.items() if "layers.1" in name}
    for layers in (1, [1]):
        assert len(parsed(model, config | {"layers_to_transform": layers}, second)) == 4
    assert "layers.0" in refusal(model, config, second).what


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("bias", "all"),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("fan_in_fan_out", True),
        ("peft_type", "IA3"),
        ("init_lora_weights", "pissa_niter_4"),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("trainable_token_indices", [3]),
        ("layer_replication", [[0, 1]]),
        ("a_setting_of_tomorrow", {"x": 1}),
    ],
)
def test_a_setting_that_changes_the_mathematics_is_refused_by_name(
    model: dict[str, Tensor], key: str, value: object
) -> None:
    config, tensors = make_lora(model)
    error = refusal(model, config | {key: value}, tensors)
    assert f"sets {key} = {value!r}, which this package does not compute" in error.what
    assert key in error.expected


def test_settings_without_effect_on_the_result_are_accepted(model: dict[str, Tensor]) -> None:
    config, tensors = make_lora(model)
    harmless = {
        "lora_dropout": 0.1,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "somewhere",
        "inference_mode": True,
        "init_lora_weights": "gaussian",
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
    }
    assert parsed(model, config | harmless, tensors).keys() == parsed(model, config, tensors).keys()


@pytest.mark.parametrize("changes", [{"r": 0}, {"r": None}, {"lora_alpha": "8"}, {"lora_alpha": math.nan}])
def test_a_rank_or_alpha_that_is_no_number_is_refused(
    model: dict[str, Tensor], changes: dict[str, Any]
) -> None:
    config, tensors = make_lora(model)
    assert "sets r = " in refusal(model, config | changes, tensors).what
    pattern = {"rank_pattern": {"q_proj": 0}}
    assert "q_proj the rank 0" in refusal(model, config | pattern, tensors).what


def test_a_config_without_a_type_or_with_a_broken_expression_is_refused(model: dict[str, Tensor]) -> None:
    config, tensors = make_lora(model)
    assert (
        "no peft_type" in refusal(model, {k: v for k, v in config.items() if k != "peft_type"}, tensors).what
    )
    for changes in ({"target_modules": "(q_proj"}, {"rank_pattern": {"(q": 8}}):
        assert "no regular expression" in refusal(model, config | changes, tensors).what


def test_a_tensor_that_fits_no_weight_is_refused_with_the_nearest(model: dict[str, Tensor]) -> None:
    config, tensors = make_lora(model)
    name = peft_name(Q0, "A")
    for strange in (
        name.replace("q_proj", "q_project"),
        name.replace("layers.0", "layers.7"),
        name.replace("lora_A", "lora_C"),
        "base_model.model.lm_head.lora_A.weight",
        Q0,
    ):
        error = refusal(model, config, tensors | {strange: torch.zeros(4, 32)})
        assert strange in error.what
    assert refusal(model, config, {name.replace("q_proj", "q_project"): tensors[name]}).nearest == name


def test_experts_and_routers_cannot_have_adapters(model: dict[str, Tensor]) -> None:
    gate, expert = "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.experts.3.up_proj.weight"
    sparse = model | {gate: torch.zeros(8, 32), expert: torch.zeros(24, 32)}
    config, tensors = make_lora(model, targets=ATTENTION)
    parsed(sparse, config, tensors)
    for name in (gate, expert):
        error = refusal(sparse, config, tensors | {peft_name(name, "A"): torch.zeros(4, 32)})
        assert "experts and routers cannot have adapters" in error.expected


@pytest.mark.parametrize("half", ["A", "B"])
def test_a_wrong_rank_shape_or_type_is_refused_with_what_was_expected(
    model: dict[str, Tensor], half: str
) -> None:
    config, tensors = make_lora(model, rank=4)
    name = peft_name(Q0, half)
    error = refusal(model, config, tensors | {name: torch.zeros(5, 7)})
    assert f"q_proj.lora_{half} has shape [5, 7]" in error.what
    assert "[4, 32]" in error.expected or "[32, 4]" in error.expected
    assert "rank 4 from adapter_config.json" in error.expected
    for wrong in (torch.zeros(4), torch.zeros(4, 32, dtype=torch.int8)):
        assert name in refusal(model, config, tensors | {name: wrong}).what
    assert "rank 8" in refusal(model, config | {"r": 8}, tensors).expected


def test_half_an_adapter_is_refused(model: dict[str, Tensor]) -> None:
    config, tensors = make_lora(model)
    without = {name: tensor for name, tensor in tensors.items() if name != peft_name(Q0, "B")}
    assert "no lora_B for model.layers.0.self_attn.q_proj" in refusal(model, config, without).what
    neither = {name: tensor for name, tensor in tensors.items() if "v_proj" not in name}
    assert "self_attn.v_proj, and it holds no tensors" in refusal(model, config, neither).what
    fewer = config | {"target_modules": ["q_proj"]}
    assert "its settings do not target" in refusal(model, fewer, tensors).what
    nothing = config | {"target_modules": ["query"]}
    assert "target no weight of this model" in refusal(model, nothing, {}).what
    config_shapes = {name: tuple(t.shape) for name, t in model.items()}
    with pytest.raises(WeightsError, match="given twice"):
        parse_adapter(config, [*tensors.items(), *tensors.items()], config_shapes)


def test_a_change_that_finds_no_weight_or_another_shape_is_an_error_not_a_silent_base(
    model: dict[str, Tensor],
) -> None:
    """verl#7495 (case 1): for two months the frozen base was served where the adapter was meant."""
    config, tensors = make_lora(model)
    changes = parsed(model, config, tensors)
    fewer = {name: tensor for name, tensor in model.items() if name != DOWN1}
    with pytest.raises(
        WeightsError, match=r"changes model\.layers\.1\.mlp\.down_proj\.weight, which was not"
    ):
        list(merged(fewer.items(), changes))
    with pytest.raises(WeightsError, match="as if its shape were") as caught:
        list(merged((model | {DOWN1: torch.zeros(3, 3)}).items(), changes))
    assert "[3, 3]" in caught.value.expected


def test_an_adapter_folder_gives_back_what_was_saved(model: dict[str, Tensor], tmp_path: Path) -> None:
    config, tensors = make_lora(model)
    found_config, found = read_adapter(save(tmp_path / "lora", config, tensors))
    assert found_config == config
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_a_folder_that_holds_no_adapter_says_what_one_holds(model: dict[str, Tensor], tmp_path: Path) -> None:
    folder = save(tmp_path / "lora", *make_lora(model))
    whole = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(whole[:-9])
    with pytest.raises(ModelSourceError, match="damaged or cut short"):
        read_adapter(folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ModelSourceError, match=r"has no adapter_model\.safetensors") as caught:
        read_adapter(folder)
    assert "never opened" in caught.value.nearest
    with pytest.raises(ModelSourceError, match=r"has no adapter_config\.json"):
        read_adapter(tmp_path)
