"""Tokens to text as they arrive: what was given out is never taken back.

Joining the pieces of one completion gives its text, whatever the tokens cut: a
character is given out when it is whole, and bytes that may begin a stop string are
held until it is known whether they do. The token that ended the completion and the
stop string that it completed are not part of the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence

from palestra.types import StopReason


class TextPieces:
    """One completion's text: ``push`` each token in order, then ``finish`` once."""

    def __init__(
        self, token_bytes: Callable[[int], bytes], stop: Sequence[str] = (), ends: Collection[int] = ()
    ) -> None:
        """``ends`` are tokens that may end the completion without being text."""
        self._token_bytes = token_bytes
        self._needles = tuple(text.encode() for text in stop)
        self._keep = max(map(len, self._needles), default=1) - 1
        self._ends = ends
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tail = b""
        """The last bytes of the text so far, in which a stop string may have begun."""
        self._held = b""
        """Bytes not given out yet; whatever of ``_tail`` matters is among them."""
        self._last: tuple[int, bytes] | None = None
        """A token that may have ended the completion: known when the next one comes, or none."""

    def push(self, token: int) -> str:
        """The text that is certain now."""
        text = self._go_on()
        data = self._token_bytes(token)
        window = self._tail + data
        if token in self._ends or any(needle in window for needle in self._needles):
            self._last = (token, data)
            return text
        return text + self._add(data)

    def finish(self, reason: StopReason) -> str:
        """The rest of the text, given why the completion ended."""
        if self._last is not None:
            token, data = self._last
            if reason is StopReason.STOP:
                self._cut(token, data)
            elif reason is not StopReason.EOS or token not in self._ends:
                self._held += data
        text = self._decoder.decode(self._held, final=True)
        self._held, self._last = b"", None
        return text

    def _go_on(self) -> str:
        if self._last is None:
            return ""
        (_, data), self._last = self._last, None
        return self._add(data)

    def _add(self, data: bytes) -> str:
        self._held += data
        self._tail = (self._tail + data)[-self._keep :] if self._keep else b""
        sure = len(self._held) - self._doubtful()
        given, self._held = self._held[:sure], self._held[sure:]
        return self._decoder.decode(given)

    def _doubtful(self) -> int:
        """How many of the last bytes a stop string may still claim."""
        for start in range(min(self._keep, len(self._held)), 0, -1):
            end = self._held[-start:]
            if any(needle.startswith(end) or end.startswith(needle) for needle in self._needles):
                return start
        return 0

    def _cut(self, token: int, data: bytes) -> None:
        """Add ``data`` up to the first stop string that it completes."""
        window = self._tail + data
        found = [place for needle in self._needles if (place := window.find(needle)) >= 0]
        if found:
            before = len(self._tail) - len(self._held)
            self._held = window[before : min(found)] if min(found) >= before else b""
        elif token not in self._ends:
            self._held += data


def text_of(pieces: TextPieces, tokens: Sequence[int], reason: StopReason) -> str:
    """The whole text at once, by the same rules."""
    return "".join(map(pieces.push, tokens)) + pieces.finish(reason)
