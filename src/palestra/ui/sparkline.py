"""Numbers as one line of characters: a curve, and a bar of shares.

Pure. Columns are exactly as many as asked for, so a caller can lay them out; with
``ascii_only`` no character beyond ASCII is used. Shares are whole percentages that
sum to 100 (largest remainder), because a strip whose parts do not add up is worse
than none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.-=+*#@"


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """``values`` over at most ``width`` columns; each column is the mean of its share of them.

    A column without a finite value is a space. Fewer values than columns: one column each.
    """
    ramp = _ASCII if ascii_only else _BLOCKS
    columns = resample(values, max(0, width))
    finite = [c for c in columns if c is not None]
    if not finite:
        return " " * len(columns)
    low, span = min(finite), max(finite) - min(finite)
    return "".join(" " if c is None else ramp[_level(c, low, span, len(ramp))] for c in columns)


def _level(value: float, low: float, span: float, levels: int) -> int:
    if not span > 0 or math.isinf(span):
        return levels // 2 - 1
    return min(levels - 1, int((value - low) / span * levels))


def resample(values: Sequence[float], width: int) -> list[float | None]:
    """Means of ``width`` equal parts of ``values``, or the values themselves where there are fewer."""
    count = min(len(values), width)
    columns: list[float | None] = []
    for column in range(count):
        part = values[column * len(values) // count : (column + 1) * len(values) // count]
        finite = [v for v in part if math.isfinite(v)]
        columns.append(sum(finite) / len(finite) if finite else None)
    return columns


def apportion(amounts: Mapping[str, float], total: int) -> dict[str, int]:
    """``total`` units shared in proportion to ``amounts``, exactly: the largest remainders round up."""
    whole = sum(amounts.values())
    if not whole > 0 or total <= 0:
        return dict.fromkeys(amounts, 0)
    exact = {name: amount / whole * total for name, amount in amounts.items()}
    shares = {name: math.floor(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: shares[name] - exact[name])
    for name in by_remainder[: total - sum(shares.values())]:
        shares[name] += 1
    return shares


def duration(seconds: float) -> str:
    """``7 s``, ``4:05``, ``2:03:59``; whole days before hours."""
    whole = max(0, round(seconds)) if math.isfinite(seconds) else 0
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    if hours == 0:
        return f"{rest // 60}:{rest % 60:02d}"
    text = f"{hours % 24}:{rest // 60:02d}:{rest % 60:02d}" if hours < 48 else f"{hours % 24} h"
    return text if hours < 24 else f"{hours // 24} d {text}"
