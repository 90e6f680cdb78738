"""The names by which a job asks for advantages and losses, built in and added by users.

A job holds names, so that it can be recorded, compared and set from a command
line; what they stand for is looked up here. A built-in name always means the same
thing: a user adds names and never replaces one. Every rule gives an advantage for
every rewarded trajectory, 0 where there is nothing to say.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from palestra.algorithms.advantages import (
    batch_std_advantages,
    group_advantages,
    maxrl_advantages,
    pass_at_k_advantages,
    rloo_advantages,
    whitened,
)
from palestra.batches import LossSpec
from palestra.types import Group

Advantage = float | Sequence[float]
"""Of a trajectory: one number, or one for each of its sampled tokens in order."""
Compute = Callable[[Sequence[Group]], Mapping[str, Advantage]]
"""Advantages by trajectory id, for every rewarded trajectory of the step."""
MakeLoss = Callable[[float, float], LossSpec]
"""A loss from ``clip_low`` and ``clip_high``."""


@dataclass(frozen=True, slots=True)
class AdvantageRule:
    compute: Compute
    least_group: int = 2
    """The smallest group in which a sample has something to be compared with."""
    least_reward: float | None = None
    """Rewards below this are refused; None is no bound."""
    distils: bool = False
    """Advantages come from a teacher's logprobs, and rewards do not matter."""


def _by_group(advantages_of: Callable[[Sequence[float]], list[float]]) -> AdvantageRule:
    def compute(groups: Sequence[Group]) -> Mapping[str, Advantage]:
        return {
            t.id: advantage
            for group in groups
            for t, advantage in zip(group.rewarded, advantages_of(group.rewards), strict=True)
        }

    return AdvantageRule(compute)


def _batch_std(groups: Sequence[Group]) -> Mapping[str, Advantage]:
    found = batch_std_advantages([group.rewards for group in groups])
    pairs = (zip(g.rewarded, values, strict=True) for g, values in zip(groups, found, strict=True))
    return {t.id: advantage for pair in pairs for t, advantage in pair}


def _reinforce_pp(groups: Sequence[Group], *, baseline: bool) -> Mapping[str, Advantage]:
    """The reward comes last and is not discounted: it is every token's return, so a number a trajectory."""
    returns = {
        t.id: (reward - fmean(group.rewards) if baseline else reward, t.sampled_count)
        for group in groups
        for t, reward in zip(group.rewarded, group.rewards, strict=True)
    }
    white = whitened([[value] * count for value, count in returns.values()])
    return {name: row[0] for name, row in zip(returns, white, strict=True)}


def _everyone(groups: Sequence[Group]) -> Mapping[str, Advantage]:
    return {t.id: 1.0 for group in groups for t in group.rewarded}


_BUILT_IN: dict[str, AdvantageRule] = {
    "grpo": _by_group(group_advantages),
    "mean": _by_group(partial(group_advantages, normalize_std=False)),
    "rloo": _by_group(rloo_advantages),
    "batch-std": AdvantageRule(_batch_std),
    "reinforce++": AdvantageRule(partial(_reinforce_pp, baseline=False), least_group=1),
    "reinforce++baseline": AdvantageRule(partial(_reinforce_pp, baseline=True)),
    "maxrl": AdvantageRule(_by_group(maxrl_advantages).compute, least_reward=0.0),
    "distill": AdvantageRule(_everyone, least_group=1, distils=True),
}
_BUILT_IN_LOSSES: dict[str, MakeLoss] = {
    "ppo": lambda low, high: LossSpec("policy", low, high),
    "gspo": lambda low, high: LossSpec("policy", low, high, ratio="sequence"),
    "rloo": lambda low, high: LossSpec("policy", low, high, ratio="product"),
    "cispo": lambda low, high: LossSpec("cispo", low, high),
    "sapo": lambda low, high: LossSpec("sapo"),
}
_PASS_AT_K = re.compile(r"pass@([1-9][0-9]{0,4})")
_NAME = re.compile(r"[a-z][a-z0-9+._-]*")
_added: dict[str, AdvantageRule] = {}
_added_losses: dict[str, MakeLoss] = {}


def register_algorithm(
    name: str, *, advantages: Compute | None = None, loss: MakeLoss | None = None, least_group: int = 2
) -> None:
    """Let jobs say ``algorithm.advantage=NAME`` and ``algorithm.loss=NAME``, whichever is given.

    ``advantages(groups)`` maps the id of every rewarded trajectory to its advantage;
    ``loss(clip_low, clip_high)`` makes a `LossSpec`. Register before the job is
    built. The same name given again replaces what was given before. Raises
    ValueError for a name that is built in or no name.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"an algorithm's name is lower-case letters, digits and + . _ -, got {name!r}")
    if name in {*_BUILT_IN, *_BUILT_IN_LOSSES}:
        raise ValueError(f"{name} is built in and always means the same thing; register another name")
    if advantages is None and loss is None:
        raise ValueError(f"{name} needs advantages=, loss= or both")
    if advantages is not None:
        _added[name] = AdvantageRule(advantages, least_group)
    if loss is not None:
        _added_losses[name] = loss


def advantage_rule(name: str) -> AdvantageRule:
    """Raises ValueError with the known names and the nearest."""
    found = (_BUILT_IN | _added).get(name)
    if found is not None:
        return found
    k = _PASS_AT_K.fullmatch(name)
    if k is not None and int(k[1]) > 1:
        at_k = partial(pass_at_k_advantages, k=int(k[1]))
        return AdvantageRule(_by_group(at_k).compute, least_group=int(k[1]))
    raise ValueError(_unknown(name, [*_BUILT_IN, "pass@K with K >= 2", *_added]))


def loss_rule(name: str) -> MakeLoss:
    """Raises ValueError with the known names and the nearest."""
    known = _BUILT_IN_LOSSES | _added_losses
    if name not in known:
        raise ValueError(_unknown(name, list(known)))
    return known[name]


def _unknown(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"expected one of {', '.join(known)}" + (f"; nearest: {close[0]}" if close else "")
