"""One algorithm, from a step's groups to the batch and the loss that a trainer gets.

Three pure steps, in this order: `weigh` gives every rewarded trajectory its
advantage and says which do not count, `pack` makes the batch, `prepare` adds what
needs the models' logprobs (old, reference, correction, teacher). A trajectory that
does not count is in no batch and in no normaliser; one whose advantage is 0 is in
the normaliser. Nothing here samples, records or updates.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from palestra.algorithms.aggregation import Aggregate
from palestra.algorithms.corrections import Correction
from palestra.algorithms.distill import distillation_weights
from palestra.algorithms.packing import pack
from palestra.algorithms.registry import Advantage, AdvantageRule, advantage_rule, loss_rule
from palestra.algorithms.shaping import informative, is_truncated, penalized
from palestra.batches import Batch, LossSpec
from palestra.types import Group, SamplingParams

Truncated = Literal["count", "mask", "penalize"]
Logprobs = Callable[[Batch], Sequence[float]]
"""Of the batch's targets, under one model."""
_BUFFER_SHARE = 5
"""DAPO's overlong buffer is 4096 of 20480 tokens."""


class Weighing(NamedTuple):
    advantages: Mapping[str, Advantage]
    """By trajectory id, for every rewarded trajectory."""
    left_out: frozenset[str]
    """Trajectories that do not count; their advantage is 0."""
    metrics: dict[str, float]


class Prepared(NamedTuple):
    batch: Batch
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Recipe:
    """An algorithm as a job says it; build it with ``named``."""

    rule: AdvantageRule
    loss: LossSpec
    aggregate: Aggregate = "token"
    updates: int = 1
    """Optimiser updates from one batch; from the second on, ratios are to the policy before the first."""
    correction: Correction | None = None
    dynamic_sampling: bool = False
    truncated: Truncated = "count"

    @classmethod
    def named(
        cls,
        *,
        advantage: str = "grpo",
        loss: str = "ppo",
        aggregate: Aggregate = "token",
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        updates_per_step: int = 1,
        correction: str = "none",
        kl_coef: float = 0.0,
        dynamic_sampling: bool = False,
        truncated: Truncated = "count",
    ) -> Recipe:
        """The settings of a job, looked up; ValueError for a name or value that is not valid."""
        spec = loss_rule(loss)(clip_low, clip_high)
        return cls(
            advantage_rule(advantage),
            replace(spec, kl_coef=kl_coef) if kl_coef else spec,
            aggregate,
            updates_per_step,
            Correction.parse(correction),
            dynamic_sampling,
            truncated,
        )

    @property
    def needs_reference(self) -> bool:
        """Whether ``prepare`` asks the frozen model: for the KL term, or as the teacher."""
        return self.loss.kl_coef > 0 or self.rule.distils

    def weigh(self, groups: Sequence[Group], sampling: SamplingParams) -> Weighing:
        """Raises ValueError where a reward or an advantage is outside what the rule takes or may give."""
        self._check_rewards(groups)
        selected = informative(groups, len(groups)) if self.dynamic_sampling else None
        used = groups if selected is None else selected.keep
        shaped = used
        if self.truncated == "penalize":
            longest = sampling.max_new_tokens
            shaped = [penalized(g, longest, max(1, longest // _BUFFER_SHARE)) for g in used]
        advantages = dict(self.rule.compute(shaped))
        everyone = [t for group in groups for t in group.rewarded]
        masked = {t.id for t in everyone if is_truncated(t)} if self.truncated == "mask" else set[str]()
        dropped = {t.id for group in (selected.drop if selected else ()) for t in group.rewarded}
        left_out = frozenset(masked | dropped)
        advantages |= dict.fromkeys(left_out, 0.0)
        missing = next((t.id for t in everyone if t.id not in advantages), None)
        if missing is not None:
            raise ValueError(f"the algorithm gave no advantage to trajectory {missing}")
        metrics: dict[str, float] = {}
        if selected is not None:
            metrics = {"groups/dropped": float(len(selected.drop)), "groups/refill": float(selected.refill)}
        if self.truncated == "mask":
            metrics["completion/masked"] = float(len(masked))
        if self.truncated == "penalize":
            lowered = (a.rewards != b.rewards for a, b in zip(used, shaped, strict=True))
            metrics["groups/penalized"] = float(sum(lowered))
        return Weighing(advantages, left_out, metrics)

    def pack(self, groups: Sequence[Group], weighing: Weighing, sampling: SamplingParams) -> Batch | None:
        """None where nothing can be trained; see `palestra.algorithms.packing.pack`."""
        return pack(
            groups,
            weighing.advantages,
            sampling,
            aggregate=self.aggregate,
            left_out=weighing.left_out,
            kl=self.needs_reference,
        )

    def prepare(self, batch: Batch, logprobs: Logprobs, reference: Logprobs | None = None) -> Prepared:
        """The batch with old and reference logprobs, corrected weights, or the teacher's.

        ``logprobs`` are the trainer's before the first update; asked once, and only where
        something needs them. ``reference`` is needed where ``needs_reference`` says so.
        """
        metrics: dict[str, float] = {}
        if self.needs_reference:
            if reference is None:
                raise ValueError("this recipe needs a reference model")
            batch = replace(batch, ref_logprobs_N=array("f", reference(batch)))
        if self.updates == 1 and self.correction is None and not self.rule.distils:
            return Prepared(batch, metrics)
        old = array("f", logprobs(batch))
        if self.rule.distils:
            assert batch.ref_logprobs_N is not None  # distils implies needs_reference
            assert batch.kl_weights_N is not None
            weights = distillation_weights(batch.ref_logprobs_N, old, batch.kl_weights_N)
            batch = replace(batch, weights_N=weights)
        if self.correction is not None:
            found = self.correction.factors(
                old, batch.sampler_logprobs_N, batch.sequence_ids_N, batch.weights_N
            )
            weights = array("f", (w * f for w, f in zip(batch.weights_N, found.factors_N, strict=True)))
            batch = replace(batch, weights_N=weights)
            metrics = {"correction/capped_fraction": found.capped, "correction/masked_fraction": found.masked}
        if self.updates > 1:  # within the first update the ratio is 1 by definition
            batch = replace(batch, old_logprobs_N=old)
        return Prepared(batch, metrics)

    def _check_rewards(self, groups: Sequence[Group]) -> None:
        least = self.rule.least_reward
        lowest = min((reward for group in groups for reward in group.rewards), default=0.0)
        if least is not None and lowest < least:
            raise ValueError(f"this algorithm takes rewards >= {least:g}, and one is {lowest:g}")
