"""Server-sent events: a stream either ends with ``[DONE]`` or with an error event.

Headers go out with the first event, so what fails before it still has its own status.
A reader that takes nothing for ``stalled_s`` is cut off, and so is one that went away;
both cancel what the stream was asked for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from aiohttp import web

from palestra.errors import PalestraError, boundary
from palestra.rollouts.server.errors import answer_to
from palestra.types import Boundary

Events = AsyncGenerator[dict[str, Any], None]


async def send_events(request: web.Request, events: Events, stalled_s: float) -> web.StreamResponse:
    """Answer ``request`` with the events, each as it comes."""
    async with aclosing(events):
        event = await _next(events)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        try:
            await response.prepare(request)
            try:
                while event is not None:
                    await _write(response, json.dumps(event, allow_nan=False), stalled_s)
                    event = await _next(events)
                await _write(response, "[DONE]", stalled_s)
            except PalestraError as error:
                await _write(response, json.dumps(answer_to(error).body), stalled_s)
            await response.write_eof()
        except (ConnectionError, TimeoutError):  # the reader is gone, or reads no more
            if request.transport is not None:
                request.transport.abort()
        return response


async def _next(events: Events) -> dict[str, Any] | None:
    with boundary(Boundary.ENGINE, "streaming"):
        return await anext(events, None)


async def _write(response: web.StreamResponse, data: str, stalled_s: float) -> None:
    async with asyncio.timeout(stalled_s):
        await response.write(f"data: {data}\n\n".encode())
