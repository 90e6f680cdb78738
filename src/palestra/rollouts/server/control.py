"""The control plane: weights, pausing and adapters, for whoever trains what is served.

Tensors come as files on a disk that both sides see, never in a body; the engine hashes
what it read, and the digest goes back. What an engine cannot do is answered 501 with
the name of the port it lacks, and nothing is tried.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from aiohttp import web
from pydantic import Field

from palestra.rollouts.base import AdapterHost, Pausable, Sleeper
from palestra.rollouts.server.errors import Refusal
from palestra.rollouts.server.schema import Body, parsed, read_body
from palestra.rollouts.server.serving import Serving
from palestra.types import Manifest, Version

_Port = TypeVar("_Port")
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/#-]{0,199}$")]


class NothingBody(Body):
    pass


class PauseBody(Body):
    mode: Literal["keep", "drain", "abort"] = "keep"


class StageBody(Body):
    folder: str
    manifest: dict[str, Any]


class CommitBody(Body):
    version: str


class LoadBody(Body):
    name: _Name
    folder: str


class DropBody(Body):
    name: str


async def state(serving: Serving, request: web.Request) -> web.Response:
    """What serves, and under which load."""
    stats = serving.engine.stats()
    return web.json_response(
        {
            "model": serving.model,
            "version": _text(serving.engine.version),
            "adapters": list(serving.adapters),
            "prompt_tokens": stats.prompt_tokens,
            "generated_tokens": stats.generated_tokens,
            "reused_tokens": stats.reused_tokens,
            "running": stats.running,
            "waiting": stats.waiting,
            "busy_s": stats.busy_s,
            "requests": serving.live,
            "dead": serving.dead,
        }
    )


async def pause(serving: Serving, request: web.Request) -> web.Response:
    engine = _able(serving, Pausable)
    body = parsed(PauseBody, read_body(await request.read() or b"{}"))
    serving.check_serves()
    await engine.pause(body.mode)
    return _done(serving)


async def resume(serving: Serving, request: web.Request) -> web.Response:
    engine = _able(serving, Pausable)
    parsed(NothingBody, read_body(await request.read() or b"{}"))
    serving.check_serves()
    await engine.resume()
    return _done(serving)


async def sleep(serving: Serving, request: web.Request) -> web.Response:
    engine = _able(serving, Sleeper)
    parsed(NothingBody, read_body(await request.read() or b"{}"))
    await engine.sleep()
    return _done(serving)


async def stage(serving: Serving, request: web.Request) -> web.Response:
    """Hand the engine the version that lies in a folder; an engine without weights starts with it."""
    from palestra.models.tensors import load_tensors

    body = parsed(StageBody, read_body(await request.read()))
    try:
        manifest = Manifest.from_json(body.manifest)
    except ValueError as error:
        raise Refusal(400, str(error), param="manifest", expected="what Manifest.to_json writes") from error
    tensors = await asyncio.to_thread(load_tensors, _folder(body.folder))
    starts = serving.engine.version is None
    take = serving.engine.start if starts else serving.engine.stage
    digest = await take(manifest, tensors.items())
    serving.dead = "" if starts else serving.dead
    return _done(serving, digest=digest, staged=not starts)


async def commit(serving: Serving, request: web.Request) -> web.Response:
    body = parsed(CommitBody, read_body(await request.read()))
    try:
        version = Version.parse(body.version)
    except ValueError as error:
        raise Refusal(400, str(error), param="version") from error
    serving.check_serves()
    await serving.engine.commit(version)
    return _done(serving)


async def load_adapter(serving: Serving, request: web.Request) -> web.Response:
    from palestra.models.lora import read_adapter

    engine = _able(serving, AdapterHost)
    body = parsed(LoadBody, read_body(await request.read()))
    if body.name == serving.model:
        raise Refusal(400, f"{body.name!r} is the model's own name", param="name", expected="another name")
    config, tensors = await asyncio.to_thread(read_adapter, _folder(body.folder))
    serving.check_serves()
    await engine.load_adapter(body.name, config, tensors.items())
    return _done(serving, adapters=list(engine.adapters))


async def drop_adapter(serving: Serving, request: web.Request) -> web.Response:
    engine = _able(serving, AdapterHost)
    body = parsed(DropBody, read_body(await request.read()))
    serving.check_serves()
    serving.check_adapter(body.name)
    await engine.drop_adapter(body.name)
    return _done(serving, adapters=list(engine.adapters))


def _able(serving: Serving, port: type[_Port]) -> _Port:
    if not isinstance(serving.engine, port):
        kind = type(serving.engine).__name__
        raise Refusal(501, f"this engine ({kind}) is no {port.__name__}", code="not_implemented")
    return serving.engine


def _folder(text: str) -> Path:
    folder = Path(text)
    if not folder.is_absolute() or "\0" in text:
        raise Refusal(400, f"{text[:200]!r} is no absolute path", param="folder",
                      expected="a folder that the server can read")  # fmt: skip
    return folder


def _text(version: Version | None) -> str | None:
    return None if version is None else str(version)


def _done(serving: Serving, **more: Any) -> web.Response:
    return web.json_response({"version": _text(serving.engine.version), **more})
