"""What a client is told when its request is not answered: OpenAI's shape, our words.

Every failure becomes ``{"error": {message, type, param, code}}`` with the status that
says whose it is: 4xx for what the client can change, 409 and 429 for what a later
request may get, 503 for an engine that does not serve, 500 for a fault of ours, whose
traceback stays in the server's log. The message carries every part of a PalestraError.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from palestra.errors import ChatError, ModelSourceError, PalestraError, WeightsError
from palestra.rollouts.base import EngineDead, RequestRefused, VersionNotReady
from palestra.types import Boundary

log = logging.getLogger("palestra.rollouts.server")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
}
_RETRY = (409, 429, 503)


class Refusal(PalestraError):
    """A request that is answered with an error status."""

    boundary = Boundary.ENGINE

    def __init__(self, status: int, what: str, *, param: str = "", code: str = "", **parts: str) -> None:
        super().__init__(what, **parts)
        self.status, self.param, self.code = status, param, code


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: dict[str, Any]

    def response(self) -> web.Response:
        headers = {"Retry-After": "1"} if self.status in _RETRY else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return web.json_response(self.body, status=self.status, headers=headers)


def answer_to(error: PalestraError) -> Answer:
    """The status and the body that tell a client of ``error``."""
    status = _status(error)
    if status == 500:
        log.error("a request failed: %s", error)
    refusal = error if isinstance(error, Refusal) else None
    rows = (("expected", error.expected), ("nearest", error.nearest), ("next", error.next_command))
    message = "; ".join([error.what, *(f"{name}: {text}" for name, text in rows if text)])
    return Answer(
        status,
        {
            "error": {
                "message": message,
                "type": _TYPES.get(status, "server_error"),
                "param": (refusal.param if refusal else "") or None,
                "code": (refusal.code if refusal else "") or _code(error),
                "status": status,
            }
        },
    )


def _status(error: PalestraError) -> int:
    if isinstance(error, Refusal):
        return error.status
    if isinstance(error, VersionNotReady):
        return 409
    if isinstance(error, EngineDead):
        return 503
    asked_wrongly = isinstance(error, (RequestRefused, ChatError, WeightsError, ModelSourceError))
    return 400 if asked_wrongly and not error.detail else 500  # a detail is a traceback: something broke


def _code(error: PalestraError) -> str | None:
    if isinstance(error, VersionNotReady):
        return "version_not_ready"
    return "engine_dead" if isinstance(error, EngineDead) else None
