"""Attention over a packed forest equals attention over each sequence alone, gradients too."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from palestra.batches import Batch
from palestra.trainer.tree_attention import TreeAttention

torch.set_num_threads(1)
HEADS, KV_HEADS, WIDTH = 4, 2, 8


def forest(segments: list[tuple[int, int]]) -> Batch:
    """A batch of segments given as (parent, length)."""
    depth_of: list[int] = []
    positions, ids = [], []
    for segment, (parent, length) in enumerate(segments):
        start = 0 if parent < 0 else depth_of[parent]
        depth_of.append(start + length)
        positions.extend(range(start, start + length))
        ids.extend([segment] * length)
    tokens = list(range(len(ids)))
    return Batch(tokens, positions, ids, [p for p, _ in segments], [0], [0], [1.0], [-1.0], [0])


def random_forest(seed: int) -> Batch:
    draw = random.Random(seed)
    segments: list[tuple[int, int]] = []
    for _ in range(draw.randint(1, 4)):
        root = len(segments)
        segments.append((-1, draw.randint(1, 12)))
        for _ in range(draw.randint(0, 6)):
            deep = draw.random() < 0.4
            segments.append((draw.randrange(root, len(segments)) if deep else root, draw.randint(1, 9)))
    return forest(segments)


def naive(batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query token at a time, over exactly the tokens `Batch` says it sees."""
    rows = []
    for token, segment in enumerate(batch.segment_ids_T):
        chain = [segment]
        while batch.segment_parents_S[chain[-1]] >= 0:
            chain.append(batch.segment_parents_S[chain[-1]])
        seen = [
            i
            for i, s in enumerate(batch.segment_ids_T)
            if s in chain and (s != segment or i <= token)
        ]  # fmt: skip
        keys = k[seen].repeat_interleave(HEADS // KV_HEADS, 1)
        values = v[seen].repeat_interleave(HEADS // KV_HEADS, 1)
        scores = torch.einsum("hd,khd->hk", q[token], keys) / WIDTH**0.5
        rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values))
    return torch.stack(rows)


def compare(batch: Batch, seed: int = 0) -> None:
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch.token_count, heads, WIDTH, generator=draw, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    upstream = torch.randn(batch.token_count, HEADS, WIDTH, generator=draw)
    results = []
    for attend in (TreeAttention(batch), lambda *x: naive(batch, *x)):
        out = attend(q, k, v)
        results.append((out, *torch.autograd.grad(out, (q, k, v), upstream)))
    for name, found, expected in zip(("output", "dq", "dk", "dv"), *results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("seed", range(12))
def test_any_forest_gives_what_each_sequence_gives_alone(seed: int) -> None:
    compare(random_forest(seed), seed)


@pytest.mark.parametrize(
    "segments",
    [
        [(-1, 1)],
        [(-1, 7)],
        [(-1, 5), (0, 3), (0, 3), (0, 3)],
        [(-1, 5), (0, 1), (0, 9), (-1, 2), (3, 4)],
        [(-1, 2), (0, 2), (1, 2), (2, 2), (3, 2)],
        [(-1, 3), (-1, 30), (-1, 1), (-1, 4)],
        [(-1, 40), (0, 1), (-1, 1), (2, 40)],
    ],
    ids=["one token", "one root", "a group", "ragged groups", "depth 5", "roots only", "lopsided"],
)
def test_shapes_that_packing_makes(segments: list[tuple[int, int]]) -> None:
    compare(forest(segments))


def test_no_token_sees_another_tree_or_a_sibling() -> None:
    """Case 11 (trl#4772): what packing leaked from one sequence into another blew the ratio up."""
    batch = forest([(-1, 4), (0, 3), (0, 3), (-1, 4), (3, 3)])
    plan = TreeAttention(batch)
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(17, h, WIDTH, generator=draw) for h in (HEADS, KV_HEADS, KV_HEADS))
    before = plan(q, k, v)
    others = torch.tensor([7, 8, 9, 10, 11, 12, 13, 14, 15, 16])
    k[others], v[others] = 1e3, 1e3
    after = plan(q, k, v)
    assert torch.equal(after[:7], before[:7])
    assert not torch.equal(after[7:], before[7:])


def test_blocks_of_unlike_lengths_are_kept_apart_so_that_padding_stays_small() -> None:
    batch = forest([(-1, 10), *[(0, 1)] * 8, *[(0, 60)] * 2])
    plan = TreeAttention(batch)
    padded = sum(block.rows * block.queries for block in plan._blocks)
    assert padded <= 1.25 * batch.token_count


def test_equal_inputs_give_equal_bits() -> None:
    batch = random_forest(3)
    draw = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(batch.token_count, h, WIDTH, generator=draw) for h in (HEADS, KV_HEADS, KV_HEADS))
    assert torch.equal(TreeAttention(batch)(q, k, v), TreeAttention(batch)(q, k, v))
