"""Which number type a model computes in on this machine: measured, never assumed.

bfloat16 is several times faster than float32 where the processor multiplies it
in hardware (AMX, AVX512-BF16, a GPU) and several times slower where it is
emulated, so ``auto`` times both on one linear layer and takes bfloat16 only
where it wins clearly. A run resolves ``auto`` once and records the answer: a
resumed run never probes again.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Literal

import torch

DtypeName = Literal["fp32", "bf16"]
TORCH_DTYPES: dict[DtypeName, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}

_ROWS, _WIDTH, _INNER = 64, 576, 1536
_MIN_GAIN = 1.3


def _best_seconds(dtype: torch.dtype, rounds: int = 5) -> float:
    x = torch.ones(_ROWS, _WIDTH, dtype=dtype)
    weight = torch.ones(_INNER, _WIDTH, dtype=dtype)
    torch.nn.functional.linear(x, weight)
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        best = min(best, time.perf_counter() - start)
    return best


@cache
def fastest_dtype() -> DtypeName:
    """The faster of fp32 and bf16 for a [64, 576] x [576, 1536] product on the CPU; fp32 on a tie."""
    gain = _best_seconds(torch.float32) / _best_seconds(torch.bfloat16)
    return "bf16" if gain >= _MIN_GAIN else "fp32"


def resolve_dtype(requested: Literal["auto", "fp32", "bf16"]) -> DtypeName:
    """``requested``, with ``auto`` answered by the probe."""
    return fastest_dtype() if requested == "auto" else requested
