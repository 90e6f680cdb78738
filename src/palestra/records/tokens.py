"""Token columns of rollouts, packed: 17 bytes a token instead of a line of numbers.

Layout, little-endian. ``<segment>.bin`` is one block per rollout, five columns one
after the other: ids u32, logprob f32, version i32, sampled u8, advantage f32, each
as long as the rollout. ``<segment>.idx`` starts with the 8 bytes ``PALTOK1\\n`` and
holds one 16-byte entry per block: offset u64, token count u32, CRC-32 of the block
u32. A block is written before its entry and an entry before the rollout's line, so
a line never points at nothing. Unsampled tokens have advantage 0; the sampled ones
of a rollout that got no advantage (it abstained, or was an evaluation) have NaN.
"""

from __future__ import annotations

import math
import os
import struct
import sys
import zlib
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.errors import RecordError
from palestra.records.files import AppendFile
from palestra.types import Trajectory

MAGIC = b"PALTOK1\n"
BYTES_PER_TOKEN = 17
_ENTRY = struct.Struct("<QII")
_CODES = ("I", "f", "i", "B", "f")


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """One rollout's tokens in order, as ``array`` objects of one length."""

    ids: array[int]
    logprobs: array[float]
    versions: array[int]
    sampled: array[int]
    advantages: array[float]

    def __len__(self) -> int:
        return len(self.ids)


def columns_of(trajectory: Trajectory, advantage: float | None) -> TokenColumns:
    """The columns of a trajectory; ``advantage`` is that of the whole rollout."""
    mask = trajectory.sampled_mask
    value = math.nan if advantage is None else advantage
    return TokenColumns(
        array("I", trajectory.token_ids),
        array("f", trajectory.logprobs),
        array("i", trajectory.versions),
        array("B", mask),
        array("f", [value if sampled else 0.0 for sampled in mask]),
    )


def pack(columns: TokenColumns) -> bytes:
    parts = (columns.ids, columns.logprobs, columns.versions, columns.sampled, columns.advantages)
    return b"".join(_little(part).tobytes() for part in parts)


def unpack(block: bytes) -> TokenColumns:
    """Inverse of ``pack``; ``block`` must be a whole number of tokens."""
    count, rest = divmod(len(block), BYTES_PER_TOKEN)
    if rest:
        raise ValueError(f"{len(block)} bytes are no whole number of tokens")
    parts: list[Any] = []  # int and float columns in the order of the fields
    at = 0
    for code in _CODES:
        part = array(code)
        width = part.itemsize * count
        part.frombytes(block[at : at + width])
        parts.append(_little(part))
        at += width
    return TokenColumns(*parts)


def _little(part: array[int] | array[float]) -> array[int] | array[float]:
    if sys.byteorder == "little":
        return part
    swapped = part[:]
    swapped.byteswap()
    return swapped


class TokenWriter:
    """Appends blocks to one segment. One writer; not thread-safe."""

    def __init__(self, folder: Path, segment: str) -> None:
        self._bin = AppendFile(folder / f"{segment}.bin", lines=False)
        self._idx = AppendFile(folder / f"{segment}.idx", lines=False)
        if self._idx.size == 0:
            self._idx.append(MAGIC)
        torn = (self._idx.size - len(MAGIC)) % _ENTRY.size
        if torn:
            self._idx.cut_to(self._idx.size - torn)

    def append(self, columns: TokenColumns) -> int:
        """Index of the new block. Raises OSError; then no block was added."""
        block = pack(columns)
        offset = self._bin.append(block)
        try:
            at = self._idx.append(_ENTRY.pack(offset, len(columns), zlib.crc32(block)))
        except OSError:
            self._bin.cut_to(offset)
            raise
        return (at - len(MAGIC)) // _ENTRY.size

    def sync(self) -> None:
        self._bin.sync()
        self._idx.sync()

    def close(self) -> None:
        self._bin.close()
        self._idx.close()


def read_block(folder: Path, segment: str, index: int) -> TokenColumns:
    """Block ``index`` of a segment. Raises RecordError where it is missing or damaged."""
    try:
        with (folder / f"{segment}.idx").open("rb") as handle:
            if handle.read(len(MAGIC)) != MAGIC:
                raise _damaged(folder, segment, index, "its index has another format")
            handle.seek(index * _ENTRY.size, os.SEEK_CUR)
            entry = handle.read(_ENTRY.size)
        if len(entry) != _ENTRY.size:
            raise _damaged(folder, segment, index, "its index ends before that")
        offset, count, checksum = _ENTRY.unpack(entry)
        with (folder / f"{segment}.bin").open("rb") as handle:
            handle.seek(offset)
            block = handle.read(count * BYTES_PER_TOKEN)
    except OSError as error:
        raise _damaged(folder, segment, index, error.strerror or str(error)) from error
    if len(block) != count * BYTES_PER_TOKEN or zlib.crc32(block) != checksum:
        raise _damaged(folder, segment, index, "its bytes are not those that were written")
    return unpack(block)


def _damaged(folder: Path, segment: str, index: int, why: str) -> RecordError:
    return RecordError(
        f"the tokens of rollout {index} in segment {segment} cannot be read: {why}",
        where=str(folder),
        expected=f"{segment}.bin and {segment}.idx as the run wrote them",
    )
