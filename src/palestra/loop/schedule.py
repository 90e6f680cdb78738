"""The learning rate of a step: a pure function, so a resumed run cannot be off by one."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(step: int, *, steps: int, peak: float, warmup_steps: int, schedule: Schedule) -> float:
    """The rate of step ``step`` (from 1): linear warm-up to ``peak``, then constant or decaying.

    Step ``warmup_steps`` is the first at the peak; linear and cosine end just above 0
    at the last step, so no step is wasted at rate 0.
    """
    if step < warmup_steps:
        return peak * step / warmup_steps
    if schedule == "constant":
        return peak
    first = max(1, warmup_steps)
    progress = min(1.0, (step - first) / max(1, steps - first + 1))
    if schedule == "linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
