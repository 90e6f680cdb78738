"""The C kernels against torch: right numbers, rows independent, and a machine without them computes too."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from palestra.rollouts.native import kernels as module
from palestra.rollouts.native.kernels import Kernels, kernels, missing_because
from palestra.rollouts.native.layers import Model, gated, normed
from palestra.rollouts.native.linears import LinearOps
from rollouts.support import Tiny

# Where there is a compiler there must be kernels: then a reason for their absence fails these tests.
pytestmark = pytest.mark.skipif("no C compiler" in missing_because(), reason="no C compiler here")
KINDS = [torch.float32, torch.bfloat16]
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(dtype: torch.dtype = torch.float32, threads: int = 1) -> Kernels:
    found = kernels(dtype, threads)
    assert found is not None
    return found


def close(ours: Tensor, theirs: Tensor) -> bool:
    tolerance = CLOSE[ours.dtype]
    return torch.allclose(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)


def attention_by_torch(
    queries: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, kv_heads: int
) -> Tensor:
    """Row by row and head by head, in double precision."""
    rows, heads, dim = queries.shape
    out = torch.empty(rows, heads, dim, dtype=torch.float64)
    for row in range(rows):
        for head in range(heads):
            pair = row * kv_heads + head // (heads // kv_heads)
            k, v = (t[pair, : int(lengths[row])].double() for t in (keys, values))
            out[row, head] = torch.softmax(k @ queries[row, head].double() * dim**-0.5, 0) @ v
    return out.view(rows, -1).to(queries.dtype)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim", "capacity"),
    [(1, 9, 3, 64, 128), (5, 4, 4, 8, 16), (3, 6, 1, 40, 33), (2, 2, 1, 256, 7), (4, 8, 2, 33, 16)],
)
def test_attention_equals_torch_for_every_shape(
    dtype: torch.dtype, rows: int, heads: int, kv_heads: int, dim: int, capacity: int
) -> None:
    queries = random(rows, heads, dim, dtype=dtype)
    keys, values = (random(rows * kv_heads + 2, capacity, dim, dtype=dtype, seed=s) for s in (1, 2))
    lengths = torch.arange(rows) * (capacity - 1) // max(1, rows - 1) + 1
    for threads in (1, 2, 3):
        ours = made(dtype, threads).attention(queries, keys, values, lengths, kv_heads)
        assert close(ours, attention_by_torch(queries, keys, values, lengths, kv_heads))


def test_queries_may_lie_in_rows_of_a_wider_tensor() -> None:
    wide = random(3, 12, 64)
    keys, values = random(9, 16, 64, seed=1), random(9, 16, 64, seed=2)
    lengths = torch.tensor([16, 3, 9])
    ours = made().attention(wide[:, :9], keys, values, lengths, 3)
    assert torch.equal(ours, made().attention(wide[:, :9].contiguous(), keys, values, lengths, 3))


def test_what_lies_behind_a_rows_length_is_never_read() -> None:
    queries, lengths = random(2, 4, 16), torch.tensor([3, 5])
    keys, values = random(4, 8, 16, seed=1), random(4, 8, 16, seed=2)
    before = made().attention(queries, keys, values, lengths, 2)
    for tensor in (keys, values):
        tensor[:2, 3:] = float("nan")
        tensor[2:, 5:] = float("inf")
    assert torch.equal(made().attention(queries, keys, values, lengths, 2), before)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_a_rows_bits_depend_on_nothing_but_the_row(threads: int) -> None:
    """A resumed run recomputes rollouts in other company, maybe on other cores: their bits must not move."""
    queries, keys, values = random(13, 6, 24), random(26, 40, 24, seed=1), random(26, 40, 24, seed=2)
    lengths = torch.randint(1, 41, (13,), generator=torch.Generator().manual_seed(3))
    x, weight, gates = random(13, 50), random(50, seed=4), random(13, 46, seed=5)
    crowd = made(threads=threads)
    alone = made(threads=1)
    attended = crowd.attention(queries, keys, values, lengths, 2)
    scaled, mixed = crowd.norm(x, weight, 1e-5), crowd.gated(gates)
    for row in range(13):
        at, pair = slice(row, row + 1), slice(2 * row, 2 * row + 2)
        own = alone.attention(queries[at], keys[pair], values[pair], lengths[at], 2)
        assert torch.equal(own[0], attended[row])
        assert torch.equal(alone.norm(x[at], weight, 1e-5)[0], scaled[row])
        assert torch.equal(alone.gated(gates[at])[0], mixed[row])


@pytest.mark.parametrize("dtype", KINDS)
def test_norm_gate_and_rotation_equal_torch(dtype: torch.dtype, tiny: Tiny) -> None:
    x, weight, gates = (
        random(*shape, dtype=dtype, seed=s) for s, shape in enumerate([(7, 65), (65,), (7, 90)])
    )
    ours = made(dtype, 2)
    assert close(ours.norm(x, weight, 1e-5), normed(x, weight, 1e-5))
    assert close(ours.gated(gates), gated(gates))
    model = Model.build(tiny.config, LinearOps(dtype, False), 50)
    positions = torch.tensor([0, 3, 49, 7])
    cos, sin = model.cos_P1D[positions], model.sin_P1F[positions]
    from palestra.models.rotary import rotated

    wide = random(4, 6, tiny.config.head_dim, dtype=dtype)
    expected = rotated(wide[:, :5], cos, sin)
    untouched = wide[:, 5].clone()
    ours.rotate(wide[:, :5], cos, sin)
    assert close(wide[:, :5], expected)
    assert torch.equal(wide[:, 5], untouched)


def test_extreme_numbers_saturate_and_nan_stays_nan() -> None:
    gates = torch.tensor([[200.0, -200.0, 88.0, float("nan"), 0.0, 1.0, 1.0, 1.0, 1.0, 5.0]])
    found = made().gated(gates)[0].tolist()
    assert found[0] == 200.0
    assert abs(found[1]) < 1e-30
    assert found[2] == 88.0
    assert found[3] != found[3]
    assert found[4] == 0.0
    keys, values = torch.zeros(1, 4, 8), random(1, 4, 8)
    keys[0, 2] = float("nan")
    poisoned = made().attention(random(1, 1, 8), keys, values, torch.tensor([4]), 1)
    assert poisoned.isnan().all(), "a diverged version must be seen, not averaged away"
    peaked = torch.zeros(1, 4, 8)
    peaked[0, 1] = 1e4
    chosen = made().attention(torch.ones(1, 1, 8), peaked, values, torch.tensor([4]), 1)
    assert torch.allclose(chosen[0], values[0, 1])


# -- machines without


@pytest.fixture
def anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and nothing remembered, before and after."""
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path))
    module._library.cache_clear()
    yield tmp_path
    module._library.cache_clear()


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_library_is_built_once_and_found_again(anew: Path) -> None:
    assert missing_because() == ""
    built = list((anew / "kernels").iterdir())
    assert [path.suffix for path in built] == [".so"]
    changed = built[0].stat().st_mtime_ns
    module._library.cache_clear()
    assert missing_because() == ""
    assert [path.stat().st_mtime_ns for path in (anew / "kernels").iterdir()] == [changed]


def test_without_a_compiler_there_are_none_and_it_says_so(
    anew: Path, monkeypatch: pytest.MonkeyPatch, tiny: Tiny
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert kernels(torch.float32, 1) is None
    assert "no C compiler" in missing_because()
    assert Model.build(tiny.config, LinearOps(torch.float32, False), 8).kernels is None


def test_a_compiler_that_fails_is_reported_with_what_it_said(
    anew: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = script(anew / "cc", 'test "$1" = --version && exit 0; echo "cannot do that" >&2; exit 1')
    monkeypatch.setenv("CC", failing)
    assert "cannot do that" in missing_because()
    assert not list((anew / "kernels").iterdir())


def test_a_library_that_computes_something_else_is_not_used(
    anew: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = anew / "kernels.c"
    source.write_text(module.SOURCE.read_text().replace("total += w[p]", "total += 2.0f * w[p]"))
    monkeypatch.setattr(module, "SOURCE", source)
    assert "attention is wrong" in missing_because()
    assert kernels(torch.float32, 1) is None
