"""The engine port: tokens in, tokens out, every token with its logprob and policy version.

An engine serves exactly one version at a time and says which. New weights are
*staged* while it goes on serving the old ones, then *committed* in one short
pause; whether they may serve is proven by `palestra.weights` with ``score``
and the returned digest. A request sees one defined order of versions. Nothing
here decodes text except to find stop strings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from palestra.types import Completion, Manifest, SamplingParams, Version

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One completion to sample after ``prompt_ids`` (all of it counts against the context)."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    id: str = ""
    """Names the request in errors and records; need not be unique."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals since start, and the present load."""

    prompt_tokens: int
    """Prompt tokens that went through the model (a shared prompt counts once)."""
    generated_tokens: int
    running: int
    waiting: int
    busy_s: float
    """Seconds in which at least one request was being computed."""


class Engine(Protocol):
    """A rollout engine. Methods may be called concurrently from one event loop."""

    async def start(self, manifest: Manifest, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Load the first version and begin to serve it; returns and raises as ``stage`` does.

        After an exception the engine holds nothing and can be started again.
        """
        ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion. Cancelling the await frees the request's cache at once.

        Raises EngineError if the prompt is empty, holds a token outside the
        vocabulary, or leaves no room in the context; the engine goes on serving.
        """
        ...

    async def score(self, token_ids: Sequence[int], sampling: SamplingParams) -> tuple[float, ...]:
        """Logprobs of ``token_ids[1:]`` under the serving version, each given all tokens before it.

        Temperature, top-k and top-p of ``sampling`` shape the distribution as in
        ``generate``; a token that top-k or top-p left out has the logprob -inf.
        """
        ...

    async def stage(self, manifest: Manifest, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Take the next version's tensors while serving the current one.

        Returns the manifest digest computed from the bytes actually received, which is
        that of ``manifest``: the engine raises WeightsError where it is not, and where a
        tensor is missing, unknown or has another shape. Then nothing is staged and the old
        version serves on. Names are Hugging Face names.
        """
        ...

    async def commit(self, version: Version) -> None:
        """Swap to the staged version between two decode steps; running requests continue on it.

        Raises WeightsError if ``version`` is not what is staged. After any other
        exception the engine's weights are unknown: replace the engine.
        """
        ...

    @property
    def version(self) -> Version | None:
        """The version that serves; None before ``start``."""
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """End every request (they raise EngineError) and free the memory. May be called twice."""
        ...
