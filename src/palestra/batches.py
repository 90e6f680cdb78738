"""What the trainer is given: packed tokens with one weight per target, and the loss to sum.

The wire format between algorithms and trainers. An algorithm is whatever made
the columns and the `LossSpec`; the trainer knows nothing else of it. Like
`palestra.types` this module does no I/O and imports no framework, and an object
that breaks an invariant cannot be built. Columns carry their axis in their name:
``_T`` runs over packed tokens, ``_N`` over trained targets, ``_S`` over packed
segments. Logprobs are natural logarithms.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _floats(values: Sequence[float]) -> array[float]:
    return values if isinstance(values, array) else array("f", values)


def _ints(values: Sequence[int]) -> array[int]:
    return values if isinstance(values, array) else array("q", values)


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed training tokens, as a forest of segments, with one weight per trained target.

    A segment is a run of consecutive packed tokens. It attends causally to itself
    and fully to its ancestors, so a group's prompt is stored once as a root and
    each member's continuation is a child. A root and its descendants (a tree) lie
    side by side, parents before children, and no token sees another tree.

    Target n is the token ``targets_N[n]``, predicted by the hidden state at packed
    index ``predictors_N[n]``. The sum over n of weight times the loss term is the
    whole loss: weights already contain the advantage and the normaliser over the
    *global* batch, which is why a split into micro-batches cannot change it.

    Columns are ``array`` objects (int64 and float32), owned by the batch; nobody
    writes to them after construction.
    """

    tokens_T: array[int]
    positions_T: array[int]
    """Position of the token in its own sequence, from 0."""
    segment_ids_T: array[int]
    segment_parents_S: array[int]
    """Index of each segment's parent, -1 for a root."""
    predictors_N: array[int]
    targets_N: array[int]
    weights_N: array[float]
    sampler_logprobs_N: array[float]
    """What the engine reported when it sampled the target."""
    sequence_ids_N: array[int]
    """Which trajectory the target belongs to, from 0. All targets of one lie in one tree."""
    old_logprobs_N: array[float] | None = None
    """Logprobs under the policy at the start of the step; None means the ratio is 1 by definition."""
    ref_logprobs_N: array[float] | None = None
    """Logprobs under the reference of the KL term."""
    kl_weights_N: array[float] | None = None
    """What each target's KL term is multiplied by beside ``kl_coef``: its normaliser, without advantage."""
    temperature: float = 1.0
    """The temperature the targets were sampled at: logits are divided by it."""
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens_T", "positions_T", "segment_ids_T", "segment_parents_S", "predictors_N",
                     "targets_N", "sequence_ids_N"):  # fmt: skip
            object.__setattr__(self, name, _ints(getattr(self, name)))
        for name in ("weights_N", "sampler_logprobs_N"):
            object.__setattr__(self, name, _floats(getattr(self, name)))
        for name in ("old_logprobs_N", "ref_logprobs_N", "kl_weights_N"):
            column = getattr(self, name)
            if column is not None:
                object.__setattr__(self, name, _floats(column))
                _require(len(column) == len(self.targets_N), f"{name} has another length")
                _require(all(map(math.isfinite, column)), f"a value of {name} is not finite")
        _require(math.isfinite(self.temperature) and self.temperature > 0, "temperature must be above 0")
        self._check_tokens()
        self._check_targets()

    def _check_tokens(self) -> None:
        count = len(self.tokens_T)
        _require(count > 0, "a batch holds no token")
        _require(
            len(self.positions_T) == count and len(self.segment_ids_T) == count,
            f"tokens_T, positions_T and segment_ids_T must have one length, got {count}, "
            f"{len(self.positions_T)} and {len(self.segment_ids_T)}",
        )
        segments = len(self.segment_parents_S)
        seen = -1
        for index, segment in enumerate(self.segment_ids_T):
            _require(segment in (seen, seen + 1), f"segment_ids_T[{index}] is {segment} after segment {seen}")
            seen = segment
        _require(seen == segments - 1, f"{segments} segments declared, {seen + 1} hold tokens")
        for segment, parent in enumerate(self.segment_parents_S):
            _require(-1 <= parent < segment, f"segment {segment} has parent {parent}, not an earlier one")

    def _check_targets(self) -> None:
        count = len(self.targets_N)
        columns = (self.predictors_N, self.weights_N, self.sampler_logprobs_N, self.sequence_ids_N)
        _require(all(len(c) == count for c in columns), "the columns over N must have one length")
        tokens = len(self.tokens_T)
        _require(all(0 <= p < tokens for p in self.predictors_N), "a predictor lies outside the tokens")
        _require(all(map(math.isfinite, self.weights_N)), "a weight is not finite")
        _require(all(map(math.isfinite, self.sampler_logprobs_N)), "a sampler logprob is not finite")

    @property
    def token_count(self) -> int:
        return len(self.tokens_T)

    @property
    def target_count(self) -> int:
        return len(self.targets_N)


Kind = Literal["policy", "cispo", "sapo", "nll"]
Ratio = Literal["token", "sequence", "product"]
Estimator = Literal["k1", "k2", "k3", "k3+"]


@dataclass(frozen=True, slots=True)
class LossSpec:
    """Which loss the trainer sums over targets; a new algorithm is new weights, or a new kind here.

    What each kind computes from a target's logprob, old logprob and weight is
    written in `palestra.algorithms.losses`. Settings of another kind are ignored.
    """

    kind: Kind = "policy"
    clip_low: float = 0.2
    """The ratio counts down to ``1 - clip_low``; 1 is no bound."""
    clip_high: float = 0.2
    """The ratio counts up to ``1 + clip_high``."""
    ratio: Ratio = "token"
    """Of ``policy``: each token's own ratio, its sequence's geometric mean, or its sequence's product."""
    dual_clip: float = 0.0
    """Of ``policy``: at a negative weight the ratio counts up to this; 0 is no bound."""
    temperature_positive: float = 1.0
    """Of ``sapo``: how sharply the gate closes at weights above 0."""
    temperature_negative: float = 1.05
    kl_coef: float = 0.0
    """Times ``kl_weights_N`` times the estimate of KL(policy || reference); 0 is no such term."""
    kl: Estimator = "k3"
    kl_ratio_corrected: bool = False
    """Multiply the estimate by the token's ratio, gradient included."""

    def __post_init__(self) -> None:
        for name, value, valid in (
            ("loss kind", self.kind, Kind), ("ratio", self.ratio, Ratio), ("kl", self.kl, Estimator),
        ):  # fmt: skip
            known = get_args(valid)
            _require(value in known, f"{name} must be one of {', '.join(known)}, got {value!r}")
        _require(0 <= self.clip_low <= 1, f"clip_low must be in [0, 1], got {self.clip_low}")
        _require(0 <= self.clip_high < math.inf, f"clip_high must be >= 0, got {self.clip_high}")
        _require(self.ratio == "token" or self.kind == "policy", f"{self.kind} has a ratio per token only")
        _require(
            self.dual_clip == 0 or 1 + self.clip_high <= self.dual_clip < math.inf,
            f"dual_clip must be 0 or at least 1 + clip_high, got {self.dual_clip}",
        )
        for name, value in (
            ("temperature_positive", self.temperature_positive),
            ("temperature_negative", self.temperature_negative),
        ):
            _require(0 < value < math.inf, f"{name} must be > 0, got {value}")
        _require(0 <= self.kl_coef < math.inf, f"kl_coef must be >= 0, got {self.kl_coef}")
