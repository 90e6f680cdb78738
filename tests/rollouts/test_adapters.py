"""Adapters served unmerged: the numbers of merged weights, row by row, beside rows without one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.tiny_families import make_family
from helpers.tiny_lora import ATTENTION, EVERYWHERE, dense, make_lora, peft_name
from palestra.errors import WeightsError
from palestra.models.lora import merged, parse_adapter, read_adapter
from palestra.models.tensors import load_tensors
from palestra.rollouts.base import GenerateRequest
from palestra.rollouts.native.adapters import Adapter, RowAdapters
from palestra.rollouts.native.engine import NativeEngine
from palestra.rollouts.native.layers import mixed, projected
from palestra.rollouts.native.linears import LinearOps
from palestra.types import Completion, SamplingParams
from rollouts.support import Tiny, ragged_prompts
from rollouts.test_forward import KINDS, products_keep_rows_apart

Start = Callable[..., Awaitable[NativeEngine]]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12)


async def complete(
    engine: NativeEngine, prompts: Sequence[Sequence[int]], adapters: Sequence[str], **sampling: Any
) -> list[Completion]:
    """One completion for each prompt, all submitted at once; seeds are the rows' numbers."""
    requests = [
        GenerateRequest(
            tuple(prompt),
            SamplingParams(max_new_tokens=12, seed=row, **sampling),
            id=str(row),
            adapter=adapter,
        )
        for row, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True))
    ]
    return await asyncio.gather(*(engine.generate(request) for request in requests))


def assert_alike(ours: Sequence[Completion], theirs: Sequence[Completion]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        assert torch.allclose(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-4)


@pytest.mark.parametrize("targets", [EVERYWHERE, ATTENTION, ("down_proj",), ("k_proj", "up_proj")])
async def test_an_adapter_beside_the_weights_gives_the_numbers_of_dense_weights(
    tiny: Tiny, serve: Start, targets: Sequence[str]
) -> None:
    config, lora = make_lora(tiny.tensors, rank=4, alpha=6, targets=targets)
    prompts = ragged_prompts(6, seed=31)
    beside, within, base = await serve(), await serve(dense(tiny.tensors, lora, 6 / 4)), await serve()
    await beside.load_adapter("lora", config, lora.items())
    ours = await complete(beside, prompts, ["lora"] * 6)
    assert_alike(ours, await complete(within, prompts, [""] * 6))
    plain = await complete(base, prompts, [""] * 6)
    assert any(a.token_ids != b.token_ids for a, b in zip(ours, plain, strict=True))


async def test_merged_tensors_can_be_served_as_a_version_of_their_own(tiny: Tiny, serve: Start) -> None:
    config, lora = make_lora(tiny.tensors)
    changes = parse_adapter(config, lora.items(), {name: tuple(t.shape) for name, t in tiny.tensors.items()})
    beside, within = await serve(), await serve(dict(merged(tiny.tensors.items(), changes)))
    await beside.load_adapter("lora", config, lora.items())
    prompts = ragged_prompts(4, seed=32)
    assert_alike(await complete(beside, prompts, ["lora"] * 4), await complete(within, prompts, [""] * 4))


async def test_rows_with_different_adapters_and_none_do_not_touch_each_other(
    tiny: Tiny, serve: Start
) -> None:
    engine = await serve()
    for seed, name in enumerate(("first", "second")):
        rank = 3 + 5 * seed
        config, lora = make_lora(tiny.tensors, rank=rank, seed=seed)
        await engine.load_adapter(name, config, lora.items())
    prompts = ragged_prompts(7, seed=33, longest=60)
    prompts[3] = prompts[0]  # the same prompt under another adapter shares nothing
    adapters = ["first", "second", "", "second", "first", "", "first"]
    crowd = await complete(engine, prompts, adapters)
    for row, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
        request = GenerateRequest(tuple(prompt), SamplingParams(max_new_tokens=12, seed=row), adapter=adapter)
        alone = await engine.generate(request)
        assert (alone.token_ids, alone.logprobs) == (crowd[row].token_ids, crowd[row].logprobs)
    assert crowd[0].logprobs[0] != crowd[3].logprobs[0]


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_adapter_adds_to_a_row_has_the_same_bits_in_any_company(
    tiny: Tiny, kind: dict[str, bool]
) -> None:
    model, weights = tiny.weights(**kind)
    if not products_keep_rows_apart(model.ops):
        pytest.skip("on this processor a plain product's bits depend on the row count")
    loaded: dict[str, Adapter] = {}
    for seed, name in enumerate("ab"):
        config, lora = make_lora(tiny.tensors, rank=1 + 7 * seed, seed=seed)
        loaded[name] = Adapter.build(tiny.config, model.ops, config, lora.items())
    random = torch.Generator().manual_seed(5)
    hidden = torch.randn(64, 32, generator=random)
    names = [("", "a", "b")[i] for i in torch.randint(0, 3, (64,), generator=random).tolist()]
    cos, sin = model.cos_P1D[:64], model.sin_P1F[:64]

    def computed(rows: list[int]) -> tuple[Tensor, ...]:
        pad = [*rows, *rows[:1] * (model.ops.padded(len(rows)) - len(rows))]
        adapters = RowAdapters.build([names[row] for row in rows], loaded)
        heads = projected(model, weights.layers[1], hidden[pad], cos[pad], sin[pad], 1, adapters)
        attended = hidden[pad].flip(-1)
        rest = mixed(model, weights.layers[1], hidden[pad], attended, 1, adapters)
        return tuple(part[: len(rows)] for part in (*heads, rest))

    crowd = computed(list(range(64)))
    for rows in ([0], [63], [5, 6, 7], list(range(3, 60, 4)), [9, 2, 33]):
        for alone, beside in zip(computed(rows), crowd, strict=True):
            assert torch.equal(alone, beside[rows])


def test_no_row_adapters_are_built_where_no_row_uses_one(tiny: Tiny) -> None:
    assert RowAdapters.build(["", ""], {}) is None
    assert RowAdapters.build([], {}) is None


def test_an_adapter_in_bfloat16_stays_near_float32(tiny: Tiny) -> None:
    config, lora = make_lora(tiny.tensors)
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(6))
    added: list[Tensor] = []
    for dtype in (torch.float32, torch.bfloat16):
        adapter = Adapter.build(tiny.config, LinearOps.best(dtype, 1), config, lora.items())
        adapters = RowAdapters.build(["a"] * 5, {"a": adapter})
        assert adapters is not None
        sums = torch.zeros(5, 64, dtype=dtype)
        adapters.add("0.qkv", hidden.to(dtype), sums)
        added.append(sums.float())
    assert 0 < (added[0] - added[1]).abs().max() < 0.1


async def test_an_adapter_that_does_not_fit_is_refused_and_the_one_before_serves_on(
    tiny: Tiny, serve: Start
) -> None:
    engine = await serve()
    config, lora = make_lora(tiny.tensors)
    await engine.load_adapter("lora", config, lora.items())
    prompts = ragged_prompts(2, seed=34)
    before = await complete(engine, prompts, ["lora"] * 2)
    with pytest.raises(WeightsError, match="sets use_dora = True"):
        await engine.load_adapter("lora", config | {"use_dora": True}, lora.items())
    with pytest.raises(WeightsError, match=r"lora_A has shape \[4, 32\]"):
        await engine.load_adapter("lora", config | {"r": 8}, lora.items())
    assert await complete(engine, prompts, ["lora"] * 2) == before
    assert engine.adapters == ("lora",)


async def test_a_replaced_adapter_is_swapped_at_once_and_never_missing(tiny: Tiny, serve: Start) -> None:
    """SkyRL PR#1606 and #2129 (case 5): the old adapter was removed before the new one was live."""
    engine = await serve()
    versions = [make_lora(tiny.tensors, seed=seed) for seed in range(3)]
    await engine.load_adapter("lora", versions[0][0], versions[0][1].items())
    prompts = ragged_prompts(3, seed=35)
    expected = []
    for config, lora in versions:
        fresh = await serve()
        await fresh.load_adapter("lora", config, lora.items())
        expected.append(await complete(fresh, prompts, ["lora"] * 3))
    seen = []
    for config, lora in versions[1:]:
        running = asyncio.gather(*(complete(engine, prompts, ["lora"] * 3) for _ in range(2)))
        await asyncio.sleep(0)
        await engine.load_adapter("lora", config, lora.items())
        seen += await running
        seen.append(await complete(engine, prompts, ["lora"] * 3))
    assert all(completions in expected for completions in seen)
    assert seen[2] == expected[1]
    assert seen[-1] == expected[2]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3-moe-mixed"])
async def test_every_family_takes_adapters_for_its_attention(
    tmp_path: Path, serve: Start, family: str
) -> None:
    make_family(tmp_path, family)
    tensors = load_tensors(tmp_path)
    config, lora = make_lora(tensors, targets=ATTENTION)
    beside = await serve(tensors, folder=tmp_path)
    within = await serve(dense(tensors, lora, 6 / 4), folder=tmp_path)
    await beside.load_adapter("lora", config, lora.items())
    prompts = ragged_prompts(4, seed=36)
    assert_alike(await complete(beside, prompts, ["lora"] * 4), await complete(within, prompts, [""] * 4))


async def test_an_adapter_for_experts_is_refused_by_name(tmp_path: Path, serve: Start) -> None:
    make_family(tmp_path, "qwen3-moe")
    tensors = load_tensors(tmp_path)
    engine = await serve(tensors, folder=tmp_path)
    config, lora = make_lora(tensors, targets=("q_proj", "gate_proj"))
    assert peft_name("model.layers.0.mlp.experts.0.gate_proj.weight", "A") in lora
    with pytest.raises(WeightsError, match=r"mlp\.experts\.0\.gate_proj") as caught:
        await engine.load_adapter("lora", config, lora.items())
    assert "experts" in caught.value.expected
    with pytest.raises(WeightsError, match="target_parameters"):
        await engine.load_adapter("lora", config | {"target_parameters": ["gate_up_proj"]}, lora.items())


async def test_adapters_that_peft_saves_give_the_numbers_that_peft_computes(
    tiny: Tiny, serve: Start, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    network = transformers.AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.float32)
    settings = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules="all-linear",
        rank_pattern={"down_proj": 2},
        alpha_pattern={r"layers\.0\.self_attn\.q_proj": 12},
        task_type="CAUSAL_LM",
    )
    with_adapter = peft.get_peft_model(network, settings).eval()
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in with_adapter.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=random))
    with_adapter.save_pretrained(tmp_path)
    config, lora = read_adapter(tmp_path)
    engine = await serve()
    await engine.load_adapter("lora", config, lora.items())
    for prompt in ragged_prompts(3, seed=37):
        request = GenerateRequest(tuple(prompt), GREEDY, adapter="lora")
        found = await engine.generate(request)
        with torch.no_grad():
            logits = with_adapter(torch.tensor([[*prompt, *found.token_ids]])).logits[0, len(prompt) - 1 : -1]
        theirs = logits.log_softmax(-1).gather(1, torch.tensor(found.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(found.logprobs), theirs, atol=1e-4)


@pytest.mark.parametrize("how", ["tensor", "alpha"])
async def test_an_adapter_that_is_not_finite_is_refused(
    tiny: Tiny, serve: Callable[..., Any], how: str
) -> None:
    """Else every request with it fails, and the error would blame the model's own weights."""
    engine = await serve()
    config, tensors = make_lora(tiny.tensors)
    if how == "tensor":
        next(iter(tensors.values()))[0, 0] = float("nan")
    else:
        config["lora_alpha"] = 1e308
    with pytest.raises(WeightsError, match="not finite"):
        await engine.load_adapter("maths", config, tensors.items())
    assert engine.adapters == ()
