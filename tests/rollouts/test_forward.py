"""The decoder's numbers: against transformers, against itself, and independent of neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from helpers.tiny import make_tiny_model
from palestra.models.config import ModelConfig
from palestra.models.rotary import rotated
from palestra.models.tensors import load_tensors
from palestra.rollouts.native import forward, layers
from palestra.rollouts.native.cache import Pool
from palestra.rollouts.native.layers import Model
from palestra.rollouts.native.linears import LinearOps, packing_works
from palestra.rollouts.native.sampler import sample
from palestra.rollouts.native.weights import Weights, load
from palestra.types import SamplingParams
from rollouts.support import Tiny, manifest_of, ragged_prompts

KINDS = [
    pytest.param({"packed": False}, id="plain"),
    pytest.param({"packed": False, "compiled": False}, id="torch"),
    pytest.param(
        {"packed": True},
        id="packed",
        marks=pytest.mark.skipif(not packing_works(torch.float32), reason="no prepacked products here"),
    ),
]


def fresh_pool(model: Model, slots: int, capacity: int = 128) -> Pool[Any]:
    pool: Pool[Any] = Pool(model.config, capacity, model.ops.dtype, torch.device("cpu"))
    pool.resize(slots)
    return pool


def fill(model: Model, weights: Weights, pool: Pool[Any], sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Sequence i into slot i; the final hidden states of all, end to end."""
    return forward.prefill(model, weights, [forward.Piece(s, 0, pool, i) for i, s in enumerate(sequences)])


def step(
    model: Model, weights: Weights, pool: Pool[Any], tokens: Sequence[int], positions: Sequence[int]
) -> torch.Tensor:
    return forward.step(model, weights, [forward.Lane(pool, tokens, positions)])


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_whole_prompts_equal_those_of_transformers(
    tiny: Tiny, reference: Any, kind: dict[str, bool]
) -> None:
    model, weights = tiny.weights(**kind)
    sequences = ragged_prompts(5, seed=3)
    hidden = torch.cat([forward.whole(model, weights, s) for s in sequences])
    ours = forward.logits(model, weights, hidden)
    with torch.no_grad():
        theirs = torch.cat([reference(torch.tensor([s])).logits[0] for s in sequences])
    assert (ours - theirs).abs().max() < 1e-4


def test_an_untied_head_and_unshared_keys_equal_transformers_too(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    folder = make_tiny_model(tmp_path / "untied", tied=False, heads=4, kv_heads=4, seed=5)
    config, tensors = ModelConfig.from_folder(folder), load_tensors(folder)
    ops = LinearOps.best(torch.float32, 1)
    weights, _ = load(config, ops, manifest_of(tensors), tensors.items())
    model = Model.build(config, ops, config.max_positions)
    prompt = ragged_prompts(1, seed=8)[0]
    ours = forward.logits(model, weights, forward.whole(model, weights, prompt))
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        theirs = network(torch.tensor([prompt])).logits[0]
    assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_with_the_cache_equals_computing_the_whole_sequence_anew(
    tiny: Tiny, kind: dict[str, bool]
) -> None:
    model, weights = tiny.weights(**kind)
    sequences = ragged_prompts(6, seed=4)
    continuation = ragged_prompts(6, seed=9, longest=1)
    pool = fresh_pool(model, 6)
    fill(model, weights, pool, sequences)
    for index in range(30):
        tokens = [(continuation[row][0] + 7 * index) % 256 for row in range(6)]
        stepped = step(model, weights, pool, tokens, [len(s) for s in sequences])
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.append(token)
        if index % 7 == 0:
            whole = torch.stack([forward.whole(model, weights, s)[-1] for s in sequences])
            anew = forward.logits(model, weights, whole)
            assert (stepped - anew).abs().max() < 1e-4


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Heads as wide as a real model's, three to a key-value head."""
    folder = tmp_path_factory.mktemp("models") / "wide"
    make_tiny_model(folder, hidden=192, heads=3, kv_heads=1, layers=1)
    return Tiny(folder, ModelConfig.from_folder(folder), load_tensors(folder))


def products_keep_rows_apart(ops: LinearOps) -> bool:
    """Whether this processor's matrix products give a row the same bits in any company."""
    generator = torch.Generator().manual_seed(0)
    product = ops.make(torch.randn(96, 64, generator=generator))
    x = torch.randn(64, 64, generator=generator)
    few = ops.padded(1)
    return torch.equal(product(x[:few].contiguous()), product(x)[:few])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", ["tiny", "wide"])
def test_a_row_does_not_depend_on_the_rows_beside_it(
    request: pytest.FixtureRequest, size: str, kind: dict[str, bool]
) -> None:
    """A resumed run recomputes rollouts in other company: their bits must not move."""
    model, weights = request.getfixturevalue(size).weights(**kind)
    if not products_keep_rows_apart(model.ops):
        pytest.skip("on this processor a plain product's bits depend on the row count")
    sequences = ragged_prompts(16, seed=5, longest=80)
    together = fresh_pool(model, 16)
    hidden = fill(model, weights, together, sequences)
    ends = torch.tensor([len(s) for s in sequences]).cumsum(0) - 1
    crowd = step(model, weights, together, [s[0] for s in sequences], [len(s) for s in sequences])
    for row, sequence in enumerate(sequences):
        alone = fresh_pool(model, 1, 256)
        own = fill(model, weights, alone, [sequence])
        single = step(model, weights, alone, [sequence[0]], [len(sequence)])
        assert torch.equal(own[-1], hidden[ends[row]])
        assert torch.equal(single[0], crowd[row])


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("step", ["gated", "normed", "rotated", "sampled"])
def test_what_is_not_a_product_gives_a_row_the_same_bits_wherever_threads_cut(
    tiny: Tiny, step: str, threads: int
) -> None:
    """torch cuts large arrays anywhere, also within a row, and its silu rounds otherwise at the cut."""
    model, _ = tiny.weights()
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(4)
    rows, width = 61, 2560
    x = torch.randn(rows, 2 * width, generator=generator) * 3
    weight = torch.randn(2 * width, generator=generator)
    positions = torch.randint(0, 256, (rows,), generator=generator)
    sampling = SamplingParams(top_p=0.9)

    def computed(at: slice) -> Any:
        part = x[at].clone()
        match step:
            case "gated":
                return layers.gated(part).tolist()
            case "normed":
                return layers.normed(part, weight, 1e-5).tolist()
            case "rotated":
                heads = part.view(len(part), -1, model.config.head_dim)[:, 2:]
                cos, sin = model.cos_P1D[positions[at]], model.sin_P1F[positions[at]]
                return rotated(heads, cos, sin).tolist()
            case _:
                uniforms = [0.37 + index / 100 for index in range(rows)][at]
                return list(zip(*sample(part, [sampling] * len(part), uniforms), strict=True))

    whole = computed(slice(0, rows))
    for start, stop in ((0, 1), (60, 61), (17, 20), (5, 36)):
        assert computed(slice(start, stop)) == whole[start:stop]


def test_stale_and_padding_positions_have_no_weight(tiny: Tiny) -> None:
    model, weights = tiny.weights()
    prompt = ragged_prompts(1, seed=6)[0]
    clean, dirty = fresh_pool(model, 2), fresh_pool(model, 2)
    for tensor in (*dirty.keys, *dirty.values):
        tensor.fill_(1e4)
    for pool in (clean, dirty):
        fill(model, weights, pool, [prompt])
    ours = step(model, weights, clean, [65], [len(prompt)])
    theirs = step(model, weights, dirty, [65], [len(prompt)])
    assert torch.equal(ours, theirs)


def test_bfloat16_stays_near_float32_and_pads_a_single_row(tiny: Tiny) -> None:
    exact_model, exact_weights = tiny.weights()
    ops = LinearOps.best(torch.bfloat16, 1)
    assert ops.padded(1) == 2
    weights, _ = load(tiny.config, ops, manifest_of(tiny.tensors), tiny.tensors.items())
    model = Model.build(tiny.config, ops, 256)
    prompt = ragged_prompts(1, seed=7)[0]
    pool = fresh_pool(model, 1)
    hidden = fill(model, weights, pool, [prompt])
    exact = forward.whole(exact_model, exact_weights, prompt)
    assert hidden.dtype == torch.bfloat16
    ours = forward.logits(model, weights, hidden).float()
    theirs = forward.logits(exact_model, exact_weights, exact)
    assert 0 < (ours - theirs).abs().mean() < 0.05
    stepped = step(model, weights, pool, [65], [len(prompt)]).float()
    whole = forward.whole(exact_model, exact_weights, [*prompt, 65])[-1:]
    assert stepped.shape == (1, tiny.config.vocab_size)
    assert (stepped - forward.logits(exact_model, exact_weights, whole)).abs().mean() < 0.05


def test_plain_float32_rows_are_padded_to_multiples_of_four_per_thread() -> None:
    ops = LinearOps(torch.float32, packed=False, threads=2)
    assert [ops.padded(n) for n in (1, 8, 9, 64)] == [8, 8, 16, 64]
    packed = LinearOps(torch.float32, packed=True, threads=2)
    assert [packed.padded(n) for n in (1, 9)] == [1, 9]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_in_pieces_gives_the_bits_of_the_same_pieces_whatever_is_computed_with_them(
    tiny: Tiny, kind: dict[str, bool]
) -> None:
    model, weights = tiny.weights(**kind)
    if not products_keep_rows_apart(model.ops):
        pytest.skip("on this processor a plain product's bits depend on the row count")
    long, *others = [ragged_prompts(1, seed=21, longest=40)[0] * 6, *ragged_prompts(3, seed=22)]
    cut = len(long) // 2
    at_once, apart = fresh_pool(model, 4, 512), fresh_pool(model, 4, 512)
    first, second = (forward.Piece(long[:cut], 0, at_once, 0), forward.Piece(long[cut:], cut, at_once, 0))
    company = [forward.Piece(other, 0, at_once, 1 + i) for i, other in enumerate(others)]
    together = forward.prefill(model, weights, [company[0], first, second, *company[1:]])
    forward.prefill(model, weights, [forward.Piece(long[:cut], 0, apart, 0)])
    alone = forward.prefill(model, weights, [forward.Piece(long[cut:], cut, apart, 0)])
    end = len(others[0]) + len(long)
    assert torch.equal(together[end - 1], alone[-1])
    whole = forward.whole(model, weights, long)
    assert (alone[-1] - whole[-1]).abs().max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_several_pools_decode_as_each_would_alone(tiny: Tiny, kind: dict[str, bool]) -> None:
    model, weights = tiny.weights(**kind)
    if not products_keep_rows_apart(model.ops):
        pytest.skip("on this processor a plain product's bits depend on the row count")
    sequences = ragged_prompts(5, seed=23)
    small, large = fresh_pool(model, 3), fresh_pool(model, 2, 256)
    fill(model, weights, small, sequences[:3])
    fill(model, weights, large, sequences[3:])
    lanes = [
        forward.Lane(small, [7, 8, 9], [len(s) for s in sequences[:3]]),
        forward.Lane(large, [10, 11], [len(s) for s in sequences[3:]]),
    ]
    crowd = forward.step(model, weights, lanes)
    for row, sequence in enumerate(sequences):
        alone = fresh_pool(model, 1)
        fill(model, weights, alone, [sequence])
        assert torch.equal(step(model, weights, alone, [7 + row], [len(sequence)])[0], crowd[row])
