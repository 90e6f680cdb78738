"""Whole appends, one-step replacement, strict encoding."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from palestra.records.files import AppendFile, last_lines, read_lines, replace
from palestra.records.schema import as_float, decode, encode, jsonable, number, special

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=20)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
        | st.tuples(inner, inner)
        | st.sets(st.integers() | st.text(), max_size=3)
    ),
    max_leaves=20,
)


@settings(deadline=None)
@given(values)
def test_anything_becomes_one_strict_json_line(value: Any) -> None:
    line = encode({"value": jsonable(value)})
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    text = line.decode("utf-8")  # strict

    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads(text, parse_constant=refuse)


@settings(deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=[])))
@example("\udc80 lone \ud83d surrogates")
@example("\x00 \u2028 \u202e \\udc80")
def test_any_text_comes_back_unchanged(text: str) -> None:
    assert decode(encode({"text": text})) == {"text": text}


@settings(deadline=None)
@given(st.floats())
def test_every_float_comes_back(value: float) -> None:
    back = special(json.loads(json.dumps(number(value))))
    assert back == value or (math.isnan(back) and math.isnan(value))


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_decoding_garbage_never_raises(line: bytes) -> None:
    decoded = decode(line)
    assert decoded is None or isinstance(decoded, dict)


def test_what_is_no_float_is_none() -> None:
    class Many:
        def __float__(self) -> float:
            raise RuntimeError("a tensor with 3 elements")

    assert [as_float(v) for v in ("1.5", b"1", None, [1.0], Many(), 10**400)] == [None] * 6
    assert as_float(True) == 1.0


def test_a_failed_append_adds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AppendFile(tmp_path / "a.jsonl")
    file.append(b"one\n")
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:2]) if len(data) > 2 else refuse())

    def refuse() -> int:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        file.append(b"two\n")
    monkeypatch.undo()
    assert (tmp_path / "a.jsonl").read_bytes() == b"one\n"
    file.append(b"three\n")
    assert (tmp_path / "a.jsonl").read_bytes() == b"one\nthree\n"
    file.close()
    file.close()


def test_a_cut_that_failed_is_made_up_for_before_the_next_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = AppendFile(tmp_path / "a.jsonl")
    file.append(b"one\n")

    def refuse(*_: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "ftruncate", refuse)
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output"):
        file.append_durably(b"not durable\n")
    with pytest.raises(OSError, match="Input/output"):
        file.append(b"two\n")
    monkeypatch.undo()
    file.append_durably(b"three\n")
    assert (tmp_path / "a.jsonl").read_bytes() == b"one\nthree\n"
    file.close()


def test_a_torn_last_line_is_ended_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":')
    file = AppendFile(path)
    file.append(b'{"n":2}\n')
    file.close()
    skipped: Counter[str] = Counter()
    assert [r["n"] for r in read_lines(path, skipped)] == [1, 2]
    assert skipped == {str(path): 1}


def test_a_failed_replacement_leaves_the_old_content_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace(tmp_path / "a", b"old")

    def refuse(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        replace(tmp_path / "a", b"new")
    monkeypatch.undo()
    assert (tmp_path / "a").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_the_last_lines_come_newest_first_whatever_the_tail_cuts(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(b'{"n":%d}\n' % n for n in range(50)) + b'{"n":50')
    assert [r["n"] for r in last_lines(path)] == list(range(49, -1, -1))
    for tail in range(1, 60):
        found = [r["n"] for r in last_lines(path, tail)]
        assert found == list(range(49, 49 - len(found), -1))
    assert last_lines(tmp_path / "none") == []
