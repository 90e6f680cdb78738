"""What passes between an engine and the kind of server behind it: a request out, tokens in, an end.

The last piece of a completion has an end, no other has one. Version spans lie one after
another from the first token on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from palestra.rollouts.base import GenerateRequest
from palestra.types import StopReason


@dataclass(frozen=True, slots=True)
class End:
    """What the server says when a request has ended."""

    reason: StopReason | None
    """STOP or ABORTED; None where the tokens must tell."""
    versions: tuple[tuple[str, int, int], ...]
    """Spans over the completion's tokens: version, first token, one past the last."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The next tokens of a completion; the last piece has an end."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    end: End | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as the server is asked for it."""

    id: str
    request: GenerateRequest
    most: int
    """New tokens at most: what was asked for, or what the context leaves."""
    stop_token_ids: tuple[int, ...]
    salt: str
    """What prompts are cached under: 32 hex digits of the version, so that none outlives it (case 6)."""
    adapter: str
    """The server's name for the adapter; empty for the model."""
