"""Memory: how large the cache may get, and what is freed given back to the machine."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

import torch

from palestra.errors import EngineError
from palestra.models.config import ModelConfig

FREE_SHARE = 8
"""Without a setting, the cache takes at most this fraction of the memory that is free at the start."""
MIB = 1024**2


def position_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that one token takes in the cache: keys and values of every layer."""
    return 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize


def cache_positions(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    cache_mb: int,
    max_running: int,
    context: int,
) -> int:
    """Positions of the whole cache. EngineError where ``cache_mb`` does not hold one full context."""
    each = position_bytes(config, dtype)
    if cache_mb == 0:
        free = _free_bytes(device) // FREE_SHARE
        return max(context, min(max_running * context, free // each))
    held = cache_mb * MIB // each
    if cache_mb < 0 or held < context:
        raise EngineError(
            f"a cache of {cache_mb} MiB holds {max(held, 0)} positions; a full context has {context}",
            expected=f"at least {-(-context * each // MIB)} MiB, or 0 for what the machine allows",
            next_command="raise engine.cache_mb, or lower engine.context_tokens",
        )
    return held


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux: what is free without what could be freed
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def give_back_freed_memory() -> None:
    """Return what the C library keeps of freed memory: who sleeps does it for others. glibc only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
