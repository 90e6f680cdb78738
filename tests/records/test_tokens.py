"""Token columns: packed, checked, aligned after any failure."""

from __future__ import annotations

import math
import struct
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.errors import RecordError
from palestra.records.tokens import (
    BYTES_PER_TOKEN,
    MAGIC,
    TokenColumns,
    TokenWriter,
    pack,
    read_block,
    unpack,
)

floats = st.floats(width=32, allow_nan=False)
rows = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), floats, st.integers(-1, 2**31 - 1), st.booleans(), floats)
)


def columns(values: list[tuple[int, float, int, bool, float]]) -> TokenColumns:
    ids, logprobs, versions, sampled, advantages = zip(*values, strict=True) if values else ((),) * 5
    return TokenColumns(
        array("I", ids),
        array("f", logprobs),
        array("i", versions),
        array("B", sampled),
        array("f", advantages),
    )


@settings(deadline=None)
@given(rows)
def test_unpacking_gives_back_what_was_packed(values: list[tuple[int, float, int, bool, float]]) -> None:
    original = columns(values)
    block = pack(original)
    assert len(block) == BYTES_PER_TOKEN * len(values)
    assert unpack(block) == original


def test_the_layout_is_the_documented_one() -> None:
    block = pack(columns([(7, -0.5, 3, True, 2.0), (8, -1.0, -1, False, 0.0)]))
    assert struct.unpack("<2I2f2i2B2f", block) == (7, 8, -0.5, -1.0, 3, -1, 1, 0, 2.0, 0.0)


def test_a_block_that_is_no_whole_number_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="no whole number"):
        unpack(b"x" * 18)


def test_blocks_are_found_by_index_and_a_reopened_segment_goes_on(tmp_path: Path) -> None:
    for first in (0, 3):
        writer = TokenWriter(tmp_path, "attempt-1")
        assert [writer.append(columns([(n, 0.0, 0, True, 0.0)] * n)) for n in range(first, first + 3)] == [
            first,
            first + 1,
            first + 2,
        ]
        writer.close()
    assert [len(read_block(tmp_path, "attempt-1", n)) for n in range(6)] == [0, 1, 2, 3, 4, 5]


def test_a_torn_index_entry_does_not_shift_the_ones_after_it(tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path, "s")
    writer.append(columns([(1, 0.0, 0, True, 0.0)]))
    writer.close()
    with (tmp_path / "s.idx").open("ab") as handle:
        handle.write(b"torn")
    with (tmp_path / "s.bin").open("ab") as handle:
        handle.write(b"half a block")
    writer = TokenWriter(tmp_path, "s")
    assert writer.append(columns([(2, 0.0, 0, True, 0.0)])) == 1
    writer.close()
    assert list(read_block(tmp_path, "s", 1).ids) == [2]


def test_a_missing_or_foreign_segment_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="No such file"):
        read_block(tmp_path, "attempt-9", 0)
    (tmp_path / "x.idx").write_bytes(b"PALTOK9\n" + bytes(16))
    with pytest.raises(RecordError, match="another format"):
        read_block(tmp_path, "x", 0)
    (tmp_path / "y.idx").write_bytes(MAGIC + struct.pack("<QII", 0, 5, 0))
    (tmp_path / "y.bin").write_bytes(b"short")
    with pytest.raises(RecordError, match="not those that were written"):
        read_block(tmp_path, "y", 0)


def test_no_advantage_is_not_an_advantage_of_zero() -> None:
    block = pack(columns([(1, 0.0, 0, True, math.nan)]))
    assert math.isnan(unpack(block).advantages[0])
