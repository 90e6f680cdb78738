"""What a target's weight is multiplied by because another policy than the trainer's sampled it.

Engine and trainer compute in different kernels and precisions, and an engine may
be some versions behind: ``rho = exp(old - sampler)`` says how much likelier the
trainer's policy at the start of the step was to choose the token. Factors are
constants to the gradient, and they are made once, before the step. Sequence
factors are computed in logarithms, so no product overflows. Together with the
clipped ratio to ``old`` they are decoupled PPO (arXiv:2110.00641, AReaL
arXiv:2505.24298). Pure Python over the batch's columns.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_LARGEST_LOG = 20.0


class Corrected(NamedTuple):
    factors_N: array[float]
    capped: float
    """Share of the targets whose factor was cut to a limit."""
    masked: float
    """Share of the targets that do not count."""


class _Columns(NamedTuple):
    log_rho_N: list[float]
    mean_N: list[float]
    """Of log rho over the target's sequence."""
    sum_N: list[float]
    negative_N: list[bool]


@dataclass(frozen=True, slots=True)
class Correction:
    """One of `KINDS` with its limits; written ``name``, ``name:HIGH`` or ``name:LOW:HIGH``."""

    kind: str
    low: float
    high: float

    @classmethod
    def parse(cls, text: str) -> Correction | None:
        """None for ``none``; else ValueError with what is valid. HIGH alone also sets a LOW of 1 / HIGH."""
        name, *numbers = text.split(":")
        if text == "none":
            return None
        if name not in KINDS or len(numbers) > 2:
            raise ValueError(f"expected none, or one of {', '.join(KINDS)} with its limits as in tis:2")
        _, low, high = KINDS[name]
        try:
            limits = [float(number) for number in numbers]
        except ValueError:
            raise ValueError(f"the limits of {name} are numbers, as in {name}:{high:g}") from None
        if limits:
            high = limits[-1]
            low = limits[0] if len(limits) == 2 else 1 / high if low and high > 0 else low
        if not (0 <= low <= 1 <= high < math.inf):
            raise ValueError(f"the limits of {name} hold 0 <= LOW <= 1 <= HIGH, got {low:g} and {high:g}")
        return cls(name, low, high)

    def __str__(self) -> str:
        return f"{self.kind}:{self.low:g}:{self.high:g}"

    def factors(
        self,
        old_logprobs_N: Sequence[float],
        sampler_logprobs_N: Sequence[float],
        sequence_ids_N: Sequence[int],
        weights_N: Sequence[float],
    ) -> Corrected:
        """The factor of every target; ``weights_N`` is asked for its sign only."""
        rho = [old - own for old, own in zip(old_logprobs_N, sampler_logprobs_N, strict=True)]
        values: dict[int, list[float]] = {}
        for value, sequence in zip(rho, sequence_ids_N, strict=True):
            values.setdefault(sequence, []).append(value)
        totals = {sequence: math.fsum(own) for sequence, own in values.items()}
        columns = _Columns(
            rho,
            [totals[s] / len(values[s]) for s in sequence_ids_N],
            [totals[s] for s in sequence_ids_N],
            [weight < 0 for weight in weights_N],
        )
        log_low, log_high = math.log(self.low) if self.low else -math.inf, math.log(self.high)
        factors, capped = KINDS[self.kind][0](columns, log_low, log_high)
        count = max(1, len(factors))
        return Corrected(array("f", factors), capped / count, sum(f == 0 for f in factors) / count)


def _truncated(log_N: Sequence[float], low: float, high: float) -> tuple[list[float], int]:
    outside = sum(not low <= value <= high for value in log_N)
    return [math.exp(min(max(value, low), high)) for value in log_N], outside


def _masked(log_N: Sequence[float], gate_N: Sequence[float], low: float, high: float) -> list[float]:
    """exp(log) where the gate lies within the limits, else 0; past `_LARGEST_LOG` exp is cut off."""
    return [
        math.exp(min(value, _LARGEST_LOG)) if low <= gate <= high else 0.0
        for value, gate in zip(log_N, gate_N, strict=True)
    ]


def _tis(c: _Columns, low: float, high: float) -> tuple[list[float], int]:
    return _truncated(c.log_rho_N, low, high)


def _tis_sequence(c: _Columns, low: float, high: float) -> tuple[list[float], int]:
    return _truncated(c.sum_N, low, high)


def _mis(c: _Columns, low: float, high: float) -> tuple[list[float], int]:
    return _masked(c.sum_N, c.sum_N, low, high), 0


def _icepop(c: _Columns, low: float, high: float) -> tuple[list[float], int]:
    return _masked(c.log_rho_N, c.log_rho_N, low, high), 0


def _geometric(c: _Columns, low: float, high: float) -> tuple[list[float], int]:
    return _masked(c.log_rho_N, c.mean_N, low, high), 0


def _negatives(c: _Columns, low: float, high: float) -> tuple[list[float], int]:
    far = [negative and mean < low for negative, mean in zip(c.negative_N, c.mean_N, strict=True)]
    return [0.0 if drop else 1.0 for drop in far], 0


KINDS: dict[str, tuple[Callable[[_Columns, float, float], tuple[list[float], int]], float, float]] = {
    "tis": (_tis, 0.0, 2.0),
    "tis-sequence": (_tis_sequence, 0.0, 2.0),
    "mis": (_mis, 0.0, 3.0),
    "icepop": (_icepop, 0.5, 5.0),
    "geometric": (_geometric, 0.99, 1.01),
    "negatives": (_negatives, 0.9, 1.0),
}
"""Each kind's function and default limits (LOW 0 is none):

* ``tis``: truncated importance sampling, ``min(rho, HIGH)`` (Yao et al. 2025, "Your efficient RL
  framework secretly brings you off-policy RL training"); ``tis-sequence`` truncates the sequence's product.
* ``mis``: masked importance sampling, the sequence's product, or 0 outside the limits (Liu et al. 2025,
  "When speed kills stability").
* ``icepop``: the token's rho, or 0 outside the limits (Ring-1T, arXiv:2510.18855).
* ``geometric``: the token's rho in sequences whose geometric mean of rho lies within the limits, else 0.
* ``negatives``: 0 for sequences of negative advantage whose geometric mean of rho is below LOW, else 1
  (DeepSeek-V3.2, arXiv:2512.02556: mean of ``sampler - old`` above delta, with LOW = exp(-delta)).
"""
