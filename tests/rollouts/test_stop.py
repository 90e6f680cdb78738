"""Stop reasons: strings across token borders, tokens, limits, and which of them wins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.rollouts.native.stop import StopChecker
from palestra.types import SamplingParams, StopReason

EOS = 256


def feed(pieces: list[bytes], sampling: SamplingParams, room: int = 1000) -> tuple[int, StopReason | None]:
    """Tokens i that stand for ``pieces[i]``: how many were taken, and why it ended."""
    checker = StopChecker(
        sampling, room=room, eos_token_ids=frozenset({EOS}), token_bytes=lambda token: pieces[token]
    )
    for index in range(len(pieces)):
        reason = checker.check(index)
        if reason is not None:
            return index + 1, reason
    return len(pieces), None


@pytest.mark.parametrize(
    ("pieces", "stop", "taken"),
    [
        ([b"ab", b"c```", b"x"], "```", 2),
        ([b"a`", b"`", b"`b", b"x"], "```", 3),
        ([b"x", b"\xc3", b"\xa9", b"y"], "é", 3),
        ([b"\xf0\x9f", b"\x98", b"\x80!", b"z"], "😀", 3),
        ([b"a\n", b"\n", b"b"], "\n\n", 2),
        ([b"STO", b"STOP"], "STOP", 2),
    ],
)
def test_a_stop_string_is_found_across_tokens_and_inside_characters(
    pieces: list[bytes], stop: str, taken: int
) -> None:
    assert feed(pieces, SamplingParams(stop=(stop,))) == (taken, StopReason.STOP)


def test_a_string_that_never_comes_does_not_stop() -> None:
    assert feed([b"``", b" ``", b" `"], SamplingParams(stop=("```",))) == (3, None)
    assert feed([b"ab", b"ab"], SamplingParams(stop=())) == (2, None)


@given(
    text=st.text(alphabet="ab€😀", min_size=1, max_size=30),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=40),
    stops=st.lists(st.text(alphabet="ab€😀", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_token_that_completes_the_first_match_ends_it_however_the_text_is_cut(
    text: str, cuts: list[int], stops: list[str]
) -> None:
    data = text.encode()
    pieces, start = [], 0
    while start < len(data):
        width = cuts[len(pieces) % len(cuts)]
        pieces.append(data[start : start + width])
        start += width
    expected, seen = None, b""
    for index, piece in enumerate(pieces):
        seen += piece
        if any(stop.encode() in seen for stop in stops):
            expected = (index + 1, StopReason.STOP)
            break
    assert feed(pieces, SamplingParams(stop=tuple(stops))) == (expected or (len(pieces), None))


def make(room: int = 10, **params: object) -> StopChecker:
    return StopChecker(
        SamplingParams(**params),  # type: ignore[arg-type]
        room=room,
        eos_token_ids=frozenset({EOS}),
        token_bytes=lambda token: b"<end>" if token == EOS else bytes([token]),
    )


def test_an_end_token_wins_over_a_stop_string_it_completes_and_over_the_limit() -> None:
    assert make(stop=("<end>",), max_new_tokens=1).check(EOS) is StopReason.EOS
    assert make(stop_token_ids=(EOS,)).check(EOS) is StopReason.EOS


def test_a_stop_token_wins_over_the_limit() -> None:
    assert make(stop_token_ids=(65,), max_new_tokens=1).check(65) is StopReason.STOP


def test_the_limit_is_length_where_the_context_would_have_held_more_or_as_much() -> None:
    checker = make(room=2, max_new_tokens=2)
    assert [checker.check(65), checker.check(65)] == [None, StopReason.LENGTH]


def test_the_limit_is_context_where_the_room_is_what_ran_out() -> None:
    checker = make(room=2, max_new_tokens=3)
    assert [checker.check(65), checker.check(65)] == [None, StopReason.CONTEXT]
