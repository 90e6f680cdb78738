"""Every model family: the numbers of transformers, from the files that transformers writes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.tiny_families import FAMILIES, make_family
from palestra.errors import ModelSourceError, WeightsError
from palestra.models.config import ModelConfig
from palestra.models.llama import Llama
from palestra.models.rotary import rotary_tables
from palestra.models.tensors import load_tensors
from palestra.rollouts.native.engine import NativeEngine
from palestra.rollouts.native.layers import Model, mixed, projected
from palestra.rollouts.native.linears import LinearOps
from palestra.rollouts.native.weights import Experts, load, plan
from palestra.trainer.torch_trainer import TorchTrainer, TrainerSettings
from palestra.types import SamplingParams
from palestra.weights.sync import probe_batch
from rollouts.support import Tiny, generate_all, manifest_of, ragged_prompts
from rollouts.test_forward import KINDS, products_keep_rows_apart

Start = Callable[..., Awaitable[NativeEngine]]
RAW = SamplingParams(temperature=1.0)


@dataclass(frozen=True)
class Family(Tiny):
    network: Any

    def logprobs(self, tokens: list[int]) -> Tensor:
        """transformers' logprob of each token after the first."""
        with torch.no_grad():
            logits = self.network(torch.tensor([tokens])).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    families: dict[str, Family] = {}
    for name in FAMILIES:
        folder = tmp_path_factory.mktemp("families") / name
        network = make_family(folder, name)
        families[name] = Family(folder, ModelConfig.from_folder(folder), load_tensors(folder), network)
    return families


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, made: dict[str, Family]) -> Family:
    return made[request.param]


def test_the_plan_names_exactly_the_tensors_that_transformers_saves(family: Family) -> None:
    parts = plan(family.config)
    assert {name: part.shape for name, part in parts.items()} == {
        name: tuple(tensor.shape) for name, tensor in family.tensors.items()
    }


async def test_scores_and_sampled_tokens_have_the_logprobs_of_transformers(
    family: Family, serve: Start
) -> None:
    """Prompts in bulk, and tokens in step: the two ways through the model."""
    engine = await serve(family.tensors, folder=family.folder)
    prompts = ragged_prompts(5, seed=41, longest=120)
    for prompt in prompts[:2]:
        found = await engine.score(prompt, RAW)
        assert torch.allclose(torch.tensor(found), family.logprobs(prompt), atol=1e-4)
    samplings = [SamplingParams(max_new_tokens=24, seed=row) for row in range(len(prompts))]
    for prompt, completion in zip(prompts, await generate_all(engine, prompts, samplings), strict=True):
        theirs = family.logprobs([*prompt, *completion.token_ids])[len(prompt) - 1 :]
        assert torch.allclose(torch.tensor(completion.logprobs), theirs, atol=1e-4)


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3", "qwen3-moe", "qwen3-moe-mixed"])
async def test_a_completion_has_the_same_bits_in_any_company(
    made: dict[str, Family], serve: Start, name: str
) -> None:
    family = made[name]
    engine = await serve(family.tensors, folder=family.folder)
    if not products_keep_rows_apart(LinearOps.best(torch.float32, 1)):
        pytest.skip("on this processor a product's bits depend on the row count")
    prompts = ragged_prompts(8, seed=42, longest=60)
    samplings = [SamplingParams(max_new_tokens=16, seed=row) for row in range(len(prompts))]
    crowd = await generate_all(engine, prompts, samplings)
    for prompt, sampling, beside in zip(prompts, samplings, crowd, strict=True):
        (alone,) = await generate_all(engine, [prompt], [sampling])
        assert (alone.token_ids, alone.logprobs) == (beside.token_ids, beside.logprobs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3-biased"])
def test_a_layer_gives_a_row_the_same_bits_whatever_experts_its_neighbours_choose(
    made: dict[str, Family], name: str, kind: dict[str, bool], threads: int
) -> None:
    torch.set_num_threads(threads)
    family = made[name]
    model, weights = family.weights(**kind, threads=threads)
    if not products_keep_rows_apart(model.ops):
        pytest.skip("on this processor a plain product's bits depend on the row count")
    random = torch.Generator().manual_seed(9)
    hidden = torch.randn(96, 32, generator=random)
    attended = torch.randn(96, family.config.heads * family.config.head_dim, generator=random)
    cos, sin = model.cos_P1D[:96], model.sin_P1F[:96]
    layer = weights.layers[1]

    def computed(rows: list[int]) -> tuple[Tensor, ...]:
        pad = [*rows, *rows[:1] * (model.ops.padded(len(rows)) - len(rows))]
        heads = projected(model, layer, hidden[pad], cos[pad], sin[pad])
        rest = mixed(model, layer, hidden[pad], attended[pad])
        return tuple(part[: len(rows)] for part in (*heads, rest))

    crowd = computed(list(range(96)))
    for rows in ([0], [95], [5, 6, 7], list(range(3, 90, 4)), [9, 2, 33, 64, 21]):
        for alone, beside in zip(computed(rows), crowd, strict=True):
            assert torch.equal(alone, beside[rows])


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3-moe"])
def test_bfloat16_stays_near_float32(made: dict[str, Family], name: str) -> None:
    family = made[name]
    exact, exact_weights = family.weights()
    ops = LinearOps.best(torch.bfloat16, 1)
    weights, _ = load(family.config, ops, manifest_of(family.tensors), family.tensors.items())
    hidden = torch.randn(6, 32, generator=torch.Generator().manual_seed(3))
    attended = torch.randn(6, family.config.heads * family.config.head_dim)
    model = Model.build(family.config, ops, 1)
    ours = mixed(model, weights.layers[0], hidden.bfloat16(), attended.bfloat16())
    theirs = mixed(exact, exact_weights.layers[0], hidden, attended)
    assert ours.dtype == torch.bfloat16
    assert 0 < (ours.float() - theirs).abs().mean() < 0.05


def test_every_expert_is_chosen_by_someone_in_these_tests(made: dict[str, Family]) -> None:
    """An expert that no row reaches would be right by luck."""
    family = made["qwen3-moe"]
    _, weights = family.weights()
    mlp = weights.layers[0].mlp
    assert isinstance(mlp, Experts)
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(2))
    counts = mlp.router(x).topk(2).indices.flatten().bincount(minlength=6)
    assert counts.min() > 0


def test_tensors_may_come_in_any_order(family: Family) -> None:
    """A bias before its weight, a norm after everything: files are not sorted by what belongs together."""
    backwards = dict(reversed(family.tensors.items()))
    loaded = [
        load(family.config, LinearOps(torch.float32, False), manifest_of(tensors), tensors.items())[0]
        for tensors in (family.tensors, backwards)
    ]
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    model, _ = family.weights(packed=False)
    attended = torch.randn(4, family.config.heads * family.config.head_dim)
    for layer, same in zip(*(weights.layers for weights in loaded), strict=True):
        assert torch.equal(layer.qkv(x), same.qkv(x))
        assert torch.equal(mixed(model, layer, x, attended), mixed(model, same, x, attended))


def test_only_the_sparse_layers_have_experts(made: dict[str, Family]) -> None:
    _, weights = made["qwen3-moe-mixed"].weights()
    assert [isinstance(layer.mlp, Experts) for layer in weights.layers] == [False, True, False, False]


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen2", "model.layers.1.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight"),
        ("qwen3-moe", "model.layers.0.mlp.gate.weight"),
        ("qwen3-moe", "model.layers.1.mlp.experts.5.up_proj.weight"),
    ],
)
def test_a_bias_a_norm_or_an_expert_that_is_missing_is_named(
    made: dict[str, Family], name: str, tensor: str
) -> None:
    family = made[name]
    fewer = {key: value for key, value in family.tensors.items() if key != tensor}
    with pytest.raises(WeightsError, match=f"1 of .* tensors are missing, first {tensor}"):
        load(family.config, LinearOps(torch.float32, False), manifest_of(fewer), fewer.items())


def test_a_bias_that_the_config_does_not_have_is_refused(made: dict[str, Family]) -> None:
    """Dropping it silently would serve another model than the one trained."""
    family, name = made["llama"], "model.layers.0.self_attn.q_proj.bias"
    more = family.tensors | {name: torch.ones(32)}
    with pytest.raises(WeightsError, match=f"no tensor named {name}"):
        load(family.config, LinearOps(torch.float32, False), manifest_of(more), more.items())


@pytest.mark.parametrize("name", ["llama", "llama-linear", "llama3", "qwen2-untied"])
def test_rotary_positions_are_scaled_as_in_transformers(made: dict[str, Family], name: str) -> None:
    family = made[name]
    positions = torch.arange(0, 4096, 7)
    cos, sin = rotary_tables(family.config, positions, torch.float32)
    theirs_cos, theirs_sin = family.network.model.rotary_emb(torch.zeros(1), positions[None])
    half = family.config.head_dim // 2
    assert torch.allclose(cos[:, 0], theirs_cos[0], atol=1e-3)
    assert torch.allclose(sin[:, 0], theirs_sin[0, :, :half], atol=1e-3)
    early = positions < 256
    assert torch.allclose(cos[early, 0], theirs_cos[0, early], atol=2e-5)


def test_scaling_changes_the_numbers_so_that_its_tests_can_fail(made: dict[str, Family]) -> None:
    tables = [
        rotary_tables(made[name].config, torch.arange(256), torch.float32)[0]
        for name in ("llama", "llama-linear", "llama3")
    ]
    assert min((tables[i] - tables[j]).abs().max() for i, j in ((0, 1), (0, 2), (1, 2))) > 0.5


@pytest.mark.parametrize("name", ["llama3", "llama-biased", "qwen2", "qwen3", "qwen3-moe"])
async def test_the_trainer_and_the_engine_agree_on_every_family(
    made: dict[str, Family], serve: Start, name: str
) -> None:
    """trl#4159 and verl#7495: what is trained is what is sampled from, whatever the family."""
    family = made[name]
    trainer = TorchTrainer(family.folder, TrainerSettings(threads=1))
    exported = {name: tensor.clone() for name, tensor in trainer.export()}
    engine = await serve(exported, folder=family.folder)
    prompt = ragged_prompts(1, seed=44)[0]
    theirs = trainer.logprobs(probe_batch(tuple(prompt)))
    trainer.close()
    assert await engine.score(prompt, RAW) == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("name", ["llama-biased", "qwen2", "qwen3", "qwen3-moe"])
def test_the_trainers_own_forward_refuses_a_family_it_does_not_compute(
    made: dict[str, Family], name: str
) -> None:
    """A wrong forward pass would train without a word; these go through transformers."""
    with pytest.raises(ModelSourceError, match=made[name].config.architecture):
        Llama(made[name].config)


def test_the_trainer_takes_a_llama_with_scaled_rotary_positions(made: dict[str, Family]) -> None:
    family = made["llama3"]
    trainer = TorchTrainer(family.folder, TrainerSettings(threads=1))
    trainer.close()
    assert Llama.from_tensors(family.config, family.tensors).config.rope_scaling is not None


def test_products_are_packed_on_the_cpu_only_and_padded_there_only() -> None:
    """Written, not run on a GPU: what is checked is only which kind is chosen."""
    ops = LinearOps.best(torch.float32, 4, torch.device("cuda"))
    assert not ops.packed
    assert [ops.padded(rows) for rows in (1, 3, 17)] == [1, 3, 17]
    assert LinearOps.best(torch.float32, 4).device.type == "cpu"


def test_weights_and_tables_are_made_on_the_device_of_the_products(made: dict[str, Family]) -> None:
    """The meta device stands for any that is not the CPU."""
    family = made["qwen3-moe"]
    ops = LinearOps(torch.float32, False, 1, torch.device("meta"))
    weights, digest = load(family.config, ops, manifest_of(family.tensors), family.tensors.items())
    assert digest == manifest_of(family.tensors).digest
    assert weights.embedding_VH.device.type == weights.norm.device.type == "meta"
    x = torch.zeros(4, 32, device="meta")
    assert weights.head(weights.layers[0].qkv(x)[:, :32]).device.type == "meta"
