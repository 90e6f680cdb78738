"""How an engine's server is spoken to: JSON in, JSON or a stream of events out.

Every failure is one of two: `Refused` carries the server's own words about one
request, `Broken` means that the connection went away and nothing is known. Nothing
is retried here: a sampled token has been sampled, and who holds several engines sends
a lost request to another. Every call but a stream has a time limit; a stream may be
silent for as long as the engine is paused.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from palestra.errors import EngineError, MissingExtraError

try:
    import aiohttp
except ModuleNotFoundError as error:
    raise MissingExtraError("aiohttp", "serve") from error

MOST_CONNECTIONS = 512
"""Requests a server holds at once; further ones wait here, in their order."""
_MOST_SHOWN = 2000


class Broken(EngineError):
    """The connection broke, or no answer came in time."""


class Refused(EngineError):
    """The server answered that it will not, or cannot."""

    def __init__(self, status: int, path: str, message: str) -> None:
        super().__init__(f"the engine answered {path} with {status}: {message[:_MOST_SHOWN]}")
        self.status = status


class HttpClient:
    """One server, over a Unix socket or a port of this machine."""

    def __init__(self, *, socket: Path | None = None, port: int = 0, token: str = "") -> None:
        connector = (
            aiohttp.UnixConnector(str(socket), limit=0)
            if socket is not None
            else aiohttp.TCPConnector(limit=0)
        )
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._base = "http://engine" if socket is not None else f"http://127.0.0.1:{port}"
        self._session = aiohttp.ClientSession(connector=connector, headers=headers)

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

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        """Each server-sent event's JSON, until the server says that it is done.

        Raises Refused for an error in place of the stream or within it, Broken where the
        stream ends without an end. Closing the iterator closes the connection.
        """
        limit = aiohttp.ClientTimeout(total=None, sock_connect=30)
        try:
            async with self._session.post(self._base + path, json=body, timeout=limit) as response:
                await _check(response, path)
                async for event in _data(response.content):
                    if event == b"[DONE]":
                        return
                    value = json.loads(event)
                    if "error" in value:
                        raise Refused(_code(value["error"]), path, _message(value["error"]))
                    yield value
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _broken(path, error) from error
        raise Broken(f"the engine's answer to {path} broke off")

    async def close(self) -> None:
        """Close every connection; requests under way raise Broken."""
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
        try:
            async with self._session.request(
                method, self._base + path, json=body, params=query, timeout=limit
            ) as response:
                await _check(response, path)
                text = await response.text()
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise _broken(path, error) from error
        except RuntimeError as error:  # the session was closed while this waited
            raise Broken(f"the connection to the engine was closed before {path}") from error
        try:
            return json.loads(text)
        except ValueError:
            return text


async def _data(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """What follows ``data:`` on each line, of whatever length."""
    rest = b""
    async for block in content.iter_any():
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


async def _check(response: aiohttp.ClientResponse, path: str) -> None:
    if response.status < 400:
        return
    text = await response.text()
    try:
        message = _message(json.loads(text))
    except ValueError:
        message = text
    raise Refused(response.status, path, message)


def _message(value: Any) -> str:
    """The words in an error, wherever this server puts them."""
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(key):
            return _message(value[key])
    return value if isinstance(value, str) else json.dumps(value)


def _code(value: Any) -> int:
    code = value.get("code") if isinstance(value, dict) else None
    return code if isinstance(code, int) else 500


def _broken(path: str, error: Exception) -> Broken:
    if isinstance(error, TimeoutError):
        return Broken(f"the engine did not answer {path} in time")
    return Broken(f"the connection to the engine broke during {path}: {type(error).__name__}: {error}")
