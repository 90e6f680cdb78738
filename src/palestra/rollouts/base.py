"""The engine port: tokens in, tokens out, every token with its logprob and policy version.

An engine serves exactly one version at a time and says which. New weights are
*staged* while it goes on serving the old ones, then *committed* in one short
pause; whether they may serve is proven by `palestra.weights` with ``score``
and the returned digest. A request sees one defined order of versions. Nothing
here decodes text except to find stop strings. What only some engines can do
(`Pausable`, `Sleeper`, `AdapterHost`) is a port of its own: whoever needs it asks
with isinstance and refuses by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from palestra.errors import EngineError
from palestra.types import Completion, Manifest, SamplingParams, Version

if TYPE_CHECKING:
    from torch import Tensor


MOST_BIAS = 1e6
"""Added to a logit at most: enough to force or forbid a token, and within fp32."""

OnToken = Callable[[int, float, int], None]
"""Called on the event loop with each token, its logprob and its version, in order. It must not raise."""

PauseMode = Literal["keep", "drain", "abort"]
"""What happens to running requests: they wait, finish first, or end with what they have (ABORTED)."""


class RequestRefused(EngineError):
    """The request cannot be answered as it was asked, now or later; the engine serves on."""


class VersionNotReady(EngineError):
    """The engine does not serve the version that the request asks for. Asking again later may succeed."""


class EngineDead(EngineError):
    """The engine is gone and every request it held with it. Another replica may answer the same request."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One completion to sample after ``prompt_ids`` (all of it counts against the context)."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    id: str = ""
    """Names the request in errors and records; need not be unique."""
    session: str = ""
    """Requests of one session continue one another: their common beginning may be computed once,
    under one version. Empty: nothing is kept of this request."""
    adapter: str = ""
    """A LoRA adapter that the engine has loaded under this name; empty for the model itself."""
    min_version: int | None = None
    """The least version number that may sample the first token; `VersionNotReady` below it."""
    exact_version: int | None = None
    """The one version number that may sample any token; `VersionNotReady` if it is, or becomes, another."""
    min_new_tokens: int = 0
    """No end token is sampled before so many tokens, and no stop string or stop token ends them earlier.
    Shapes the distribution in a way that no trainer recomputes: for serving, never for training."""
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    """Added to the logits of these tokens before temperature; as ``min_new_tokens``, for serving."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", _token_ids(self.prompt_ids, "prompt_ids"))
        bias = dict(zip(_token_ids(self.logit_bias, "logit_bias"), self.logit_bias.values(), strict=True))
        for token, value in bias.items():
            if not isinstance(value, int | float) or not abs(value) <= MOST_BIAS:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(f"logit_bias[{token}] must be a number from -{MOST_BIAS:g} to {MOST_BIAS:g}")
        object.__setattr__(self, "logit_bias", MappingProxyType(bias))
        if self.min_new_tokens < 0 or self.min_new_tokens > self.sampling.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must be in 0..max_new_tokens ({self.sampling.max_new_tokens}), "
                f"got {self.min_new_tokens}"
            )


def _token_ids(given: Iterable[int], what: str) -> tuple[int, ...]:
    """``given`` as plain integers; TypeError for anything that is no integer."""
    ids = tuple(given)
    if set(map(type, ids)) <= {int}:
        return ids
    for value in ids:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{what} must hold token ids, got {value!r}")
    return tuple(map(index, ids))


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
    reused_tokens: int = 0
    """Prompt tokens that did not have to be computed: a session had left them."""


class Engine(Protocol):
    """A rollout engine. Methods may be called concurrently from one event loop."""

    async def start(self, manifest: Manifest, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Load the first version and begin to serve it; returns and raises as ``stage`` does.

        After an exception the engine holds nothing and can be started again.
        """
        ...

    async def generate(self, request: GenerateRequest, on_token: OnToken | None = None) -> Completion:
        """Sample one completion. Cancelling the await frees the request's cache at once.

        ``on_token`` hears every token of the completion, in order, before the return.
        Raises RequestRefused if the prompt is empty, holds a token outside the
        vocabulary, or leaves no room in the context, or where the adapter is not loaded;
        VersionNotReady where the version asked for does not serve. The engine goes on
        serving. EngineDead means that it does not.
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


@runtime_checkable
class Pausable(Protocol):
    """An engine that can hold still, with its requests kept."""

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Return when no token is being computed. New requests wait; scoring and weights go on."""
        ...

    async def resume(self) -> None:
        """Go on where ``pause`` stopped; without effect if nothing is paused."""
        ...


@runtime_checkable
class Sleeper(Protocol):
    """An engine that can give its memory to the trainer between rollouts."""

    async def sleep(self) -> None:
        """End every request (ABORTED), free weights, caches and adapters: all is as before ``start``.

        ``version`` is None from then on, and ``start`` wakes it. Nothing is left that
        could serve old weights, and waking never holds two copies.
        """
        ...


@runtime_checkable
class AdapterHost(Protocol):
    """An engine that serves LoRA adapters beside the model, chosen by request."""

    async def load_adapter(
        self, name: str, config: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]
    ) -> None:
        """Serve the adapter under ``name``, from PEFT's ``adapter_config.json`` and tensors.

        Replaces one of that name between two decode steps: a request sees the old or the new one.
        Raises WeightsError where rank, targets or shapes do not fit the model; then nothing changed.
        """
        ...

    async def drop_adapter(self, name: str) -> None:
        """Forget it; requests that run with it finish with it. EngineError if there is none."""
        ...

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names that requests may use, sorted."""
        ...
