"""The decode loop by itself: admission, shared prompts, slots, versions; no threads, no clocks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.errors import EngineError
from palestra.rollouts.native.batch import DecodeBatch, Row, _portions
from palestra.rollouts.native.cache import STRIDE, KVCache
from palestra.rollouts.native.linears import LinearOps
from palestra.rollouts.native.stop import StopChecker
from palestra.rollouts.native.weights import load
from palestra.types import Completion, SamplingParams, StopReason, Version
from rollouts.support import Tiny, manifest_of, ragged_prompts

CONTEXT = 256


def make_batch(tiny: Tiny, max_running: int = 4) -> DecodeBatch:
    model, weights = tiny.weights()
    batch = DecodeBatch(model, max_running=max_running, context=CONTEXT)
    batch.install(weights, Version("test", 0))
    return batch


def make_row(prompt: list[int], **params: object) -> Row:
    sampling = SamplingParams(**({"max_new_tokens": 6} | params))  # type: ignore[arg-type]
    room = CONTEXT - len(prompt)
    stop = StopChecker(
        sampling, room=room, eos_token_ids=frozenset(), token_bytes=lambda token: bytes([token % 256])
    )
    return Row(tuple(prompt), sampling, stop, room)


def run(batch: DecodeBatch) -> list[Row]:
    ended: list[Row] = []
    while batch.busy:
        ended += batch.step()
    return ended


def tokens_of(row: Row) -> tuple[int, ...]:
    assert isinstance(row.outcome, Completion)
    return row.outcome.token_ids


def alone(tiny: Tiny, prompt: list[int], **params: object) -> tuple[int, ...]:
    batch = make_batch(tiny, max_running=1)
    row = make_row(prompt, **params)
    batch.submit([row])
    run(batch)
    return tokens_of(row)


def test_rows_are_admitted_in_order_and_never_more_than_there_are_slots(tiny: Tiny) -> None:
    batch = make_batch(tiny, max_running=3)
    rows = [make_row(p, seed=i, max_new_tokens=2 + i % 4) for i, p in enumerate(ragged_prompts(10))]
    batch.submit(rows)
    admitted: list[Row] = []
    while batch.busy:
        waiting = list(batch.waiting)
        batch.step()
        assert len(batch.running) <= 3
        admitted += [row for row in waiting if row not in batch.waiting]
    assert admitted == rows
    assert all(len(tokens_of(row)) == 2 + i % 4 for i, row in enumerate(rows))


def test_a_request_gets_the_same_tokens_in_a_crowd_as_alone(tiny: Tiny) -> None:
    prompts = ragged_prompts(12, seed=2)
    rows = [make_row(p, seed=i, max_new_tokens=5 + 3 * (i % 5)) for i, p in enumerate(prompts)]
    batch = make_batch(tiny, max_running=5)
    batch.submit(rows)
    run(batch)
    for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        assert tokens_of(row) == alone(tiny, prompt, seed=i, max_new_tokens=5 + 3 * (i % 5))


@settings(max_examples=15, deadline=None)
@given(
    events=st.lists(st.tuples(st.sampled_from(["submit", "cancel", "step"]), st.integers(0, 9)), max_size=40)
)
def test_whatever_comes_and_goes_the_rows_that_finish_are_right(
    tiny: Tiny, events: list[tuple[str, int]]
) -> None:
    """Slots move when rows leave: no row may ever read another's keys and values."""
    prompts = ragged_prompts(10, seed=1, longest=12)
    batch = make_batch(tiny, max_running=3)
    rows: list[Row] = []
    for action, number in events:
        if action == "submit":
            rows.append(make_row(prompts[number], seed=number))
            batch.submit(rows[-1:])
        elif action == "cancel" and rows:
            batch.cancel(rows[number % len(rows)])
        elif batch.busy:
            batch.step()
    run(batch)
    for row in rows:
        if row.outcome is not None:
            assert tokens_of(row) == alone(tiny, list(row.prompt), seed=row.sampling.seed)


def test_a_group_shares_the_prefill_of_its_prompt(tiny: Tiny) -> None:
    batch = make_batch(tiny, max_running=8)
    first, second = ragged_prompts(2, seed=3)
    rows = [make_row(first if i % 2 else second, seed=i) for i in range(8)]
    batch.submit(rows)
    run(batch)
    assert batch.prompt_tokens == len(first) + len(second)
    assert all(tokens_of(row) == alone(tiny, list(row.prompt), seed=i) for i, row in enumerate(rows))
    assert len({tokens_of(row) for row in rows}) == 8


def test_a_row_that_enters_later_uses_the_prompt_of_a_running_row(tiny: Tiny) -> None:
    batch = make_batch(tiny, max_running=2)
    prompt = ragged_prompts(1, seed=4)[0]
    rows = [make_row(prompt, seed=i, max_new_tokens=3 + 4 * (i % 2)) for i in range(6)]
    batch.submit(rows)
    run(batch)
    assert batch.prompt_tokens < 3 * len(prompt)
    assert all(
        tokens_of(row) == alone(tiny, prompt, seed=i, max_new_tokens=3 + 4 * (i % 2))
        for i, row in enumerate(rows)
    )


def test_a_prompt_computed_by_other_weights_is_never_used_again(tiny: Tiny) -> None:
    """NeMo-RL PR#4018, prime-rl PR#2270, vllm#9744: the prefix cache survived a weight update."""
    batch = make_batch(tiny, max_running=2)
    prompt = ragged_prompts(1, seed=5)[0]
    early, late = make_row(prompt, max_new_tokens=20), make_row(prompt, seed=9)
    batch.submit([early])
    batch.step()
    other = tiny.changed()
    model = batch._model
    weights, _ = load(tiny.config, model.ops, manifest_of(other), other.items())
    batch.install(weights, Version("test", 1))
    batch.submit([late])
    run(batch)
    assert batch.prompt_tokens == 2 * len(prompt)
    fresh = DecodeBatch(model, max_running=1, context=CONTEXT)
    fresh.install(weights, Version("test", 1))
    expected = make_row(prompt, seed=9)
    fresh.submit([expected])
    run(fresh)
    assert tokens_of(late) == tokens_of(expected)
    assert isinstance(early.outcome, Completion)
    assert early.outcome.versions == (0, 0, *[1] * 18)


def test_a_row_with_numbers_that_are_not_finite_fails_alone_and_leaves_no_trace(tiny: Tiny) -> None:
    """A diverged version: the rows fail with the reason, and a good version serves on in clean slots."""
    batch = make_batch(tiny, max_running=2)
    good = batch._weights
    assert good is not None
    broken = {name: t.clone() for name, t in tiny.tensors.items()}
    broken["model.embed_tokens.weight"][7] = float("nan")
    weights, _ = load(tiny.config, LinearOps(torch.float32, False, 1), manifest_of(broken), broken.items())
    batch.install(weights, Version("test", 1))
    row = make_row([5, 7, *range(10, 30)])
    batch.submit([row])
    assert run(batch) == [row]
    assert isinstance(row.outcome, EngineError)
    assert "not finite under test@1" in str(row.outcome)
    batch.install(good, Version("test", 2))
    healthy = make_row([5, 6, 8])
    batch.submit([healthy])
    run(batch)
    assert tokens_of(healthy) == alone(tiny, [5, 6, 8])


def test_cancelling_frees_the_slot_and_leaves_the_others_untouched(tiny: Tiny) -> None:
    batch = make_batch(tiny, max_running=3)
    prompts = ragged_prompts(4, seed=6)
    rows = [make_row(p, seed=i, max_new_tokens=12) for i, p in enumerate(prompts)]
    batch.submit(rows)
    batch.step()
    batch.cancel(rows[0])
    batch.cancel(rows[0])
    assert len(batch.running) == 2
    batch.step()
    assert rows[3] in batch.running
    run(batch)
    assert rows[0].outcome is None
    for i in (1, 2, 3):
        assert tokens_of(rows[i]) == alone(tiny, prompts[i], seed=i, max_new_tokens=12)


def test_a_waiting_row_can_be_cancelled(tiny: Tiny) -> None:
    batch = make_batch(tiny, max_running=1)
    rows = [make_row([1, 2]), make_row([3, 4])]
    batch.submit(rows)
    batch.step()
    batch.cancel(rows[1])
    assert run(batch) == rows[:1]


def test_a_row_stops_exactly_where_the_context_ends(tiny: Tiny) -> None:
    batch = make_batch(tiny)
    row = make_row([65] * (CONTEXT - 3), max_new_tokens=50)
    batch.submit([row])
    run(batch)
    assert isinstance(row.outcome, Completion)
    assert row.outcome.stop_reason is StopReason.CONTEXT
    assert len(row.outcome.token_ids) == 3


def test_prompts_are_prefilled_in_portions_that_change_nothing(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ragged_prompts(6, seed=7)
    expected = [alone(tiny, prompt) for prompt in prompts]
    monkeypatch.setattr("palestra.rollouts.native.batch.PREFILL_TOKENS", 25)
    batch = make_batch(tiny, max_running=6)
    rows = [make_row(prompt) for prompt in prompts]
    batch.submit(rows)
    run(batch)
    assert [tokens_of(row) for row in rows] == expected


@given(st.lists(st.integers(1, 30), max_size=20))
def test_portions_keep_order_and_limit(lengths: list[int]) -> None:
    portions = _portions(lengths, 40)
    assert [i for portion in portions for i in portion] == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in portion) <= 40 for portion in portions)
    assert all(portions)


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.7), SamplingParams(top_k=9, top_p=0.8)])
def test_scoring_in_portions_gives_one_logprob_per_token_after_the_first(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, params: SamplingParams
) -> None:
    batch = make_batch(tiny)
    tokens = ragged_prompts(1, seed=8)[0]
    whole = batch.score(tokens, params)
    assert len(whole) == len(tokens) - 1
    monkeypatch.setattr("palestra.rollouts.native.batch.SCORE_ROWS", 5)
    assert batch.score(tokens, params) == whole
    assert batch.score(tokens[:1], params) == ()
    assert all(value <= 1e-5 and not math.isnan(value) for value in whole)


def test_a_batch_without_weights_says_what_to_do(tiny: Tiny) -> None:
    model, _ = tiny.weights()
    batch = DecodeBatch(model, max_running=1, context=CONTEXT)
    batch.submit([make_row([1])])
    with pytest.raises(EngineError, match="no weights"):
        batch.step()


def test_the_cache_grows_only_when_needed_and_keeps_what_it_holds(tiny: Tiny) -> None:
    cache = KVCache(tiny.config, slots=2, context=CONTEXT, dtype=torch.float32)
    assert cache.nbytes == 0
    cache.reserve(10, 0)
    first, size = cache.keys[0].data_ptr(), cache.tokens
    cache.reserve(size, 2)
    assert cache.keys[0].data_ptr() == first
    keys = torch.randn(7, tiny.config.kv_heads, tiny.config.head_dim)
    cache.write_prompt(1, 1, keys, 2 * keys)
    cache.reserve(size + 1, 2)
    assert cache.tokens == 2 * size
    assert cache.tokens % STRIDE == 0
    heads = tiny.config.kv_heads
    assert torch.equal(cache.keys[1][heads : 2 * heads, :7], keys.transpose(0, 1))
    assert torch.equal(cache.values[1][heads : 2 * heads, :7], 2 * keys.transpose(0, 1))
    cache.copy(1, 0, 7)
    assert torch.equal(cache.keys[1][:heads, :7], keys.transpose(0, 1))
    cache.clear(0)
    assert not cache.keys[1][:heads].any()
    cache.release()
    assert (cache.nbytes, cache.tokens) == (0, 0)


def test_growing_copies_the_slots_that_hold_something_and_no_others(tiny: Tiny) -> None:
    cache = KVCache(tiny.config, slots=3, context=CONTEXT, dtype=torch.float32)
    cache.reserve(10, 0)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(1.0)
    cache.reserve(cache.tokens + 1, 2)
    rows = 2 * tiny.config.kv_heads
    for tensor in (*cache.keys, *cache.values):
        assert (tensor[:rows, : cache.tokens // 2] == 1).all()
        assert not tensor[:rows, cache.tokens // 2 :].any()
        assert not tensor[rows:].any()


def test_rows_that_run_keep_their_numbers_when_the_cache_grows_under_them(tiny: Tiny) -> None:
    batch = make_batch(tiny, max_running=4)
    prompts = ragged_prompts(3, seed=10)
    early = [make_row(p, seed=i, max_new_tokens=20) for i, p in enumerate(prompts)]
    batch.submit(early)
    for _ in range(5):
        batch.step()
    size = batch.cache.tokens
    late = make_row([7] * (size + 10), seed=9)
    batch.submit([late])
    run(batch)
    assert batch.cache.tokens > size
    for i, row in enumerate(early):
        assert tokens_of(row) == alone(tiny, prompts[i], seed=i, max_new_tokens=20)


def test_a_rest_gives_the_cache_back_and_changes_no_number(tiny: Tiny) -> None:
    batch = make_batch(tiny, max_running=2)
    first, second, third = (make_row([5, 6, 7], seed=3, max_new_tokens=8) for _ in range(3))
    batch.submit([first])
    batch.step()
    batch.rest()
    assert batch.cache.nbytes > 0, "a row runs"
    run(batch)
    batch.submit([second])
    run(batch)
    batch.rest()
    assert batch.cache.nbytes == 0
    batch.submit([third])
    run(batch)
    assert tokens_of(first) == tokens_of(second) == tokens_of(third)
