"""The server: an OpenAI-compatible API over any `Engine`, and the control plane beside it.

It knows ports only: an engine, a tokenizer, and something that renders a chat. Every
request is checked (who asks, how much, what) before the engine hears of it, every
failure is answered in one shape, and a client that goes away takes its completions
with it: whoever runs the app must let aiohttp cancel handlers, as `run_app` does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from palestra.errors import MissingExtraError, PalestraError, boundary, nearest

try:
    from aiohttp import web
except ModuleNotFoundError as missing:
    raise MissingExtraError("aiohttp", "serve") from missing

from palestra.rollouts.base import Engine
from palestra.rollouts.server import chat, completions, control, metrics, tokens
from palestra.rollouts.server.errors import Refusal, answer_to
from palestra.rollouts.server.guard import check_access
from palestra.rollouts.server.serving import Renderer, Serving, TextTokenizer
from palestra.types import Boundary

Handler = Callable[[Serving, web.Request], Awaitable[web.StreamResponse]]

SERVING: web.AppKey[Serving] = web.AppKey("serving", Serving)


def build_app(
    engine: Engine,
    tokenizer: TextTokenizer,
    renderer: Renderer | None,
    model: str,
    *,
    token: str = "",
    local_only: bool = True,
    default_tokens: int = 1024,
    max_waiting: int = 16384,
    max_body_bytes: int = 16 * 2**20,
    stalled_s: float = 60.0,
) -> web.Application:
    """The application that serves ``engine`` under the name ``model``.

    ``renderer`` None: the model has no chat template. ``local_only`` refuses other Hosts than
    this machine. ``default_tokens``: what a chat may take where it does not say. ``max_waiting``
    completions are held at once, running ones included. ``stalled_s``: how long a reader of a
    stream may take nothing. The engine stays the caller's to close.
    """
    serving = Serving(
        engine,
        tokenizer,
        renderer,
        model,
        default_tokens,
        max_waiting,
        token,
        local_only,
        max_body_bytes,
        stalled_s,
    )
    app = web.Application(middlewares=[_answering], client_max_size=max_body_bytes)
    app[SERVING] = serving
    for route, handler in GET.items():
        app.router.add_get(route, partial(handler, serving))
    for route, handler in POST.items():
        app.router.add_post(route, partial(handler, serving))
    return app


async def run_app(
    app: web.Application, host: str, port: int, *, socket: Path | None = None, grace_s: float = 5.0
) -> tuple[web.AppRunner, int]:
    """Listen; the runner, whose ``cleanup`` ends it, and the port (0 for a socket). OSError if it is taken.

    ``cleanup`` accepts nothing new and lets what runs go on for ``grace_s``.
    """
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=grace_s, access_log=None)
    await runner.setup()
    try:
        site = web.UnixSite(runner, str(socket)) if socket else web.TCPSite(runner, host, port)
        await site.start()
    except OSError:
        await runner.cleanup()
        raise
    return runner, 0 if socket else int(runner.addresses[0][1])


async def models(serving: Serving, request: web.Request) -> web.Response:
    """The model, and its adapters, which are asked for in the same way."""
    version = serving.engine.version
    common = {"object": "model", "created": 0, "owned_by": "palestra", "version": version and str(version)}
    rows = [{"id": serving.model, **common}]
    rows += [{"id": name, **common, "parent": serving.model} for name in serving.adapters]
    return web.json_response({"object": "list", "data": rows})


async def model(serving: Serving, request: web.Request) -> web.Response:
    name = request.match_info["name"]
    serving.adapter_of(name)
    return web.json_response({"id": name, "object": "model", "created": 0, "owned_by": "palestra"})


async def health(serving: Serving, request: web.Request) -> web.Response:
    """200 exactly while a request could be answered, as far as the last one tells."""
    serving.check_serves()
    if serving.dead:
        raise Refusal(503, f"the engine is gone: {serving.dead}", code="engine_dead")
    return web.json_response({"status": "ok", "version": str(serving.engine.version)})


GET: dict[str, Handler] = {
    "/health": health,
    "/metrics": metrics.metrics,
    "/v1/models": models,
    "/v1/models/{name:.+}": model,
    "/v1/palestra/state": control.state,
}
POST: dict[str, Handler] = {
    "/v1/chat/completions": chat.chat_completions,
    "/v1/completions": completions.completions,
    "/v1/palestra/generate": tokens.generate,
    "/v1/palestra/score": tokens.score,
    "/v1/palestra/pause": control.pause,
    "/v1/palestra/resume": control.resume,
    "/v1/palestra/sleep": control.sleep,
    "/v1/palestra/stage": control.stage,
    "/v1/palestra/commit": control.commit,
    "/v1/palestra/adapters/load": control.load_adapter,
    "/v1/palestra/adapters/drop": control.drop_adapter,
}


@web.middleware
async def _answering(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Check who asks, turn failures into answers, and count."""
    serving = request.app[SERVING]
    try:
        check_access(request, token=serving.token, local_only=serving.local_only)
        response = await _answered(request, handler)
    except PalestraError as error:
        serving.notice(error)
        response = answer_to(error).response()
    resource = request.match_info.route.resource
    serving.answered[(resource.canonical if resource else "none", response.status)] += 1
    return response


async def _answered(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    with boundary(Boundary.ENGINE, f"{request.method} {request.path}"):
        try:
            return await handler(request)
        except PalestraError as error:
            refused = error
        except web.HTTPException as error:
            refused = _refusal(request, error)
        except (web.RequestPayloadError, ConnectionError) as error:
            refused = Refusal(400, f"the body could not be read: {error}")
    raise refused


def _refusal(request: web.Request, error: web.HTTPException) -> Refusal:
    """aiohttp's own refusals, in our words."""
    asked = f"{request.method} {request.path[:200]}"
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        most = request.app[SERVING].max_body_bytes
        return Refusal(413, "the body is too large", code="body_too_large", expected=f"at most {most} bytes")
    if isinstance(error, web.HTTPNotFound):
        return Refusal(404, f"there is no route {asked}", code="unknown_route",
                       nearest=nearest(request.path, [*GET, *POST]))  # fmt: skip
    allowed = ", ".join(sorted(getattr(error, "allowed_methods", ())))
    return Refusal(error.status, f"{asked}: {error.reason}", expected=allowed)
