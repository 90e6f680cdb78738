"""The allocator hint is a hint: it says whether it took, and computing goes on either way."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

from palestra.trainer import memory


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the hint is glibc's")
def test_freed_blocks_are_reused_without_new_page_faults() -> None:
    assert memory.keep_freed_memory()
    count = (8 << 20) // 4  # 8 MiB: 2,048 pages
    for _ in range(3):
        blocks = [torch.ones(count) for _ in range(4)]
        del blocks
    before = faults()
    for _ in range(5):
        blocks = [torch.ones(count) for _ in range(4)]
        del blocks
    assert faults() - before < 2_048


def test_elsewhere_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert memory.keep_freed_memory() is False
