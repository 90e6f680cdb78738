"""Packing changes how tokens are stored and nothing about what a target sees or weighs."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.forest import TASK, NaiveTarget, naive_targets, random_advantages, random_groups, trajectory
from palestra.algorithms.packing import pack, partition
from palestra.batches import Batch
from palestra.types import Group, SamplingParams, Trajectory

SAMPLING = SamplingParams(temperature=0.6, top_p=0.9, top_k=20)
seeds = st.integers(0, 10_000)


def group(*members: Trajectory, name: str = "g") -> Group:
    return Group(name, TASK, members)


def unpack(batch: Batch) -> list[NaiveTarget]:
    """Each target with the tokens its predictor sees, by the definition in `Batch`."""
    found = []
    for n, predictor in enumerate(batch.predictors_N):
        chain = [batch.segment_ids_T[predictor]]
        while batch.segment_parents_S[chain[0]] >= 0:
            chain.insert(0, batch.segment_parents_S[chain[0]])
        seen = [i for s in chain for i in range(predictor + 1 if s == chain[-1] else batch.token_count)
                if batch.segment_ids_T[i] == s]  # fmt: skip
        assert [batch.positions_T[i] for i in seen] == list(range(len(seen)))
        context = tuple(batch.tokens_T[i] for i in seen)
        found.append(
            NaiveTarget(context, batch.targets_N[n], batch.weights_N[n], batch.sampler_logprobs_N[n])
        )
    return found


def as_float32(target: NaiveTarget) -> NaiveTarget:
    weight, logprob = array("f", [target.weight, target.sampler_logprob])
    return NaiveTarget(target.context, target.target, weight, logprob)


@given(seeds)
def test_every_target_keeps_its_context_its_weight_and_its_sampler_logprob(seed: int) -> None:
    groups = random_groups(seed)
    advantages = random_advantages(groups, seed)
    expected = [as_float32(t) for t in naive_targets(groups, advantages) if t.weight]
    batch = pack(groups, advantages, SAMPLING)
    assert (batch is None) == (not expected)
    if batch is not None:
        assert unpack(batch) == expected


@given(seeds)
def test_a_batch_knows_how_its_targets_were_sampled(seed: int) -> None:
    groups = random_groups(seed)
    batch = pack(groups, {t.id: 1.0 for g in groups for t in g.rewarded}, SAMPLING)
    assert batch is not None
    assert (batch.temperature, batch.top_p, batch.top_k) == (0.6, 0.9, 20)
    assert batch.old_logprobs_N is None


def test_a_group_stores_its_prompt_once() -> None:
    members = [trajectory(f"m{i}", [((1, 2, 3), False), ((10 + i, 20, 30), True)]) for i in range(3)]
    batch = pack([group(*members)], {"m0": 1.0, "m1": -1.0, "m2": 1.0}, SAMPLING)
    assert batch is not None
    # The last sampled token of a member predicts nothing, so it does not go through the model.
    assert list(batch.tokens_T) == [1, 2, 3, 10, 20, 11, 20, 12, 20]
    assert list(batch.positions_T) == [0, 1, 2, 3, 4, 3, 4, 3, 4]
    assert list(batch.segment_parents_S) == [-1, 0, 0, 0]
    assert list(batch.predictors_N) == [2, 3, 4, 2, 5, 6, 2, 7, 8]
    assert list(batch.targets_N) == [10, 20, 30, 11, 20, 30, 12, 20, 30]
    assert list(batch.sequence_ids_N) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert list(batch.weights_N) == pytest.approx([1 / 9] * 3 + [-1 / 9] * 3 + [1 / 9] * 3)


def test_members_that_share_no_prefix_are_roots_of_their_own() -> None:
    a = trajectory("a", [((1, 2), False), ((3, 4), True)])
    b = trajectory("b", [((5, 2), False), ((3, 4), True)])
    batch = pack([group(a, b)], {"a": 1.0, "b": 1.0}, SAMPLING)
    assert batch is not None
    assert list(batch.segment_parents_S) == [-1, -1]


def test_the_shared_prefix_ends_before_the_first_token_that_any_member_sampled() -> None:
    a = trajectory("a", [((1,), False), ((2,), True), ((3,), False), ((4,), True)])
    b = trajectory("b", [((1, 2, 3), False), ((4,), True)])
    batch = pack([group(a, b)], {"a": 1.0, "b": 1.0}, SAMPLING)
    assert batch is not None
    assert list(batch.tokens_T) == [1, 2, 3, 2, 3]
    assert list(batch.predictors_N) == [0, 2, 4]


def test_a_member_of_one_sampled_token_is_predicted_by_the_root_alone() -> None:
    a = trajectory("a", [((1, 2), False), ((3,), True)])
    b = trajectory("b", [((1, 2), False), ((4,), True)])
    batch = pack([group(a, b)], {"a": 1.0, "b": -1.0}, SAMPLING)
    assert batch is not None
    assert list(batch.tokens_T) == [1, 2]
    assert list(batch.predictors_N) == [1, 1]
    assert list(batch.targets_N) == [3, 4]


def test_only_sampled_tokens_are_targets_after_a_partial_rollout() -> None:
    """Case 12 (slime#1440, PR#2207): loss mask and response length differed after a partial rollout."""
    pieces = [((1, 2), False), ((3, 4), True), ((5, 6, 7), False), ((8,), True), ((9,), False)]
    batch = pack([group(trajectory("a", pieces))], {"a": 2.0}, SAMPLING)
    assert batch is not None
    assert list(batch.targets_N) == [3, 4, 8]
    assert [batch.tokens_T[p] for p in batch.predictors_N] == [2, 3, 7]
    assert batch.token_count == 7
    assert list(batch.weights_N) == pytest.approx([2 / 3] * 3)


def test_a_trajectory_of_zero_advantage_still_counts_in_the_normaliser() -> None:
    """Token mean over the global batch (DAPO): leaving a trajectory out must not rescale the others."""
    a = trajectory("a", [((1,), False), ((2, 3), True)])
    b = trajectory("b", [((1,), False), ((4, 5, 6), True)])
    batch = pack([group(a, b)], {"a": 1.0, "b": 0.0}, SAMPLING)
    assert batch is not None
    assert list(batch.targets_N) == [2, 3]
    assert list(batch.weights_N) == pytest.approx([1 / 5, 1 / 5])


def test_an_abstention_neither_trains_nor_counts() -> None:
    """Case 14 (NeMo-Gym PR#2552): an infrastructure failure is never a number."""
    a = trajectory("a", [((1,), False), ((2, 3), True)])
    b = trajectory("b", [((1,), False), ((4, 5, 6), True)], reward=None)
    batch = pack([group(a, b)], {"a": 1.0}, SAMPLING)
    assert batch is not None
    assert list(batch.weights_N) == pytest.approx([1 / 2, 1 / 2])


def test_a_batch_in_which_nothing_has_a_weight_is_none() -> None:
    a = trajectory("a", [((1,), False), ((2, 3), True)])
    assert pack([group(a)], {"a": 0.0}, SAMPLING) is None
    assert pack([group(trajectory("b", [((1,), False), ((2,), True)], reward=None))], {}, SAMPLING) is None
    assert pack([], {}, SAMPLING) is None


@pytest.mark.parametrize(
    ("advantages", "message"),
    [
        ({}, "a has a reward but no advantage"),
        ({"a": float("nan")}, "advantage of trajectory a is not finite"),
    ],
)
def test_an_advantage_that_is_missing_or_not_finite_is_refused(advantages: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack([group(trajectory("a", [((1,), False), ((2,), True)]))], advantages, SAMPLING)


def test_a_trajectory_that_begins_with_a_sampled_token_is_refused() -> None:
    with pytest.raises(ValueError, match="begins with a sampled token"):
        pack([group(trajectory("a", [((1, 2), True)]))], {"a": 1.0}, SAMPLING)


def test_greedy_samples_are_refused_because_they_have_no_gradient() -> None:
    with pytest.raises(ValueError, match="temperature"):
        pack([], {}, SamplingParams(temperature=0))


def test_two_trajectories_of_one_id_are_refused() -> None:
    a = trajectory("a", [((1,), False), ((2,), True)])
    with pytest.raises(ValueError, match="one id"):
        pack([group(a, name="x"), group(a, name="y")], {"a": 1.0}, SAMPLING)


@given(seeds, st.integers(1, 80))
def test_a_split_keeps_every_target_and_never_cuts_a_tree(seed: int, max_tokens: int) -> None:
    """Case 11 (verl#6280): what a micro-batch holds must not change what its targets see."""
    groups = random_groups(seed)
    batch = pack(groups, {t.id: 0.5 for g in groups for t in g.rewarded}, SAMPLING)
    assert batch is not None
    parts = [part.batch for part in partition(batch, max_tokens)]
    assert [target for part in parts for target in unpack(part)] == unpack(batch)
    assert sum(part.token_count for part in parts) == batch.token_count
    for part in parts:
        roots = sum(parent == -1 for parent in part.segment_parents_S)
        assert part.token_count <= max_tokens or roots == 1
        assert (part.temperature, part.top_p, part.top_k) == (0.6, 0.9, 20)


@given(seeds, st.integers(1, 80))
def test_a_partition_says_which_row_of_the_batch_each_target_was(seed: int, max_tokens: int) -> None:
    groups = random_groups(seed)
    batch = pack(groups, {t.id: 0.5 for g in groups for t in g.rewarded}, SAMPLING)
    assert batch is not None
    shuffled = _reversed_targets(batch)
    parts = partition(shuffled, max_tokens)
    assert sorted(row for part in parts for row in part.target_rows) == list(range(batch.target_count))
    for part in parts:
        assert part.batch.old_logprobs_N is not None
        for column in ("targets_N", "weights_N", "sampler_logprobs_N", "sequence_ids_N", "old_logprobs_N",
                       "ref_logprobs_N", "kl_weights_N"):  # fmt: skip
            whole = getattr(shuffled, column)
            assert list(getattr(part.batch, column)) == [whole[row] for row in part.target_rows]


def _reversed_targets(batch: Batch) -> Batch:
    """The same batch with its targets in another order, and with old logprobs."""
    columns = {
        name: getattr(batch, name)[::-1]
        for name in ("predictors_N", "targets_N", "weights_N", "sampler_logprobs_N", "sequence_ids_N")
    }
    tokens = {
        name: getattr(batch, name)
        for name in ("tokens_T", "positions_T", "segment_ids_T", "segment_parents_S")
    }
    old, ref, kl = (array("f", [-scale * n for n in range(batch.target_count)]) for scale in (1.0, 2.0, 3.0))
    return Batch(**tokens, **columns, old_logprobs_N=old, ref_logprobs_N=ref, kl_weights_N=kl)


def test_each_sampled_token_may_have_an_advantage_of_its_own() -> None:
    a = trajectory("a", [((1,), False), ((2, 3), True), ((4,), False), ((5,), True)])
    b = trajectory("b", [((1,), False), ((2,), True)])
    batch = pack([group(a, b)], {"a": [1.0, 0.0, -2.0], "b": 0.5}, SAMPLING)
    assert batch is not None
    assert list(batch.targets_N) == [2, 3, 5, 2]
    assert list(batch.weights_N) == pytest.approx([1 / 4, 0.0, -2 / 4, 0.5 / 4])


def test_a_trajectory_whose_every_token_has_advantage_zero_is_left_out_of_the_batch_and_counts() -> None:
    a = trajectory("a", [((1,), False), ((2, 3), True)])
    b = trajectory("b", [((1,), False), ((2,), True)])
    batch = pack([group(a, b)], {"a": [0.0, 0.0], "b": [1.0]}, SAMPLING)
    assert batch is not None
    assert list(batch.weights_N) == pytest.approx([1 / 3])


@pytest.mark.parametrize(
    ("advantage", "message"),
    [
        ([1.0], "a has 2 sampled tokens and advantages for 1"),
        ([1.0, 2.0, 3.0], "advantages for 3"),
        ([], "advantages for 0"),
        ([1.0, float("nan")], "advantage of trajectory a is not finite"),
    ],
)
def test_advantages_by_token_must_fit_the_trajectory(advantage: list[float], message: str) -> None:
    made = trajectory("a", [((1,), False), ((2, 3), True)])
    with pytest.raises(ValueError, match=message):
        pack([group(made)], {"a": advantage}, SAMPLING)


@given(seeds)
def test_one_advantage_and_the_same_for_every_token_are_one_batch(seed: int) -> None:
    groups = random_groups(seed)
    advantages = random_advantages(groups, seed)
    counts = {t.id: t.sampled_count for g in groups for t in g.rewarded}
    by_token = {name: [value] * counts[name] for name, value in advantages.items()}
    assert pack(groups, by_token, SAMPLING) == pack(groups, advantages, SAMPLING)


def test_what_is_left_out_counts_nowhere() -> None:
    a = trajectory("a", [((1,), False), ((2, 3), True)])
    b = trajectory("b", [((1,), False), ((2,), True)])
    alone = pack([group(b)], {"b": 1.0}, SAMPLING)
    assert pack([group(a, b)], {"a": 5.0, "b": 1.0}, SAMPLING, left_out={"a"}) == alone
    assert pack([group(a)], {"a": 5.0}, SAMPLING, left_out={"a"}, kl=True) is None


def test_for_a_kl_term_what_has_no_advantage_stays_and_every_target_has_its_normaliser() -> None:
    a = trajectory("a", [((1,), False), ((2, 3), True)])
    b = trajectory("b", [((1,), False), ((2,), True)])
    batch = pack([group(a, b)], {"a": 0.0, "b": -2.0}, SAMPLING, aggregate="sequence", kl=True)
    assert batch is not None
    assert list(batch.weights_N) == pytest.approx([0.0, 0.0, -1.0])
    assert batch.kl_weights_N is not None
    assert list(batch.kl_weights_N) == pytest.approx([0.25, 0.25, 0.5])


def test_a_micro_batch_of_no_tokens_is_refused() -> None:
    batch = pack([group(trajectory("a", [((1,), False), ((2,), True)]))], {"a": 1.0}, SAMPLING)
    assert batch is not None
    with pytest.raises(ValueError, match="max_tokens"):
        partition(batch, 0)
