"""The one place where something a user returned becomes a verdict.

A verdict is a finite number in the environment's declared range, or an
abstention. Whatever else comes back - nothing, text, nan, a number out of range -
raises RewardError naming the function, its line, what it returned and what was
expected: no value is ever guessed, clipped or taken for 0.
"""

from __future__ import annotations

import functools
import math

from palestra.environments.base import where_defined
from palestra.errors import RewardError
from palestra.types import Abstain, Reward


def name_of(function: object) -> str:
    """What a user calls this function: its qualified name, or its type's for a callable object."""
    if isinstance(function, functools.partial):
        return f"partial of {name_of(function.func)}"
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def place_of(function: object) -> str:
    """``file:line`` of a function, of a partial's function, or of a callable object's ``__call__``."""
    if isinstance(function, functools.partial):
        return place_of(function.func)
    if hasattr(function, "__code__") or hasattr(function, "__func__") or isinstance(function, type):
        return where_defined(function)
    return where_defined(type(function).__call__) if callable(function) else ""


def verdict_of(value: object, reward_range: tuple[float, float], source: object) -> Reward | Abstain:
    """``value``, returned by the function ``source``, as a verdict; RewardError where it is none."""
    if isinstance(value, Abstain):
        return value
    reward = value if isinstance(value, Reward) else Reward(_number(value, reward_range, source))
    low, high = reward_range
    if not low <= reward.value <= high:
        text = f"{reward.value:g}, outside the declared range {low:g} to {high:g}"
        raise _refusal(text, reward_range, source)
    return reward


def _number(value: object, reward_range: tuple[float, float], source: object) -> float:
    shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
    if value is None:
        raise _refusal("None: no verdict (is a return missing?)", reward_range, source)
    if isinstance(value, (str, bytes, bytearray)) or not hasattr(value, "__float__"):
        raise _refusal(f"a {type(value).__name__}: {shown}", reward_range, source)
    try:
        number = float(value)  # type: ignore[arg-type]  # __float__ was just checked
    except (TypeError, ValueError, OverflowError) as error:
        raise _refusal(
            f"a {type(value).__name__} that is no number ({error})", reward_range, source
        ) from error
    if not math.isfinite(number):
        raise _refusal(f"{number}", reward_range, source)
    return number


def _refusal(returned: str, reward_range: tuple[float, float], source: object) -> RewardError:
    low, high = reward_range
    return RewardError(
        f"{name_of(source)} returned {returned}",
        where=place_of(source),
        expected=f"a finite number from {low:g} to {high:g}, a palestra.Reward, or a palestra.Abstain "
        "(reward_range sets the range)",
    )
