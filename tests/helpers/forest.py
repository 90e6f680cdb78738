"""Groups of trajectories for tests, and what packing and training must equal: sequences one by one.

The reference here is slow on purpose: no packing, no sharing, no chunk, no
micro-batch, double precision, and transformers' own Llama.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from palestra.batches import LossSpec
from palestra.types import Abstain, Completion, Group, Reward, StopReason, Trajectory, Turn

TASK = "0" * 64
Pieces = Sequence[tuple[Sequence[int], bool]]
"""Runs of tokens in order, and whether the policy sampled them."""


def trajectory(
    name: str, pieces: Pieces, reward: float | None = 1.0, logprob: float = -1.0, task: str = TASK
) -> Trajectory:
    turns = []
    for tokens, sampled in pieces:
        count = len(tokens)
        if sampled:
            completion = Completion(tuple(tokens), (logprob,) * count, (0,) * count, StopReason.EOS)
            turns.append(Turn.sampled(completion))
        else:
            turns.append(Turn.given(tokens))
    outcome = Abstain("no verdict") if reward is None else Reward(reward)
    return Trajectory(name, task, tuple(turns), outcome)


def random_groups(seed: int, *, groups: int = 3, vocab: int = 250, longest: int = 9) -> list[Group]:
    """Ragged groups of one to four members, of one to three turns; some share a prompt, some do not."""
    draw = random.Random(seed)

    def run(least: int = 1) -> list[int]:
        return [draw.randrange(vocab) for _ in range(draw.randint(least, longest))]

    made = []
    for g in range(groups):
        prompt = run()
        members = []
        for m in range(draw.randint(1, 4)):
            start = prompt if draw.random() < 0.8 else run()
            pieces: list[tuple[list[int], bool]] = [(start, False)]
            for turn in range(draw.randint(1, 3)):
                if turn:
                    pieces.append((run(), False))
                pieces.append((run(), True))
            if draw.random() < 0.3:
                pieces.append((run(), False))
            reward = None if m and draw.random() < 0.15 else draw.choice((0.0, 0.5, 1.0))
            members.append(trajectory(f"g{g}m{m}", pieces, reward, -draw.random() * 4))
        made.append(Group(f"g{g}", TASK, tuple(members)))
    return made


def random_advantages(groups: Sequence[Group], seed: int) -> dict[str, float]:
    """One per rewarded trajectory, a quarter of them 0."""
    draw = random.Random(seed)
    return {
        t.id: draw.choice((0.0, draw.uniform(-2, 2), draw.uniform(-2, 2), 1.0))
        for group in groups
        for t in group.rewarded
    }


@dataclass(frozen=True)
class NaiveTarget:
    context: tuple[int, ...]
    target: int
    weight: float
    sampler_logprob: float


def naive_targets(groups: Sequence[Group], advantages: Mapping[str, float]) -> list[NaiveTarget]:
    """Every sampled token of every rewarded trajectory, zero advantages included, with its whole context."""
    total = sum(t.sampled_count for group in groups for t in group.rewarded)
    return [
        NaiveTarget(t.token_ids[:index], t.token_ids[index], advantages[t.id] / total, t.logprobs[index])
        for group in groups
        for t in group.rewarded
        for index, sampled in enumerate(t.sampled_mask)
        if sampled
    ]


def double_model(folder: Path) -> LlamaForCausalLM:
    """transformers' Llama in double precision with plain attention."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")


def naive_logprobs(
    model: LlamaForCausalLM, targets: Sequence[NaiveTarget], temperature: float
) -> torch.Tensor:
    """Each target's logprob from a forward of its own."""
    rows = []
    for target in targets:
        logits = model(torch.tensor([target.context])).logits[0, -1].double() / temperature
        rows.append(logits.log_softmax(-1)[target.target])
    return torch.stack(rows)


def naive_loss(
    spec: LossSpec, logprobs: torch.Tensor, old: torch.Tensor | None, weights: torch.Tensor
) -> torch.Tensor:
    """The loss as the paper writes it."""
    if spec.kind == "nll":
        return -(weights * logprobs).sum()
    ratio = (logprobs - (logprobs.detach() if old is None else old)).exp()
    clipped = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    return -torch.minimum(ratio * weights, clipped * weights).sum()
