"""When a completion ends: an end token, a stop token, a stop string, or no room.

Stop strings are searched in bytes, so they match across token boundaries and
inside multi-byte characters; only sampled bytes count, never the prompt's. The
tokens that complete a match stay in the completion. If several reasons hold for
one token, the first of EOS, STOP and the limit is reported. Before ``at_least``
tokens only the limit ends anything.
"""

from __future__ import annotations

from collections.abc import Callable

from palestra.types import SamplingParams, StopReason


class StopChecker:
    """Looks at one completion's tokens in order; feed each token exactly once."""

    def __init__(
        self,
        sampling: SamplingParams,
        *,
        room: int,
        eos_token_ids: frozenset[int],
        token_bytes: Callable[[int], bytes],
        at_least: int = 0,
    ) -> None:
        self._eos = eos_token_ids
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._needles = tuple(text.encode() for text in sampling.stop)
        self._keep = max(map(len, self._needles), default=1) - 1
        self._token_bytes = token_bytes
        self._tail = b""
        self._left = min(sampling.max_new_tokens, room)
        self._forced = at_least
        self._limit = StopReason.LENGTH if sampling.max_new_tokens <= room else StopReason.CONTEXT

    def check(self, token: int) -> StopReason | None:
        """The reason to stop after ``token``, or None to go on."""
        self._left -= 1
        self._forced -= 1
        matched = self._matches(token)
        if self._forced <= 0:
            if token in self._eos:
                return StopReason.EOS
            if matched or token in self._stop_ids:
                return StopReason.STOP
        return self._limit if self._left <= 0 else None

    def _matches(self, token: int) -> bool:
        if not self._needles:
            return False
        window = self._tail + self._token_bytes(token)
        self._tail = window[-self._keep :] if self._keep else b""
        return any(needle in window for needle in self._needles)
