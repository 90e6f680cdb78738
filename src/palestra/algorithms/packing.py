"""Groups and advantages in, one packed `Batch` out; a batch in, micro-batches out.

What a target sees does not change by packing: its context is its own
trajectory's tokens before it, at their own positions. A target's weight is its
advantage times what `palestra.algorithms.aggregation` gives each token of *all*
rewarded trajectories of the batch that count, so neither leaving out a trajectory
of zero advantage nor a split into micro-batches changes a gradient. Only tokens
with ``sampled_mask`` become targets. Tokens that no target depends on are left
out. Pure Python over `palestra.types`: no framework.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from palestra.algorithms.aggregation import Aggregate, token_weights
from palestra.batches import Batch
from palestra.types import Group, SamplingParams, Trajectory


def pack(
    groups: Sequence[Group],
    advantages: Mapping[str, float | Sequence[float]],
    sampling: SamplingParams,
    *,
    aggregate: Aggregate = "token",
    left_out: Collection[str] = (),
    kl: bool = False,
) -> Batch | None:
    """One tree per group: what its members share unsampled is stored once, as the root.

    ``advantages`` is keyed by trajectory id and covers every rewarded trajectory: one
    number, or one for each of its sampled tokens. Those ``left_out`` do not count in
    the aggregate either. ``kl`` keeps trajectories of zero advantage and adds
    ``kl_weights_N``. None where there is no target. Raises ValueError if an advantage
    is missing or not finite or of another length, if a trajectory begins with a
    sampled token (nothing predicts it), or if the samples were greedy (temperature 0
    has no gradient).
    """
    if sampling.temperature <= 0:
        raise ValueError(
            "greedy samples (temperature 0) have no policy gradient; sample at a temperature > 0"
        )
    rewarded = [trajectory for group in groups for trajectory in group.rewarded]
    if len({trajectory.id for trajectory in rewarded}) != len(rewarded):
        raise ValueError("two rewarded trajectories have one id, so their advantages cannot be told apart")
    by_token = {trajectory.id: _by_token(trajectory, advantages) for trajectory in rewarded}
    counted = [trajectory for trajectory in rewarded if trajectory.id not in left_out]
    lengths = [trajectory.sampled_count for trajectory in counted]
    normalizers = token_weights(lengths, aggregate, sampling.max_new_tokens)
    normalizer = {t.id: share for t, share in zip(counted, normalizers, strict=True)}
    columns = _Columns()
    for group in groups:
        members = [
            _Member.of(trajectory, by_token[trajectory.id], normalizer[trajectory.id])
            for trajectory in group.rewarded
            if trajectory.id in normalizer and (kl or any(by_token[trajectory.id]))
        ]
        if members:
            columns.add_tree(members)
    return columns.batch(sampling, kl) if columns.targets else None


def _by_token(trajectory: Trajectory, advantages: Mapping[str, float | Sequence[float]]) -> Sequence[float]:
    """The advantage of each sampled token."""
    count = trajectory.sampled_count
    advantage = advantages.get(trajectory.id)
    if advantage is None:
        raise ValueError(f"trajectory {trajectory.id} has a reward but no advantage")
    row = [advantage] * count if isinstance(advantage, (int, float)) else advantage
    if len(row) != count:
        raise ValueError(
            f"trajectory {trajectory.id} has {count} sampled tokens and advantages for {len(row)}"
        )
    if not all(map(math.isfinite, row)):
        raise ValueError(f"the advantage of trajectory {trajectory.id} is not finite: {advantage}")
    return row


@dataclass(frozen=True, slots=True)
class _Member:
    """A trajectory that trains, cut after the last token that predicts a target."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampled: tuple[int, ...]
    """Indices of the sampled tokens."""
    weights: tuple[float, ...]
    """Of the sampled tokens."""
    normalizer: float

    @classmethod
    def of(cls, trajectory: Trajectory, advantages: Sequence[float], normalizer: float) -> _Member:
        sampled = tuple(index for index, flag in enumerate(trajectory.sampled_mask) if flag)
        if sampled[0] == 0:
            raise ValueError(f"trajectory {trajectory.id} begins with a sampled token: nothing predicts it")
        weights = tuple(advantage * normalizer for advantage in advantages)
        return cls(trajectory.token_ids, trajectory.logprobs, sampled, weights, normalizer)

    @property
    def length(self) -> int:
        return self.sampled[-1]


def _shared_prefix(members: Sequence[_Member]) -> int:
    """Length of the longest common run of token ids in which no member sampled anything."""
    limit = min(member.sampled[0] for member in members)
    first = members[0].tokens
    for index in range(limit):
        if any(member.tokens[index] != first[index] for member in members):
            return index
    return limit


@dataclass(slots=True)
class _Columns:
    tokens: list[int] = field(default_factory=list[int])
    positions: list[int] = field(default_factory=list[int])
    segments: list[int] = field(default_factory=list[int])
    parents: list[int] = field(default_factory=list[int])
    predictors: list[int] = field(default_factory=list[int])
    targets: list[int] = field(default_factory=list[int])
    weights: list[float] = field(default_factory=list[float])
    normalizers: list[float] = field(default_factory=list[float])
    logprobs: list[float] = field(default_factory=list[float])
    sequences: list[int] = field(default_factory=list[int])
    sequence_count: int = 0

    def add_tree(self, members: Sequence[_Member]) -> None:
        prefix = _shared_prefix(members) if len(members) > 1 else 0
        root_start = len(self.tokens)
        root = -1
        if prefix:
            root = self._add_segment(members[0].tokens[:prefix], 0, -1)
        for member in members:
            start = len(self.tokens)
            if member.length > prefix:
                self._add_segment(member.tokens[prefix : member.length], prefix, root)
            for index, weight in zip(member.sampled, member.weights, strict=True):
                before = index - 1
                self.predictors.append(root_start + before if before < prefix else start + before - prefix)
                self.targets.append(member.tokens[index])
                self.weights.append(weight)
                self.normalizers.append(member.normalizer)
                self.logprobs.append(member.logprobs[index])
                self.sequences.append(self.sequence_count)
            self.sequence_count += 1

    def _add_segment(self, tokens: Sequence[int], position: int, parent: int) -> int:
        segment = len(self.parents)
        self.parents.append(parent)
        self.tokens.extend(tokens)
        self.positions.extend(range(position, position + len(tokens)))
        self.segments.extend([segment] * len(tokens))
        return segment

    def batch(self, sampling: SamplingParams, kl: bool) -> Batch:
        return Batch(
            tokens_T=array("q", self.tokens),
            positions_T=array("q", self.positions),
            segment_ids_T=array("q", self.segments),
            segment_parents_S=array("q", self.parents),
            predictors_N=array("q", self.predictors),
            targets_N=array("q", self.targets),
            weights_N=array("f", self.weights),
            sampler_logprobs_N=array("f", self.logprobs),
            sequence_ids_N=array("q", self.sequences),
            kl_weights_N=array("f", self.normalizers) if kl else None,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )


@dataclass(frozen=True, slots=True)
class Part:
    """A micro-batch, and which targets of the whole batch its targets are."""

    batch: Batch
    target_rows: array[int]


def partition(batch: Batch, max_tokens: int) -> list[Part]:
    """The batch as micro-batches of at most ``max_tokens`` packed tokens, in order.

    Trees are never cut: one that is larger than ``max_tokens`` is its own micro-batch.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be >= 1, got {max_tokens}")
    runs: list[tuple[int, int]] = []
    for start, stop in _tree_bounds(batch):
        if runs and stop - runs[-1][0] <= max_tokens:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    if len(runs) == 1:
        return [Part(batch, array("q", range(batch.target_count)))]
    run_of_token = array("q")
    for run, (start, stop) in enumerate(runs):
        run_of_token.extend([run] * (stop - start))
    rows: list[list[int]] = [[] for _ in runs]
    for row, predictor in enumerate(batch.predictors_N):
        rows[run_of_token[predictor]].append(row)
    return [_part(batch, start, stop, rows[run]) for run, (start, stop) in enumerate(runs)]


def _tree_bounds(batch: Batch) -> list[tuple[int, int]]:
    """The packed token range of each tree: a root begins one, and its descendants follow it."""
    starts = [
        index
        for index, segment in enumerate(batch.segment_ids_T)
        if batch.segment_parents_S[segment] == -1
        and (index == 0 or batch.segment_ids_T[index - 1] != segment)
    ]
    return list(zip(starts, [*starts[1:], batch.token_count], strict=True))


def _part(batch: Batch, start: int, stop: int, rows: Sequence[int]) -> Part:
    first = batch.segment_ids_T[start]
    last = batch.segment_ids_T[stop - 1]
    piece = Batch(
        tokens_T=batch.tokens_T[start:stop],
        positions_T=batch.positions_T[start:stop],
        segment_ids_T=array("q", (segment - first for segment in batch.segment_ids_T[start:stop])),
        segment_parents_S=array(
            "q",
            (parent - first if parent >= 0 else -1 for parent in batch.segment_parents_S[first : last + 1]),
        ),
        predictors_N=array("q", (batch.predictors_N[row] - start for row in rows)),
        targets_N=array("q", (batch.targets_N[row] for row in rows)),
        weights_N=_taken(batch.weights_N, rows),
        sampler_logprobs_N=_taken(batch.sampler_logprobs_N, rows),
        sequence_ids_N=array("q", (batch.sequence_ids_N[row] for row in rows)),
        old_logprobs_N=batch.old_logprobs_N and _taken(batch.old_logprobs_N, rows),
        ref_logprobs_N=batch.ref_logprobs_N and _taken(batch.ref_logprobs_N, rows),
        kl_weights_N=batch.kl_weights_N and _taken(batch.kl_weights_N, rows),
        temperature=batch.temperature,
        top_p=batch.top_p,
        top_k=batch.top_k,
    )
    return Part(piece, array("q", rows))


def _taken(column: array[float], rows: Sequence[int]) -> array[float]:
    return array("f", (column[row] for row in rows))
