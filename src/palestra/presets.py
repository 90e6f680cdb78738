"""The algorithm of a job: one section of twelve settings, and the published algorithms as values of it.

A preset is nothing but values: what it set can be read, changed and overridden
like any other setting, and two jobs with equal values run the same algorithm
whatever they were called. Names are looked up in `palestra.algorithms.registry`.
Combinations that cannot work are refused by name, with the reason, before a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypedDict, Unpack

from palestra.algorithms.corrections import KINDS, Correction
from palestra.algorithms.registry import advantage_rule, loss_rule
from palestra.fields import Flag, Real, Section, Text, Whole, setting, show

_ALONE = (
    "a sample is compared with the others of its group; alone, it is its own mean, "
    "so every advantage would be 0 and nothing would be learned"
)


class Algorithm(Section):
    """How rewards become an update. `GRPO`, `DAPO`, `GSPO` and the others are values of these settings."""

    group_size: Whole = setting(8, "Samples of each prompt", "samples", ge=1)
    advantage: Text = setting(
        "grpo", "What a sample's reward is compared with", "name",
        words="grpo, mean, rloo, batch-std, reinforce++, reinforce++baseline, maxrl, pass@K, distill "
        "or a registered name",
    )  # fmt: skip
    loss: Text = setting(
        "ppo", "How far an update follows an advantage", "name",
        words="ppo, gspo, rloo, cispo, sapo or a registered name",
    )  # fmt: skip
    aggregate: Literal["token", "sequence", "constant", "sum"] = setting(
        "token", "What is averaged: all tokens, or each reply's mean, sum over max_new_tokens, or sum", "name"
    )
    clip_low: Real = setting(
        0.2, "How far the policy ratio may fall below 1 and still count; 1 is no bound", "ratio", ge=0, le=1
    )
    clip_high: Real = setting(0.2, "How far the policy ratio may rise above 1 and still count", "ratio", ge=0)
    updates_per_step: Whole = setting(
        1, "Updates from each step's samples; from the second on, the clip bounds the ratio", "updates", ge=1
    )
    correction: Text = setting(
        "none", "What is done about tokens that the trainer would have sampled with another probability",
        "name", words=f"none, or one of {', '.join(KINDS)}, with limits as in tis:2 or icepop:0.5:5",
    )  # fmt: skip
    kl_coef: Real = setting(
        0.0, "Weight of the KL divergence to the reference in the loss; 0 is none", "factor", ge=0
    )
    reference: Text = setting(
        "", "The frozen model of the KL term, or the teacher; empty is the starting model, and as in "
        "mean:0.99 it is the running mean of the trained weights, with that decay", "source"
    )  # fmt: skip
    dynamic_sampling: Flag = setting(
        False, "Leave out groups whose rewards are all equal, as if never sampled", "yes or no"
    )
    truncated: Literal["count", "mask", "penalize"] = setting(
        "count", "Replies cut at max_new_tokens: counted, left out, or penalized as they come near it", "name"
    )

    @classmethod
    def _disagreements(cls, values: Mapping[str, Any]) -> list[str]:
        defaults = {name: info.default for name, info in cls.model_fields.items()}
        clashes = algorithm_conflicts({f"algorithm.{k}": v for k, v in {**defaults, **values}.items()})
        given = {f"algorithm.{name}" for name in values}
        return [text for keys, text in clashes if given >= set(keys)]


class Changes(TypedDict, total=False):
    """What a preset takes: the settings of `Algorithm`."""

    group_size: int
    advantage: str
    loss: str
    aggregate: Literal["token", "sequence", "constant", "sum"]
    clip_low: float
    clip_high: float
    updates_per_step: int
    correction: str
    kl_coef: float
    reference: str
    dynamic_sampling: bool
    truncated: Literal["count", "mask", "penalize"]


class Preset:
    """A published algorithm; calling it gives an `Algorithm` with its values and the caller's changes."""

    def __init__(self, paper: str, **values: Unpack[Changes]) -> None:
        self.paper = paper
        self.values = values

    def __call__(self, **changes: Unpack[Changes]) -> Algorithm:
        values: dict[str, Any] = {**self.values, **changes}
        return Algorithm(**values)


GRPO = Preset("arXiv:2402.03300", advantage="grpo", loss="ppo", aggregate="token")
DrGRPO = Preset("arXiv:2503.20783", advantage="mean", loss="ppo", aggregate="constant")
DAPO = Preset("arXiv:2503.14476", advantage="grpo", loss="ppo", aggregate="token", clip_low=0.2,
              clip_high=0.28, dynamic_sampling=True, truncated="penalize")  # fmt: skip
GSPO = Preset("arXiv:2507.18071", advantage="grpo", loss="gspo", aggregate="sequence", clip_low=3e-4,
              clip_high=4e-4)  # fmt: skip
CISPO = Preset("arXiv:2506.13585", advantage="grpo", loss="cispo", aggregate="token", clip_low=1.0,
               clip_high=4.0)  # fmt: skip
SAPO = Preset("arXiv:2511.20347", advantage="grpo", loss="sapo", aggregate="sequence")
RLOO = Preset("arXiv:2402.14740", advantage="rloo", loss="rloo", aggregate="sum")
ReinforcePP = Preset("arXiv:2501.03262", advantage="reinforce++", loss="ppo", aggregate="token")
MaxRL = Preset("arXiv:2602.02710", advantage="maxrl", loss="ppo", aggregate="token")
Distill = Preset("arXiv:2306.13649", advantage="distill", loss="ppo", aggregate="token")


_LOOK_UPS: dict[str, Callable[[str], object]] = {
    "advantage": advantage_rule,
    "loss": loss_rule,
    "correction": Correction.parse,
}


def algorithm_conflicts(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """(keys, problem) for every name that is unknown and every combination that cannot work."""
    advantage, loss, size = (values[f"algorithm.{k}"] for k in ("advantage", "loss", "group_size"))
    low, high = values["algorithm.clip_low"], values["algorithm.clip_high"]
    for name, look_up in _LOOK_UPS.items():
        key = f"algorithm.{name}"
        problem = _problem(look_up, values[key])
        if problem:
            yield (key,), f"{key} {show(values[key])}: {problem}"
    if not _problem(loss_rule, loss):
        problem = _problem(loss_rule(loss), low, high)
        if problem:
            keys = ("algorithm.loss", "algorithm.clip_low", "algorithm.clip_high")
            yield keys, f"algorithm.loss {show(loss)} does not take these clips: {problem}"
    if _problem(advantage_rule, advantage):
        return
    rule, grouped = advantage_rule(advantage), f"algorithm.advantage {show(advantage)}"
    if size < rule.least_group:
        other = "" if rule.least_group > 2 else ', or algorithm.advantage "reinforce++"'
        yield (
            ("algorithm.group_size", "algorithm.advantage"),
            f"algorithm.group_size ({size}) is too small for {grouped}: {_ALONE}; "
            f"nearest: group_size {rule.least_group}{other}",
        )
    yield from _teacher_conflicts(values, rule.distils)
    if values["algorithm.dynamic_sampling"] and rule.least_group == 1:
        yield (
            ("algorithm.dynamic_sampling", "algorithm.advantage"),
            f"{grouped} also learns from groups whose rewards are all equal, which "
            "algorithm.dynamic_sampling leaves out; nearest: dynamic_sampling false",
        )


def _teacher_conflicts(values: Mapping[str, Any], distils: bool) -> Iterator[tuple[tuple[str, ...], str]]:
    reference = values["algorithm.reference"]
    if distils and not reference:
        yield (
            ("algorithm.advantage",),
            'algorithm.advantage "distill" needs a teacher: the starting model agrees with itself; '
            "nearest: algorithm.reference with the teacher's folder or id",
        )
    if reference and not distils and not values["algorithm.kl_coef"]:
        yield (
            ("algorithm.reference", "algorithm.kl_coef"),
            f"algorithm.reference ({show(reference)}) would be loaded and never asked; "
            'nearest: algorithm.kl_coef above 0, or algorithm.advantage "distill"',
        )
    if distils and values["algorithm.truncated"] == "penalize":
        yield (
            ("algorithm.truncated", "algorithm.advantage"),
            'algorithm.truncated "penalize" lowers rewards, and algorithm.advantage "distill" looks at none; '
            "nearest: truncated count or mask",
        )


def _problem(attempt: Callable[..., object], *values: object) -> str:
    try:
        attempt(*values)
    except ValueError as error:
        return str(error)
    return ""
