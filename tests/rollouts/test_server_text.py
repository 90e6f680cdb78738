"""Streamed pieces joined are the text, however tokens cut characters and stop strings."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from palestra.rollouts.native.stop import StopChecker
from palestra.rollouts.server.text import TextPieces, text_of
from palestra.rollouts.server.tools import ToolCall, ToolText, parse_calls
from palestra.types import SamplingParams, StopReason

EOS = 10_000
ALPHABET = "aab\n<é€😀|"
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Łódź"}}</tool_call>'


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """``data`` in pieces; the places are where it is cut, also inside characters."""
    marks = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(marks)]


def pieces_of(tokens: list[bytes], stop: tuple[str, ...] = ()) -> TextPieces:
    return TextPieces(lambda i: b"<eos>" if i == EOS else tokens[i], stop, (EOS,))


def run(tokens: list[bytes], stop: tuple[str, ...], at_least: int = 0) -> tuple[list[int], StopReason]:
    """Which tokens an engine would keep of an endless completion, and why it ends."""
    checker = StopChecker(
        SamplingParams(max_new_tokens=max(1, len(tokens)), stop=stop),
        room=10_000, eos_token_ids=frozenset(), token_bytes=tokens.__getitem__, at_least=at_least,
    )  # fmt: skip
    for index in range(len(tokens)):
        if (reason := checker.check(index)) is not None:
            return list(range(index + 1)), reason
    return [], StopReason.LENGTH


@given(
    st.text(ALPHABET, max_size=30),
    st.lists(st.integers(0, 200), max_size=20),
    st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=3),
    st.integers(0, 20),
)
@example("aaab", [1, 2, 3], ["aab"], 0)
@example("x\n\nabcdefgh", [1], ["\n\n"], 0)
@example("a€b", [2, 3], ["€"], 0)
@example("abab", [1, 2, 3], ["ab", "bab"], 3)
def test_the_text_ends_before_the_earliest_stop_string_that_ended_it_whatever_the_cuts(
    text: str, places: list[int], stop: list[str], at_least: int
) -> None:
    tokens = cut(text.encode(), places)
    kept, reason = run(tokens, tuple(stop), at_least)
    pieces = pieces_of(tokens, tuple(stop))
    streamed = [pieces.push(token) for token in kept] + [pieces.finish(reason)]
    whole = b"".join(tokens[i] for i in kept)
    expected = whole
    if reason is StopReason.STOP:
        most = max(len(s.encode()) for s in stop) - 1
        since = max(0, len(whole) - len(tokens[kept[-1]]) - most)
        expected = whole[: min(p for s in stop if (p := whole.find(s.encode(), since)) >= 0)]
    assert "".join(streamed) == expected.decode("utf-8", "replace")
    assert "".join(streamed) == text_of(pieces_of(tokens, tuple(stop)), kept, reason)


@given(st.lists(st.binary(max_size=6), max_size=20), st.lists(st.text("ab\x80", min_size=1), max_size=2))
def test_bytes_that_are_no_characters_are_decoded_like_the_whole(
    tokens: list[bytes], stop: list[str]
) -> None:
    pieces = pieces_of(tokens, tuple(stop))
    joined = "".join(map(pieces.push, range(len(tokens)))) + pieces.finish(StopReason.LENGTH)
    assert joined == b"".join(tokens).decode("utf-8", "replace")


def test_a_character_is_given_out_when_it_is_whole() -> None:
    pieces = pieces_of([b"\xf0\x9f", b"\x98", b"\x80!"])
    assert [pieces.push(0), pieces.push(1), pieces.push(2), pieces.finish(StopReason.LENGTH)] == [
        "", "", "😀!", ""
    ]  # fmt: skip


def test_text_that_no_stop_string_can_claim_is_given_out_at_once() -> None:
    pieces = pieces_of([b"hello", b" wor", b"ld\n", b"Us", b"ual"], ("\nUser:",))
    assert [pieces.push(i) for i in range(5)] == ["hello", " wor", "ld", "", "\nUsual"]
    assert pieces.finish(StopReason.LENGTH) == ""


def test_a_stop_string_that_the_engine_did_not_heed_is_text() -> None:
    """Before ``min_tokens`` nothing ends a completion."""
    pieces = pieces_of([b"a", b"STOP", b"b"], ("STOP",))
    assert "".join(map(pieces.push, range(3))) + pieces.finish(StopReason.LENGTH) == "aSTOPb"


@pytest.mark.parametrize(
    ("reason", "text"), [(StopReason.EOS, "hi"), (StopReason.LENGTH, "hi<eos>"), (StopReason.STOP, "hi")]
)
def test_the_token_that_ended_a_completion_is_no_text(reason: StopReason, text: str) -> None:
    pieces = pieces_of([b"hi"])
    assert pieces.push(0) + pieces.push(EOS) + pieces.finish(reason) == text


def test_an_end_token_inside_a_completion_is_text() -> None:
    pieces = pieces_of([b"a", b"b"])
    assert pieces.push(0) + pieces.push(EOS) + pieces.push(1) + pieces.finish(StopReason.ABORTED) == "a<eos>b"


# -- tools


@pytest.mark.parametrize(
    ("text", "rest", "arguments"),
    [
        (CALL, "", ['{"city": "Łódź"}']),
        (f"Let me see.\n{CALL}\n{CALL}", "Let me see.\n", ['{"city": "Łódź"}'] * 2),
        (f"{CALL} and so on", " and so on", ['{"city": "Łódź"}']),
        ('<tool_call>\n{"name":"weather","arguments":{"a":"</tool_call>"}}\n</tool_call>', "",
         ['{"a": "</tool_call>"}']),
        ('{"name": "weather", "parameters": {"city": "Ulm"}}', "", ['{"city": "Ulm"}']),
        ('<|python_tag|>{"name": "weather", "parameters": {}}', "", ["{}"]),
        ('{"name": "weather", "parameters": {}}; {"name": "weather", "parameters": {"n": 1}}', "",
         ["{}", '{"n": 1}']),
        ('<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Ulm\\"}"}</tool_call>', "",
         ['{"city": "Ulm"}']),
    ],
)  # fmt: skip
def test_calls_are_read_as_hermes_qwen_and_llama_write_them(
    text: str, rest: str, arguments: list[str]
) -> None:
    assert parse_calls(text, {"weather"}) == (rest, tuple(ToolCall("weather", a) for a in arguments))


MALFORMED = [
    "<tool_call>",
    "<tool_call>{}</tool_call>",
    CALL.removesuffix("</tool_call>"),
    f"{CALL}<tool_call>not json</tool_call>",
    CALL.replace("weather", "wether"),
    '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": {"x": NaN}}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": {"x": 1e999}}</tool_call>',
    '{"name": "weather", "parameters": "{\\"x\\": -1e999}"}',
    '{"name": "weather", "parameters": {"city": "\\ud83d"}}',
    '<tool_call>{"name": "weather", "arguments": {"\\udc00": 1}}</tool_call>',
    '<tool_call>{"name": ["weather"], "arguments": {}}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": ' + "[" * 100_000 + "</tool_call>",
    '<tool_call>{"name": "weather", "arguments": "not json"}</tool_call>',
    '{"name": "weather", "parameters": {}} trailing words',
    '{"name": "weather"',
    '{"answer": 42}',
    "{}",
    "{",
    "",
    "the weather is fine",
]


@pytest.mark.parametrize("text", MALFORMED, ids=lambda text: text[:40])
def test_a_malformed_call_is_plain_text(text: str) -> None:
    assert parse_calls(text, {"weather"}) == (text, ())


MESSAGES = [
    *MALFORMED,
    CALL,
    f"so: {CALL}{CALL}",
    f" \n{CALL} then",
    '{"name": "weather", "parameters": {}}',
    "a < b <tool",
    "<tool_cal and more",
    "   ",
]


@given(st.sampled_from(MESSAGES), st.lists(st.integers(0, 200), max_size=12), st.booleans())
@example(f" \n{CALL} then", [3], True)
@settings(max_examples=400)
def test_a_streamed_message_is_the_message(text: str, places: list[int], offered: bool) -> None:
    names = {"weather"} if offered else set[str]()
    streamed = ToolText(names)
    said = [streamed.push(part.decode()) for part in cut_text(text, places)]
    rest, calls = streamed.finish()
    expected = parse_calls(text, names) if offered else (text, ())
    assert ("".join(said) + rest, calls) == expected


def cut_text(text: str, places: list[int]) -> list[bytes]:
    marks = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b].encode() for a, b in pairwise(marks)]


def test_text_before_a_call_is_streamed_and_text_that_only_looks_like_one_follows_late() -> None:
    streamed = ToolText({"weather"})
    assert streamed.push("I look. <tool") == "I look. "
    assert streamed.push("s are") == "<tools are"
    assert streamed.push(" nice <tool_call>{") == " nice "
    assert streamed.push("}") == ""
    assert streamed.finish() == ("<tool_call>{}", ())
