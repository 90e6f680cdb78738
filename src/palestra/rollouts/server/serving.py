"""What every route shares: the engine, what it is called, and how completions are asked of it.

A request that is answered, refused or given up by its client leaves nothing behind in
the engine: whoever waits here and is cancelled cancels every completion it asked for.
Of the samples of one request the first has the request's seed and each further one a
seed of its own, so the same request gives the same samples.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from palestra.errors import EngineError, PalestraError, nearest
from palestra.rollouts.base import AdapterHost, Engine, EngineDead, GenerateRequest
from palestra.rollouts.server.errors import Refusal
from palestra.rollouts.server.schema import Sampled, bias_of
from palestra.rollouts.server.text import TextPieces
from palestra.types import Completion, SamplingParams

_T = TypeVar("_T")
_LARGE_BODY = 65536


class Renderer(Protocol):
    """A model's way of writing a chat; messages and tools are OpenAI's, as plain objects."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> Sequence[int]:
        """The ids of a prompt that asks for the assistant's next message; ChatError if it cannot be."""
        ...


class TextTokenizer(Protocol):
    """The part of `palestra.models.tokenizer.Tokenizer` that serving needs."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...


class Heard(NamedTuple):
    """One token as the engine tells it."""

    token: int
    logprob: float
    version: int


@dataclass
class Serving:
    """One engine behind HTTP; `palestra.rollouts.server.app.build_app` makes it."""

    engine: Engine
    tokenizer: TextTokenizer
    renderer: Renderer | None
    model: str
    default_tokens: int
    max_waiting: int
    token: str
    local_only: bool
    max_body_bytes: int
    stalled_s: float
    live: int = 0
    """Completions asked of the engine and not over."""
    dead: str = ""
    """What the engine said when it was gone; empty again once it has answered."""
    answered: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    """Requests by route and status."""

    # -- who answers

    @property
    def adapters(self) -> tuple[str, ...]:
        return self.engine.adapters if isinstance(self.engine, AdapterHost) else ()

    def adapter_of(self, model: str | None) -> str:
        """The adapter that ``model`` names, empty for the model itself. Refuses (404) any other name."""
        if model is None or model == self.model:
            return ""
        self.check_adapter(model, param="model")
        return model

    def check_adapter(self, name: str, *, param: str = "adapter") -> None:
        """Refuse (404) a name that is no adapter; the empty one is the model itself."""
        known = (self.model, *self.adapters) if param == "model" else self.adapters
        if name in self.adapters or (param == "adapter" and not name):
            return
        raise Refusal(
            404,
            f"there is no model {name[:200]!r} here",
            param=param,
            code="model_not_found",
            expected=f"one of {', '.join(known)}" if known else "no adapter: none is loaded",
            nearest=nearest(name, known),
            next_command="GET /v1/models",
        )

    def check_serves(self) -> None:
        """Refuse (503) while there are no weights."""
        if self.engine.version is None:
            raise Refusal(
                503, "the engine holds no weights", code="not_ready",
                next_command="POST /v1/palestra/stage with the first version",
            )  # fmt: skip

    def notice(self, error: PalestraError) -> None:
        """Remember what an engine says when it is gone, whatever it was asked."""
        if isinstance(error, EngineDead):
            self.dead = error.what

    # -- asking

    def requests(self, prompt: Sequence[int], body: Sampled, most: int | None) -> list[GenerateRequest]:
        """One request for each of the samples that ``body`` asks for after ``prompt``."""
        adapter, bias = self.adapter_of(body.model), bias_of(body.logit_bias)
        temperature = 1.0 if body.temperature is None else body.temperature
        try:
            return [
                GenerateRequest(
                    tuple(prompt),
                    SamplingParams(
                        max_new_tokens=self.default_tokens if most is None else most,
                        temperature=temperature,
                        top_p=1.0 if body.top_p is None else body.top_p,
                        top_k=max(0, body.top_k or 0),
                        stop=body.stops,
                        seed=seed,
                    ),
                    session=body.session,
                    adapter=adapter,
                    min_version=body.min_version,
                    exact_version=body.exact_version,
                    min_new_tokens=body.min_tokens,
                    logit_bias=bias,
                )
                for seed in seeds_of(body.seed, body.n or 1)
            ]
        except ValueError as error:
            raise Refusal(400, str(error)) from error

    async def completions(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Every completion, in the order of the requests; the first failure ends them all."""
        return [item async for _, item in self.heard(requests, tokens=False) if isinstance(item, Completion)]

    async def heard(
        self, requests: Sequence[GenerateRequest], *, tokens: bool = True
    ) -> AsyncGenerator[tuple[int, Heard | Completion], None]:
        """Each request's index with its tokens as they come and at last its completion.

        Without ``tokens`` only the completions come, in the requests' order. Closing the
        generator cancels what is not done.
        """
        self.check_serves()
        with self._admitted(len(requests)):
            queue: asyncio.Queue[tuple[int, Heard | Completion] | None] = asyncio.Queue()
            tasks = [
                asyncio.create_task(self._one(index, request, queue if tokens else None))
                for index, request in enumerate(requests)
            ]
            whole = asyncio.gather(*tasks)
            try:
                if tokens:
                    whole.add_done_callback(lambda _: queue.put_nowait(None))
                    while (item := await queue.get()) is not None:
                        yield item
                for index, completion in enumerate(await whole):
                    if not tokens:
                        yield index, completion
                self.dead = ""
            except EngineError as error:
                self._explain(error, requests)
                raise
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(whole, *tasks, return_exceptions=True)

    async def _one(
        self,
        index: int,
        request: GenerateRequest,
        queue: asyncio.Queue[tuple[int, Heard | Completion] | None] | None,
    ) -> Completion:
        if queue is None:
            return await self.engine.generate(request)
        completion = await self.engine.generate(request, partial(_hear, queue, index))
        queue.put_nowait((index, completion))
        return completion

    def _explain(self, error: EngineError, requests: Sequence[GenerateRequest]) -> None:
        """Notice what an error means for more than this request."""
        self.notice(error)
        if isinstance(error, EngineDead):
            return
        self.check_serves()
        for name in {request.adapter for request in requests}:  # it may have been dropped meanwhile
            self.check_adapter(name)

    @contextmanager
    def _admitted(self, count: int) -> Iterator[None]:
        if self.live + count > self.max_waiting:
            raise Refusal(
                429, f"{self.live} completions are under way or wait", code="queue_full",
                expected=f"at most {self.max_waiting} at once", next_command="the same request, later",
            )  # fmt: skip
        self.live += count
        try:
            yield
        finally:
            self.live -= count

    def pieces(self, stop: Sequence[str]) -> TextPieces:
        """A new completion's text."""
        return TextPieces(self.tokenizer.token_bytes, stop, self.tokenizer.eos_token_ids)


def _hear(
    queue: asyncio.Queue[tuple[int, Heard | Completion] | None],
    index: int,
    token: int,
    logprob: float,
    version: int,
) -> None:
    queue.put_nowait((index, Heard(token, logprob, version)))


async def apart(body_bytes: int, work: Callable[[], _T]) -> _T:
    """``work()``, in another thread if the body that it reads is large: streams must go on meanwhile."""
    return await asyncio.to_thread(work) if body_bytes > _LARGE_BODY else work()


def seeds_of(seed: int | None, count: int) -> list[int]:
    """``count`` seeds that follow from the first, which is drawn where none is given."""
    first = secrets.randbits(62) if seed is None else seed
    further = (hashlib.sha256(f"{first}+{i}".encode()).digest()[:8] for i in range(1, count))
    return [first, *(int.from_bytes(digest) >> 2 for digest in further)]


def spans_of(versions: Sequence[int], first: int = 0) -> list[list[int]]:
    """``[version, start, end]`` for each run of one version; ``first`` is the first token's place."""
    spans: list[list[int]] = []
    for place, version in enumerate(versions, first):
        if spans and spans[-1][0] == version:
            spans[-1][2] = place + 1
        else:
            spans.append([version, place, place + 1])
    return spans
