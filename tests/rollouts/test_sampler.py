"""The sampler: exact sets, the right frequencies, and logprobs of what was drawn from."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from palestra.algorithms import truncation
from palestra.rollouts.native.sampler import logprobs_of, sample, shape_logits, uniform
from palestra.types import SamplingParams


def naive(logits: list[float], params: SamplingParams) -> list[float]:
    """Probabilities by the definition, in Python floats: sort everything, walk down."""
    scaled = [value / (params.temperature or 1.0) for value in logits]
    kept = set(range(len(scaled)))
    order = sorted(kept, key=lambda i: -scaled[i])
    if params.temperature > 0 and params.top_k:
        floor = scaled[order[min(params.top_k, len(order)) - 1]]
        kept = {i for i in kept if scaled[i] >= floor}
    if params.temperature > 0 and params.top_p < 1:
        top = max(scaled)
        total = sum(math.exp(scaled[i] - top) for i in kept)
        mass = 0.0
        for i in order:
            mass += math.exp(scaled[i] - top) / total
            if mass >= params.top_p:
                kept = {j for j in kept if scaled[j] >= scaled[i]}
                break
    top = max(scaled)
    shares = [math.exp(v - top) if i in kept else 0.0 for i, v in enumerate(scaled)]
    return [share / sum(shares) for share in shares]


def draws(logits: Tensor, params: SamplingParams, count: int) -> Counter[int]:
    tokens, _ = sample(logits.expand(count, -1), [params] * count, [uniform(7, i) for i in range(count)])
    return Counter(tokens)


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.integers(-40, 40), min_size=1, max_size=40),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.999, 1.0]),
)
def test_what_top_k_and_top_p_keep_is_exactly_what_the_definition_keeps(
    logits: list[int], temperature: float, top_k: int, top_p: float
) -> None:
    """Logits in eighths: they divide exactly, so a tie is a tie in every number type."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    values = [value / 8 for value in logits]
    ours = torch.softmax(shape_logits(torch.tensor([values]), [params])[0], -1).tolist()
    expected = naive(values, params)
    if top_p < 1 and _near_edge(values, params):
        return
    assert [p > 0 for p in ours] == [p > 0 for p in expected]
    assert ours == pytest.approx(expected, abs=1e-6)


def _near_edge(values: list[float], params: SamplingParams) -> bool:
    """Whether rounding alone decides if a cumulated probability reaches top_p."""
    before_top_p = naive(values, SamplingParams(temperature=params.temperature, top_k=params.top_k))
    mass = 0.0
    for share in sorted(before_top_p, reverse=True):
        mass += share
        if abs(mass - params.top_p) < 1e-9:
            return True
    return False


@pytest.mark.parametrize("top_p", [0.2, 0.95, 0.9999])
def test_top_p_is_exact_where_it_needs_more_than_the_largest_candidates(
    monkeypatch: pytest.MonkeyPatch, top_p: float
) -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(top_p=top_p)] * 3
    narrow = shape_logits(logits, params)
    monkeypatch.setattr(truncation, "CANDIDATES", 5000)
    assert torch.equal(narrow, shape_logits(logits, params))
    kept = torch.isfinite(narrow).sum(-1)
    assert (kept > 1).all()
    assert (kept < 5000).all()
    for row in range(3):
        expected = naive(logits[row].tolist(), params[row])
        assert int(kept[row]) == sum(share > 0 for share in expected)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(temperature=1.5, top_k=9, top_p=0.9),
    ],
)
def test_tokens_come_up_as_often_as_their_probability_says(params: SamplingParams) -> None:
    """Chi-square over 20,000 draws; the bound is the 99.99 % quantile for up to 11 degrees of freedom."""
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(2))
    expected = naive(logits[0].tolist(), params)
    count = 20_000
    seen = draws(logits, params, count)
    assert all(expected[token] > 0 for token in seen)
    chi_square = sum((seen[i] - count * p) ** 2 / (count * p) for i, p in enumerate(expected) if p > 0)
    assert chi_square < 37.4


def test_frequencies_hold_across_block_borders() -> None:
    """Four tokens around the borders of 256-wide blocks share all probability."""
    logits = torch.full((1, 700), -30.0)
    places = [0, 255, 256, 699]
    logits[0, places] = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    seen = draws(logits, SamplingParams(), 20_000)
    assert set(seen) == set(places)
    for place, share in zip(places, (0.1, 0.2, 0.3, 0.4), strict=True):
        assert seen[place] / 20_000 == pytest.approx(share, abs=0.015)


@pytest.mark.parametrize("edge", [0.0, 1.0 - 2.0**-53])
def test_the_extreme_uniform_numbers_never_draw_an_impossible_token(edge: float) -> None:
    logits = torch.full((1, 600), float("-inf"))
    logits[0, [300, 301]] = 0.0
    tokens, logprobs = sample(logits, [SamplingParams()], [edge])
    assert tokens == [300 if edge == 0 else 301]
    assert logprobs == pytest.approx([math.log(0.5)])


def test_rounding_at_the_end_of_a_block_never_draws_an_impossible_token() -> None:
    """The block's float32 sum may exceed the sum of its parts: the uniform number then points past them."""
    for seed in range(60):
        logits = torch.full((1, 512), float("-inf"))
        logits[0, :100] = torch.randn(100, generator=torch.Generator().manual_seed(seed))
        tokens, logprobs = sample(logits, [SamplingParams()], [1.0 - 2.0**-53])
        assert tokens[0] < 100
        assert math.isfinite(logprobs[0])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.3]),
    top_k=st.sampled_from([0, 1, 7]),
    top_p=st.sampled_from([0.4, 0.95, 1.0]),
)
def test_the_reported_logprob_is_that_of_the_distribution_drawn_from(
    seed: int, temperature: float, top_k: int, top_p: float
) -> None:
    """trl#4159, NeMo-RL PR#316, OpenRLHF PR#853: temperature on one side only."""
    logits = 3 * torch.randn(4, 300, generator=torch.Generator().manual_seed(seed))
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    tokens, logprobs = sample(logits, [params] * 4, [uniform(seed, i) for i in range(4)])
    again = logprobs_of(logits, tokens, params)
    assert logprobs == pytest.approx(again, abs=1e-5)
    for row, token in enumerate(tokens):
        assert logprobs[row] == pytest.approx(math.log(naive(logits[row].tolist(), params)[token]), abs=1e-4)


def test_temperature_zero_takes_the_largest_logit_and_reports_the_untempered_logprob() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    tokens, logprobs = sample(logits, [SamplingParams(temperature=0, top_k=1, top_p=0.1)], [0.99])
    assert tokens == [1]
    assert logprobs == pytest.approx([torch.log_softmax(logits, -1)[0, 1].item()])


def test_rows_with_different_settings_do_not_disturb_each_other() -> None:
    logits = torch.randn(5, 400, generator=torch.Generator().manual_seed(3))
    settings_by_row = [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.7, top_k=3),
        SamplingParams(top_p=0.5),
        SamplingParams(temperature=1.4),
    ]
    uniforms = [0.1, 0.5, 0.9, 0.3, 0.7]
    before = logits.clone()
    together = sample(logits, settings_by_row, uniforms)
    assert torch.equal(logits, before)
    for row, params in enumerate(settings_by_row):
        tokens, logprobs = sample(logits[row : row + 1], [params], [uniforms[row]])
        assert (tokens[0], logprobs[0]) == (together[0][row], together[1][row])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_says_so_and_leaves_the_others_alone(bad: float) -> None:
    logits = torch.zeros(3, 300)
    logits[1, 17] = bad
    tokens, logprobs = sample(logits, [SamplingParams()] * 3, [0.5] * 3)
    assert [math.isfinite(value) for value in logprobs] == [True, False, True]
    assert all(0 <= token < 512 for token in tokens)


def test_a_target_that_was_left_out_scores_minus_infinity() -> None:
    scores = logprobs_of(torch.tensor([[0.0, 1.0], [0.0, 1.0]]), [0, 1], SamplingParams(top_k=1))
    assert scores == [float("-inf"), 0.0]


def test_uniform_numbers_depend_on_seed_and_index_alone_and_fill_the_interval() -> None:
    assert uniform(3, 5) == uniform(3, 5)
    numbers = [uniform(seed, index) for seed in range(-20, 20) for index in range(50)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= value < 1 for value in numbers)
    tenths = Counter(int(10 * value) for value in numbers)
    assert all(140 < tenths[i] < 260 for i in range(10))
