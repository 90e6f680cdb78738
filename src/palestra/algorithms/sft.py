"""Supervised fine-tuning: the same trajectories and trainer, with the tokens' likelihood as the loss.

A demonstration is a trajectory whose reply somebody else wrote; its reply tokens are
the targets. Trajectories that the policy itself sampled train the same way, so
keeping the best of them is rejection sampling (RAFT, arXiv:2304.06767). Pure Python.
"""

from __future__ import annotations

from collections.abc import Sequence

from palestra.algorithms.aggregation import Aggregate
from palestra.algorithms.packing import pack
from palestra.batches import Batch, LossSpec
from palestra.types import Completion, Group, Reward, SamplingParams, StopReason, Trajectory, Turn

NLL = LossSpec("nll")


def demonstration(name: str, prompt: Sequence[int], reply: Sequence[int], task_hash: str) -> Trajectory:
    """A prompt and the reply to learn, as token ids; the reply ends in what ends a completion."""
    count = len(reply)
    completion = Completion(tuple(reply), (0.0,) * count, (0,) * count, StopReason.EOS)
    return Trajectory(name, task_hash, (Turn.given(prompt), Turn.sampled(completion)), Reward(1.0))


def pack_demonstrations(
    trajectories: Sequence[Trajectory], *, aggregate: Aggregate = "token", longest: int = 1
) -> Batch | None:
    """Every rewarded trajectory's sampled tokens as targets of `NLL`, at temperature 1.

    ``longest`` is what the aggregate ``constant`` divides by. None where nothing is left to train.
    """
    groups = [Group(t.id, t.task_hash, (t,)) for t in trajectories]
    weights = {t.id: 1.0 for group in groups for t in group.rewarded}
    return pack(groups, weights, SamplingParams(max_new_tokens=longest), aggregate=aggregate)
