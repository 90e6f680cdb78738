"""The decode loop by itself: admission, shared prompts, slots, versions; no threads, no clocks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.errors import EngineError
from palestra.rollouts.base import GenerateRequest, VersionNotReady
from palestra.rollouts.native.batch import PIECE, DecodeBatch
from palestra.rollouts.native.cache import SMALLEST
from palestra.rollouts.native.linears import LinearOps
from palestra.rollouts.native.rows import Row
from palestra.rollouts.native.stop import StopChecker
from palestra.rollouts.native.weights import Weights, load
from palestra.types import Completion, SamplingParams, StopReason, Version
from rollouts.support import Tiny, manifest_of, ragged_prompts

CONTEXT = 256


def make_batch(
    tiny: Tiny,
    max_running: int = 4,
    *,
    budget: int = 64 * CONTEXT,
    prefix_budget: int = 4 * CONTEXT,
    compiled: bool = True,
) -> DecodeBatch:
    model, weights = tiny.weights(compiled=compiled)
    batch = DecodeBatch(
        model, max_running=max_running, context=CONTEXT, budget=budget, prefix_budget=prefix_budget
    )
    batch.install(weights, Version("test", 0))
    return batch


REQUEST_FIELDS = {"session", "min_new_tokens", "logit_bias", "exact_version"}


def make_row(prompt: list[int], *, ends: frozenset[int] = frozenset(), **params: Any) -> Row:
    fields = {name: params.pop(name) for name in REQUEST_FIELDS & params.keys()}
    sampling = SamplingParams(**({"max_new_tokens": 6} | params))
    request = GenerateRequest(tuple(prompt), sampling, **fields)
    room = CONTEXT - len(prompt)
    stop = StopChecker(
        sampling,
        room=room,
        eos_token_ids=ends,
        token_bytes=lambda token: bytes([token % 256]),
        at_least=request.min_new_tokens,
    )
    return Row(request, stop, room, never_first=ends | frozenset(sampling.stop_token_ids))


def other_weights(tiny: Tiny, batch: DecodeBatch, seed: int = 1) -> Weights:
    tensors = tiny.changed(seed)
    return load(tiny.config, batch._model.ops, manifest_of(tensors), tensors.items())[0]


def run(batch: DecodeBatch) -> list[Row]:
    ended: list[Row] = []
    while batch.busy:
        ended += batch.step()
    return ended


def tokens_of(row: Row) -> tuple[int, ...]:
    assert isinstance(row.outcome, Completion)
    return row.outcome.token_ids


def alone(tiny: Tiny, prompt: list[int], *, compiled: bool = True, **params: object) -> tuple[int, ...]:
    batch = make_batch(tiny, max_running=1, compiled=compiled)
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
    weights = other_weights(tiny, batch)
    batch.install(weights, Version("test", 1))
    batch.submit([late])
    run(batch)
    assert batch.prompt_tokens == 2 * len(prompt)
    fresh = make_batch(tiny, max_running=1)
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
    batch = DecodeBatch(model, max_running=1, context=CONTEXT, budget=CONTEXT)
    batch.submit([make_row([1])])
    with pytest.raises(EngineError, match="no weights"):
        batch.step()


def test_a_long_row_that_enters_changes_nothing_for_the_short_ones(tiny: Tiny) -> None:
    batch = make_batch(tiny, max_running=4)
    prompts = ragged_prompts(3, seed=10)
    early = [make_row(p, seed=i, max_new_tokens=20) for i, p in enumerate(prompts)]
    batch.submit(early)
    for _ in range(5):
        batch.step()
    late = make_row([7] * (SMALLEST + 10), seed=9)
    batch.submit([late])
    batch.step()
    assert sorted(batch.cache.pools) == [SMALLEST, 2 * SMALLEST]
    run(batch)
    for i, row in enumerate(early):
        assert tokens_of(row) == alone(tiny, prompts[i], seed=i, max_new_tokens=20)
    assert tokens_of(late) == alone(tiny, [7] * (SMALLEST + 10), seed=9)


def test_a_row_waits_for_cache_it_may_need_and_then_finishes(tiny: Tiny) -> None:
    """Admission by free cache: what is admitted always has room for its last token."""
    batch = make_batch(tiny, max_running=8, budget=3 * SMALLEST, prefix_budget=0)
    rows = [make_row([i + 1] * 100, seed=i, max_new_tokens=SMALLEST - 100) for i in range(7)]
    batch.submit(rows)
    most = 0
    while batch.busy:
        batch.step()
        most = max(most, len(batch.running))
        assert batch.cache.reserved <= 3 * SMALLEST
    assert most == 3
    assert all(len(tokens_of(row)) == SMALLEST - 100 for row in rows)


def test_idle_slots_of_one_size_make_room_for_another(tiny: Tiny) -> None:
    batch = make_batch(tiny, max_running=8, budget=4 * SMALLEST, prefix_budget=0)
    batch.submit([make_row([i + 1], seed=i) for i in range(4)])
    run(batch)
    assert batch.cache.reserved == 4 * SMALLEST
    long = make_row([3] * (SMALLEST + 1))
    batch.submit([long])
    run(batch)
    assert tokens_of(long) == alone(tiny, [3] * (SMALLEST + 1))
    assert batch.cache.reserved <= 4 * SMALLEST


def test_a_long_prompt_is_computed_piece_by_piece_while_others_decode(tiny: Tiny) -> None:
    batch = make_batch(tiny)
    short, long = make_row([5, 6], max_new_tokens=20), make_row([7] * (PIECE + PIECE // 2), seed=4)
    batch.submit([short])
    batch.step()
    batch.submit([long])
    before = len(short.tokens)
    batch.step()
    assert len(short.tokens) == before + 1
    assert long.filled == PIECE
    assert not long.tokens
    batch.step()
    assert len(long.tokens) == 2
    run(batch)
    assert tokens_of(long) == alone(tiny, [7] * (PIECE + PIECE // 2), seed=4)
    assert tokens_of(short) == alone(tiny, [5, 6], max_new_tokens=20)


def test_a_new_version_in_the_middle_of_a_prompt_computes_the_prompt_anew(tiny: Tiny) -> None:
    """NeMo-RL PR#4018: keys and values of one version must not answer for another."""
    batch = make_batch(tiny)
    busy, long = make_row([5, 6], max_new_tokens=30), make_row([7] * (PIECE + 9), seed=4)
    batch.submit([busy])
    batch.step()
    batch.submit([long])
    batch.step()
    weights = other_weights(tiny, batch)
    batch.install(weights, Version("test", 1))
    run(batch)
    fresh = make_batch(tiny)
    fresh.install(weights, Version("test", 1))
    expected = make_row([7] * (PIECE + 9), seed=4)
    fresh.submit([expected])
    run(fresh)
    assert tokens_of(long) == tokens_of(expected)
    assert isinstance(long.outcome, Completion)
    assert set(long.outcome.versions) == {1}


def test_a_follower_whose_leader_is_cancelled_computes_the_prompt_itself(tiny: Tiny) -> None:
    batch = make_batch(tiny)
    prompt = [7] * (PIECE + 9)
    busy = make_row([5, 6], max_new_tokens=30)
    leader, follower = make_row(prompt, seed=1), make_row(prompt, seed=2)
    batch.submit([busy])
    batch.step()
    batch.submit([leader, follower])
    batch.step()
    batch.cancel(leader)
    run(batch)
    assert tokens_of(follower) == alone(tiny, prompt, seed=2)


# -- sessions


def second_turn(first: Row, more: list[int], **params: Any) -> Row:
    return make_row([*first.prompt, *tokens_of(first), *more], session=first.request.session, **params)


def test_a_sessions_next_turn_computes_only_what_is_new(tiny: Tiny) -> None:
    batch = make_batch(tiny)
    first = make_row(ragged_prompts(1, seed=30)[0], session="s", seed=3)
    batch.submit([first])
    run(batch)
    second = second_turn(first, [9, 8, 7], seed=4)
    before = batch.prompt_tokens
    batch.submit([second])
    run(batch)
    assert batch.reused_tokens == len(first.prompt) + len(tokens_of(first)) - 1
    assert batch.prompt_tokens - before == 4, "the last sampled token and the three new ones"
    assert tokens_of(second) == alone(tiny, list(second.prompt), seed=4)


def test_a_session_that_went_another_way_reuses_what_is_common(tiny: Tiny) -> None:
    batch = make_batch(tiny)
    first = make_row([1, 2, 3, 4, 5, 6], session="s")
    batch.submit([first])
    run(batch)
    other = make_row([1, 2, 3, 9, 9], session="s", seed=8)
    batch.submit([other])
    run(batch)
    assert batch.reused_tokens == 3
    assert tokens_of(other) == alone(tiny, [1, 2, 3, 9, 9], seed=8)


def test_a_session_never_computes_upon_another_versions_keys(tiny: Tiny) -> None:
    """NeMo-RL PR#4018, prime-rl PR#2270, vllm#9744: KV of old weights was used up to 17 versions later."""
    batch = make_batch(tiny)
    first = make_row([1, 2, 3, 4, 5, 6], session="s", max_new_tokens=6)
    running = make_row([8, 9], session="t", max_new_tokens=12)
    batch.submit([first, running])
    while first.outcome is None:
        batch.step()
    assert len(batch.prefixes) == 1
    weights = other_weights(tiny, batch)
    batch.install(weights, Version("test", 1))
    assert len(batch.prefixes) == 0
    run(batch)
    assert isinstance(running.outcome, Completion)
    assert set(running.outcome.versions) == {0, 1}
    assert len(batch.prefixes) == 0, "what two versions computed together is kept by nobody"
    fresh = make_batch(tiny)
    fresh.install(weights, Version("test", 1))
    expected = second_turn(first, [4], seed=5)
    fresh.submit([expected])
    run(fresh)
    second = second_turn(first, [4], seed=5)
    batch.submit([second])
    run(batch)
    assert batch.reused_tokens == 0
    assert tokens_of(second) == tokens_of(expected)


def test_what_one_session_left_never_reaches_anothers_numbers(tiny: Tiny) -> None:
    """Two requests with one prompt: the one that went on from kept positions lends them to nobody else."""
    history = ragged_prompts(1, seed=31)[0]
    first = make_row(history, session="s", seed=1)
    prompt = [*history, *alone(tiny, history, seed=1), 9]
    batch = make_batch(tiny)
    batch.submit([first])
    run(batch)
    resumed = make_row(prompt, session="s", seed=5, max_new_tokens=20)
    stranger, other = make_row(prompt, seed=5), make_row(prompt, session="t", seed=5)
    batch.submit([resumed])
    batch.step()
    batch.submit([stranger, other])
    run(batch)
    assert resumed.resumed
    plain = make_batch(tiny)
    expected = make_row(prompt, seed=5)
    plain.submit([expected])
    run(plain)
    for row in (stranger, other):
        assert row.outcome == expected.outcome, "tokens and logprobs, to the bit"


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("how", ["finish", "cancel in prefill", "abort"])
def test_what_is_not_a_number_stays_with_the_rows_it_came_from(tiny: Tiny, compiled: bool, how: str) -> None:
    """A diverged version fills many slots with nan; whoever gets them later computes as if they were new."""
    batch = make_batch(tiny, max_running=16, compiled=compiled)
    good = batch._weights
    assert good is not None
    broken = {name: t.clone() for name, t in tiny.tensors.items()}
    broken["model.layers.0.self_attn.v_proj.weight"].fill_(float("nan"))
    weights, _ = load(tiny.config, batch._model.ops, manifest_of(broken), broken.items())
    batch.install(weights, Version("test", 1))
    bad = [make_row([i + 1] * (PIECE + 20), max_new_tokens=4) for i in range(16)]
    batch.submit(bad)
    if how == "finish":
        run(batch)
    else:
        busy = make_row([9, 9], max_new_tokens=90)
        batch.submit([busy])
        batch.step()
        for row in bad[::2] if how == "cancel in prefill" else ():
            batch.cancel(row)
        batch.abort(waiting=True)
        batch.take_ended()
    batch.install(good, Version("test", 2))
    prompts = ragged_prompts(16, seed=32)
    rows = [make_row([*p, *[7] * PIECE], seed=i) for i, p in enumerate(prompts)]
    batch.submit(rows)
    run(batch)
    for i, row in enumerate(rows):
        assert tokens_of(row) == alone(tiny, list(row.prompt), seed=i, compiled=compiled)


def test_without_a_session_nothing_is_kept(tiny: Tiny) -> None:
    batch = make_batch(tiny)
    batch.submit([make_row([1, 2, 3])])
    run(batch)
    assert len(batch.prefixes) == 0


def test_what_sessions_keep_makes_room_for_requests(tiny: Tiny) -> None:
    budget = 8 * SMALLEST + 40
    batch = make_batch(tiny, budget=budget, prefix_budget=budget)
    sessions = [make_row([i + 1] * 10, session=str(i)) for i in range(6)]
    batch.submit(sessions)
    run(batch)
    assert 0 < batch.prefixes.held <= 40
    assert batch.cache.reserved + batch.prefixes.held <= budget
    rows = [make_row([i + 1], seed=i) for i in range(3)]
    long = make_row([3] * (SMALLEST + 1))
    batch.submit([*rows, long])
    run(batch)
    assert tokens_of(long) == alone(tiny, [3] * (SMALLEST + 1))


# -- what a request may ask for beside the sampling


def test_an_exact_version_ends_with_the_version(tiny: Tiny) -> None:
    batch = make_batch(tiny, max_running=2)
    bound, free = make_row([1, 2], exact_version=0, max_new_tokens=9), make_row([1, 3], max_new_tokens=9)
    waits = make_row([1, 4], exact_version=0)
    batch.submit([bound, free, waits])
    batch.step()
    batch.install(other_weights(tiny, batch), Version("test", 1))
    ended = run(batch)
    assert {id(row) for row in ended} == {id(bound), id(free), id(waits)}
    for row in (bound, waits):
        assert isinstance(row.outcome, VersionNotReady)
    assert len(tokens_of(free)) == 9


def test_before_min_new_tokens_no_end_is_sampled_and_nothing_else_ends_it(tiny: Tiny) -> None:
    everything = frozenset(range(0, 256, 2))
    for seed in range(5):
        batch = make_batch(tiny)
        row = make_row([1, 2], seed=seed, ends=everything, min_new_tokens=7, max_new_tokens=20)
        stopped = make_row([1, 3], seed=seed, stop=("\x01",), min_new_tokens=7, max_new_tokens=9)
        batch.submit([row, stopped])
        run(batch)
        tokens = tokens_of(row)
        assert len(tokens) >= 7
        assert not everything & set(tokens[:6])
        assert len(tokens_of(stopped)) >= 7


def test_a_logit_bias_moves_one_row_and_no_other(tiny: Tiny) -> None:
    batch = make_batch(tiny)
    forced = make_row([1, 2], logit_bias={77: 1e4})
    plain = make_row([1, 2], seed=1)
    batch.submit([forced, plain])
    run(batch)
    assert set(tokens_of(forced)) == {77}
    assert tokens_of(plain) == alone(tiny, [1, 2], seed=1)


def test_a_row_that_has_ended_may_still_be_cancelled_and_is_then_forgotten(tiny: Tiny) -> None:
    batch = make_batch(tiny)
    rows = [make_row([i + 1], max_new_tokens=30) for i in range(2)]
    batch.submit(rows)
    batch.step()
    batch.abort(waiting=True)
    batch.cancel(rows[0])
    assert batch.take_ended() == rows[1:]


@pytest.mark.parametrize("waiting", [True, False])
def test_an_abort_ends_rows_with_what_they_have(tiny: Tiny, waiting: bool) -> None:
    batch = make_batch(tiny, max_running=2)
    rows = [make_row([i + 1], seed=i, max_new_tokens=30) for i in range(3)]
    batch.submit(rows)
    batch.step()
    batch.abort(waiting=waiting)
    ended = batch.take_ended()
    assert ended == (rows if waiting else rows[:2])
    for row in rows[:2]:
        assert isinstance(row.outcome, Completion)
        assert row.outcome.stop_reason is StopReason.ABORTED
        assert len(row.outcome.token_ids) == 2
    assert not batch.running
    assert batch.busy is not waiting


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
