"""Who may ask: this machine's programs on loopback, holders of the token elsewhere.

On loopback the Host must name this machine and this port, so a page that rebinds its
own name to 127.0.0.1 is refused (CVE-2025-62593), and a browser's Origin must be this
server itself. Where there is a token, every route but ``/health`` needs it; it is
compared in constant time.
"""

from __future__ import annotations

import hmac

from aiohttp import web

from palestra.rollouts.server.errors import Refusal

_NAMES = ("localhost", "127.0.0.1", "[::1]")
_OPEN = ("/health",)


def check_access(request: web.Request, *, token: str, local_only: bool) -> None:
    """Refuse (401, 403) a request that may not be answered."""
    if local_only:
        _check_host(request)
    origin = request.headers.get("Origin")
    if origin is not None and origin.lower() not in _own_origins(request, local_only):
        raise Refusal(
            403, f"a page of {origin[:200]!r} may not use this server", code="forbidden_origin",
            expected="programs, and pages of this server itself",
        )  # fmt: skip
    if token and request.path not in _OPEN:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode()):
            raise Refusal(
                401, "the token is missing or wrong", code="invalid_api_key",
                expected="Authorization: Bearer TOKEN", next_command="set OPENAI_API_KEY, or --token",
            )  # fmt: skip


def _check_host(request: web.Request) -> None:
    if request.host.lower() not in _own_hosts(request):
        raise Refusal(
            403, f"the request is for the host {request.host[:200]!r}", code="forbidden_host",
            expected=f"localhost:{_port(request)} or 127.0.0.1:{_port(request)}",
        )  # fmt: skip


def _own_hosts(request: web.Request) -> set[str]:
    port = _port(request)
    bare = set(_NAMES) if port == 80 else set[str]()
    return bare | {f"{name}:{port}" for name in _NAMES}


def _own_origins(request: web.Request, local_only: bool) -> set[str]:
    hosts = _own_hosts(request) if local_only else {request.host.lower()}
    return {f"{scheme}://{host}" for scheme in ("http", "https") for host in hosts}


def _port(request: web.Request) -> int:
    name = request.transport.get_extra_info("sockname") if request.transport is not None else None
    return int(name[1]) if isinstance(name, tuple) else 0
