"""Tool calls in what a model wrote: exact, or the text is left as it is.

Two ways of writing are read: Hermes and Qwen (``<tool_call>{"name": ..., "arguments":
{...}}</tool_call>``, several and with text before them) and Llama (nothing but
``{"name": ..., "parameters": {...}}``, several separated by ``;``). A call that is not
whole, not JSON, or of a tool that was not offered is no call: then the whole answer is
plain text. Nothing here raises for what a model wrote.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """A JSON object, written out."""


class ToolText:
    """An answer's text as it streams: what may turn out to be a call is held to the end."""

    def __init__(self, names: Collection[str]) -> None:
        """``names`` of the tools on offer; with none, everything is text."""
        self._names = names
        self._held = ""
        self._said = False
        self._calling = False

    def push(self, text: str) -> str:
        """The part of the answer that is certainly text."""
        if not self._names:
            return text
        self._held += text
        if self._calling:
            return ""
        if not self._said:
            start = self._held.lstrip()
            self._calling = start.startswith(("{", _PYTHON_TAG))
            if self._calling or _PYTHON_TAG.startswith(start):
                return ""
        place = self._held.find(OPEN)
        self._calling = place >= 0
        sure = place if self._calling else len(self._held) - _overlap(self._held)
        if not self._said and not self._held[:sure].strip():
            return ""  # blanks before a call are not text
        self._said = True
        given, self._held = self._held[:sure], self._held[sure:]
        return given

    def finish(self) -> tuple[str, tuple[ToolCall, ...]]:
        """The rest of the text, and the calls that were in it."""
        rest, self._held = self._held, ""
        return parse_calls(rest, self._names) if self._names else (rest, ())


def parse_calls(text: str, names: Collection[str]) -> tuple[str, tuple[ToolCall, ...]]:
    """``text`` without its calls, and the calls; all of it and none where one of them is malformed."""
    try:
        rest, calls = _hermes(text, names) if OPEN in text else ("", _llama(text, names))
    except (ValueError, RecursionError):  # JSON nested beyond measure is malformed like any other
        return text, ()
    return (rest, calls) if calls else (text, ())


def _hermes(text: str, names: Collection[str]) -> tuple[str, tuple[ToolCall, ...]]:
    calls: list[ToolCall] = []
    before, found, left = text.partition(OPEN)
    rest = before if before.strip() else ""
    while found:
        call, left = _call(left, names)
        if not left.startswith(CLOSE):
            raise ValueError("a call is not closed")
        calls.append(call)
        between, found, left = left.removeprefix(CLOSE).partition(OPEN)
        rest += between if between.strip() else ""
    return rest, tuple(calls)


def _llama(text: str, names: Collection[str]) -> tuple[ToolCall, ...]:
    left = text.strip().removeprefix(_PYTHON_TAG)
    call, left = _call(left, names)
    calls = [call]
    while left:
        if not left.startswith(";"):
            raise ValueError("there is more than calls")
        call, left = _call(left[1:], names)
        calls.append(call)
    return tuple(calls)


def _call(text: str, names: Collection[str]) -> tuple[ToolCall, str]:
    """The call that ``text`` begins with, and what follows it."""
    text = text.lstrip()
    value, end = json.JSONDecoder(parse_constant=_no_constant).raw_decode(text)
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in names:
        raise ValueError("no call of a tool that was offered")
    arguments: Any = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments, parse_constant=_no_constant)
    if not isinstance(arguments, dict):
        raise ValueError("a call's arguments are an object")
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    written.encode()  # half a surrogate pair is no text; like 1e999, which is read as infinity, a ValueError
    return ToolCall(name, written), text[end:].lstrip()


def _overlap(text: str) -> int:
    """How many of the last characters may be the beginning of a call."""
    return next((n for n in range(min(len(OPEN) - 1, len(text)), 0, -1) if OPEN.startswith(text[-n:])), 0)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
