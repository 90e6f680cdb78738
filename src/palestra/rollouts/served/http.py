"""How an engine's server is spoken to: JSON in, JSON or a stream of events out.

Every failure is one of two: `Refused` carries the server's own words about one
request, `Broken` means that the connection went away and nothing is known. Nothing
is retried here: a sampled token has been sampled, and who holds several engines sends
a lost request to another. Every call but a stream has a time limit; a stream may be
silent for as long as the engine is paused.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from palestra.errors import EngineError, MissingExtraError
from palestra.rollouts.base import RequestRefused

try:
    import aiohttp
except ModuleNotFoundError as error:
    raise MissingExtraError("aiohttp", "serve") from error

_T = TypeVar("_T")

MOST_CONNECTIONS = 512
"""Requests a server holds at once; further ones wait here, in their order."""
ENGINE_DEAD = "engine_dead"
"""The code with which our own server says that its engine is gone."""
_MOST_SHOWN = 2000
_DECLINED = (400, 404, 413, 422)


class Broken(EngineError):
    """The connection broke, or no answer came in time."""


class Refused(EngineError):
    """The server answered that it will not, or cannot."""

    def __init__(self, status: int, path: str, message: str) -> None:
        super().__init__(f"the engine answered {path} with {status}: {message[:_MOST_SHOWN]}")
        self.status = status


class Gone(Refused):
    """The server answered that the engine in it is dead: it must go too."""


class Declined(Refused, RequestRefused):
    """The server answered that this request is wrong: it serves on."""


class HttpClient:
    """One server, over a Unix socket or a port of this machine."""

    def __init__(self, *, socket: Path | None = None, port: int = 0, token: str = "") -> None:
        # A connection for each request: a kept one may be closed by the server just as it is used again.
        connector = (
            aiohttp.UnixConnector(str(socket), limit=0, force_close=True)
            if socket is not None
            else aiohttp.TCPConnector(limit=0, force_close=True)
        )
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._base = "http://engine" if socket is not None else f"http://127.0.0.1:{port}"
        self._session = aiohttp.ClientSession(connector=connector, headers=headers)
        self._waits: set[asyncio.Timeout] = set()
        self._closed = False

    async def get(self, path: str, *, timeout_s: float) -> Any:
        """The answer's JSON; its text where it is none. Raises Refused or Broken."""
        return await self._ask("GET", path, None, timeout_s, None)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float,
        query: Mapping[str, str] | None = None,
    ) -> Any:
        """The answer's JSON; its text where it is none. Raises Refused or Broken."""
        return await self._ask("POST", path, body or {}, timeout_s, query)

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Each server-sent event's JSON, until the server says that it is done.

        Raises Refused for an error in place of the stream or within it, Broken where the
        stream ends without an end. Closing the iterator closes the connection.
        """
        limit = aiohttp.ClientTimeout(total=None, sock_connect=30)
        response: aiohttp.ClientResponse | None = None
        try:
            response = await self._while_open(self._session.post(self._base + path, json=body, timeout=limit))
            await _check(response, path)
            rest = b""
            while block := await self._while_open(response.content.readany()):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    event = line.removeprefix(b"data:").strip()
                    if not line.startswith(b"data:"):
                        continue
                    if event == b"[DONE]":
                        return
                    value = json.loads(event)
                    if "error" in value:
                        raise _refused(_status(value["error"]), path, value["error"])
                    yield value
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _broken(path, error) from error
        finally:
            if response is not None:
                response.close()
        raise Broken(f"the engine's answer to {path} broke off")

    async def close(self) -> None:
        """Close every connection; whoever waits for an answer gets Broken."""
        self._closed = True
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            wait.reschedule(now)
        await self._session.close()

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float,
        query: Mapping[str, str] | None,
    ) -> Any:
        limit = aiohttp.ClientTimeout(total=timeout_s)

        async def answer() -> str:
            async with self._session.request(
                method, self._base + path, json=body, params=query, timeout=limit
            ) as response:
                await _check(response, path)
                return await response.text()

        try:
            text = await self._while_open(answer())
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise _broken(path, error) from error
        try:
            return json.loads(text)
        except ValueError:
            return text

    async def _while_open(self, work: Awaitable[_T]) -> _T:
        """The result of ``work``; Broken once this client is closed. (aiohttp leaves its readers waiting.)"""
        wait = asyncio.timeout(0 if self._closed else None)
        self._waits.add(wait)
        try:
            async with wait:
                return await work
        except TimeoutError:
            if wait.expired():
                raise Broken("the connection to the engine was closed") from None
            raise
        finally:
            self._waits.discard(wait)


async def _check(response: aiohttp.ClientResponse, path: str) -> None:
    if response.status < 400:
        return
    text = await response.text()
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    raise _refused(response.status, path, value)


def _refused(status: int, path: str, value: Any) -> Refused:
    error = value.get("error", value) if isinstance(value, dict) else value
    dead = isinstance(error, dict) and error.get("code") == ENGINE_DEAD
    kind = Gone if dead else Declined if status in _DECLINED else Refused
    return kind(status, path, _message(value))


def _message(value: Any) -> str:
    """The words in an error, wherever this server puts them."""
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(key):
            return _message(value[key])
    return value if isinstance(value, str) else json.dumps(value)


def _status(value: Any) -> int:
    codes = (value.get("status"), value.get("code")) if isinstance(value, dict) else ()
    return next((code for code in codes if isinstance(code, int)), 500)


def _broken(path: str, error: Exception) -> Broken:
    if isinstance(error, TimeoutError):
        return Broken(f"the engine did not answer {path} in time")
    return Broken(f"the connection to the engine broke during {path}: {type(error).__name__}: {error}")
