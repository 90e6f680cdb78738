"""``/v1/completions``: text or token ids in, what the model writes after it out.

Token ids are used as they are given. Several prompts are answered in their order,
each with its samples. With ``echo`` the prompt precedes the text, its logprobs come
from scoring it under the same sampling, and ``max_tokens`` may be 0.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from itertools import accumulate
from typing import Any

from aiohttp import web

from palestra.rollouts.base import GenerateRequest
from palestra.rollouts.server.chat import FINISH, usage_of
from palestra.rollouts.server.errors import Refusal
from palestra.rollouts.server.events import Events, send_events
from palestra.rollouts.server.schema import CompletionBody, parsed, read_body
from palestra.rollouts.server.serving import Heard, Serving, apart, spans_of
from palestra.rollouts.server.text import text_of
from palestra.types import Completion, SamplingParams, StopReason

MOST_PROMPTS = 1024
_DEFAULT_TOKENS = 16
"""OpenAI's own default for this route."""
_Scores = tuple[float | None, ...]
_NOTHING = Completion((), (), (), StopReason.LENGTH)


async def completions(serving: Serving, request: web.Request) -> web.StreamResponse:
    """Answer one request."""
    raw = await request.read()
    body = parsed(CompletionBody, read_body(raw))
    prompts = await apart(len(raw), partial(_prompts, serving, body.prompt))
    most = _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    if most == 0 and (not body.echo or body.stream):
        raise Refusal(
            400, "max_tokens is 0", param="max_tokens", expected="at least 1; 0 with echo and without stream"
        )
    asked = [one for prompt in prompts for one in serving.requests(prompt, body, max(1, most))]
    serving.check_serves()
    scores: list[_Scores] = []
    if body.echo and body.logprobs is not None:
        if serving.adapter_of(body.model):
            raise Refusal(400, "prompts are scored by the model itself only", param="echo",
                          expected=f"model {serving.model}")  # fmt: skip
        scores = [await _scored(serving, prompt, asked[0].sampling) for prompt in prompts]
    reply = _Reply(serving, body, prompts, scores)
    if body.stream:
        return await send_events(request, reply.events(asked), serving.stalled_s)
    done = await serving.completions(asked) if most else [_NOTHING] * len(asked)
    return web.json_response(reply.whole(done))


async def _scored(serving: Serving, prompt: Sequence[int], sampling: SamplingParams) -> _Scores:
    """One logprob a token; None for the first, and for one that top-k or top-p left out."""
    found = await serving.engine.score(prompt, sampling) if len(prompt) > 1 else ()
    return (None, *(value if math.isfinite(value) else None for value in found))


def _prompts(serving: Serving, given: Any) -> list[tuple[int, ...]]:
    """The prompts as token ids; texts are encoded as they stand."""
    whole = [given] if isinstance(given, str) or (given and _are_ids(given)) else given
    if not 1 <= len(whole) <= MOST_PROMPTS:
        raise _no_prompt(f"{len(whole)} prompts")
    found: list[tuple[int, ...]] = []
    for index, one in enumerate(whole):
        ids = serving.tokenizer.encode(one) if isinstance(one, str) else one
        if not isinstance(ids, list) or not _are_ids(ids):
            raise _no_prompt(f"prompt {index} is neither text nor token ids")
        if not ids:
            raise _no_prompt(f"prompt {index} is empty")
        for token in ids:
            try:
                serving.tokenizer.token_bytes(token)
            except ValueError as error:
                raise _no_prompt(str(error)) from error
        found.append(tuple(ids))
    return found


def _are_ids(value: Sequence[Any]) -> bool:
    return all(type(token) is int and token >= 0 for token in value)


def _no_prompt(what: str) -> Refusal:
    expected = f"a text, a list of token ids, or a list of at most {MOST_PROMPTS} of either"
    return Refusal(400, what, param="prompt", expected=expected)


class _Reply:
    """One request's answer, whole or in pieces."""

    def __init__(
        self, serving: Serving, body: CompletionBody, prompts: list[tuple[int, ...]], scores: list[_Scores]
    ) -> None:
        self._serving = serving
        self._body = body
        self._prompts = prompts
        self._scores = scores
        self._samples = body.n or 1
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or serving.model,
        }

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        return {**self._head, "choices": choices, "usage": self._usage(completions)}

    async def events(self, asked: list[GenerateRequest]) -> Events:
        """The answer's chunks, each choice's in order."""
        texts = [self._serving.pieces(self._body.stops) for _ in asked]
        lengths = [0] * len(asked)
        done: list[Completion] = []
        begun: set[int] = set()
        async with aclosing(self._serving.heard(asked)) as heard:
            async for index, item in heard:
                before = self._echoed(index) if index not in begun else ""
                first = index not in begun
                begun.add(index)
                if isinstance(item, Heard):
                    text = before + texts[index].push(item.token)
                    rows = [(item.token, item.logprob)]
                    if text or first or self._body.logprobs is not None or self._body.return_token_ids:
                        yield self._chunk(index, text, rows, lengths[index], first=first)
                    lengths[index] += len(text)
                    continue
                done.append(item)
                rest = before + texts[index].finish(item.stop_reason)
                yield self._chunk(index, rest, [], lengths[index], first=first, completion=item)
        if self._body.usage_in_stream:
            yield {**self._head, "choices": [], "usage": self._usage(done)}

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        pieces = self._serving.pieces(self._body.stops)
        text = self._echoed(index) + text_of(pieces, completion.token_ids, completion.stop_reason)
        rows = list(zip(completion.token_ids, completion.logprobs, strict=True))
        choice = self._parts(index, text, rows, 0, first=True)
        return choice | self._end(completion)

    def _chunk(
        self,
        index: int,
        text: str,
        rows: list[tuple[int, float]],
        offset: int,
        *,
        first: bool,
        completion: Completion | None = None,
    ) -> dict[str, Any]:
        choice = self._parts(index, text, rows, offset, first=first)
        choice |= {"finish_reason": None} if completion is None else self._end(completion)
        usage = {"usage": None} if self._body.usage_in_stream else {}
        return {**self._head, "choices": [choice], **usage}

    def _parts(
        self, index: int, text: str, rows: list[tuple[int, float]], offset: int, *, first: bool
    ) -> dict[str, Any]:
        """What a choice says of its next tokens; the first time also of its prompt."""
        prompt = index // self._samples
        sampled: list[tuple[int, float | None]] = list(rows)
        if first and self._scores:
            sampled = [*zip(self._prompts[prompt], self._scores[prompt], strict=True), *rows]
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": self._logprobs(sampled, offset)}
        if self._body.return_token_ids:
            choice["token_ids"] = [token for token, _ in rows]
            if first:
                choice["prompt_token_ids"] = list(self._prompts[prompt])
        return choice

    def _end(self, completion: Completion) -> dict[str, Any]:
        return {
            "finish_reason": FINISH[completion.stop_reason],
            "version_spans": spans_of(completion.versions),
        }

    def _logprobs(self, rows: list[tuple[int, float | None]], offset: int) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        tokens = [self._serving.tokenizer.decode([token]) for token, _ in rows]
        offsets = list(accumulate(map(len, tokens), initial=offset))[:-1]
        return {
            "tokens": tokens,
            "token_logprobs": [logprob for _, logprob in rows],
            "top_logprobs": None,
            "text_offset": offsets,
        }

    def _echoed(self, index: int) -> str:
        return (
            self._serving.tokenizer.decode(self._prompts[index // self._samples]) if self._body.echo else ""
        )

    def _usage(self, completions: list[Completion]) -> dict[str, int]:
        return usage_of(sum(map(len, self._prompts)), completions)
