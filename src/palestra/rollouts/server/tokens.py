"""``/v1/palestra/generate`` and ``/v1/palestra/score``: the engine port over HTTP, tokens in and out.

Nothing is encoded, decoded or defaulted: a request here is a `GenerateRequest`, an
answer is a `Completion` with every token's logprob and version. A stream sends the
tokens in pieces, ``[token, logprob, version]`` each, and then why it ended.
"""

from __future__ import annotations

import math
from contextlib import aclosing

from aiohttp import web

from palestra.rollouts.base import GenerateRequest
from palestra.rollouts.server.errors import Refusal
from palestra.rollouts.server.events import Events, send_events
from palestra.rollouts.server.schema import (
    GenerateBody,
    SamplingBody,
    ScoreBody,
    bias_of,
    parsed,
    read_body,
)
from palestra.rollouts.server.serving import Heard, Serving
from palestra.types import SamplingParams


async def generate(serving: Serving, request: web.Request) -> web.StreamResponse:
    """One completion."""
    body = parsed(GenerateBody, read_body(await request.read()))
    serving.check_adapter(body.adapter)
    try:
        asked = GenerateRequest(
            tuple(body.prompt_ids),
            _sampling(body.sampling),
            id=body.id,
            session=body.session,
            adapter=body.adapter,
            min_version=body.min_version,
            exact_version=body.exact_version,
            min_new_tokens=body.min_new_tokens,
            logit_bias=bias_of(body.logit_bias),
        )
    except ValueError as error:
        raise Refusal(400, str(error)) from error
    if body.stream:
        return await send_events(request, _events(serving, asked), serving.stalled_s)
    (completion,) = await serving.completions([asked])
    return web.json_response(
        {
            "token_ids": completion.token_ids,
            "logprobs": completion.logprobs,
            "versions": completion.versions,
            "stop_reason": completion.stop_reason,
        }
    )


async def score(serving: Serving, request: web.Request) -> web.Response:
    """Logprobs of all tokens but the first; null for one that top-k or top-p left out."""
    body = parsed(ScoreBody, read_body(await request.read()))
    serving.check_serves()
    found = await serving.engine.score(body.token_ids, _sampling(body.sampling))
    return web.json_response({"logprobs": [value if math.isfinite(value) else None for value in found]})


async def _events(serving: Serving, asked: GenerateRequest) -> Events:
    async with aclosing(serving.heard([asked])) as heard:
        async for _, item in heard:
            if isinstance(item, Heard):
                yield {"tokens": [list(item)]}
            else:
                yield {"tokens": [], "stop_reason": item.stop_reason}


def _sampling(body: SamplingBody) -> SamplingParams:
    given = body.model_dump()
    given |= {key: tuple(given[key]) for key in ("stop", "stop_token_ids")}
    try:
        return SamplingParams(**given)
    except ValueError as error:
        raise Refusal(400, str(error), param="sampling") from error
