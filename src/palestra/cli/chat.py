"""``palestra chat``: talk to a server that speaks OpenAI's API. Standard library only.

On a terminal every line is a message of one conversation; from a pipe the whole input
is one message. Text is shown as it comes, without control characters.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from palestra.cli.codes import OK
from palestra.cli.command import Command, safe
from palestra.errors import PalestraError


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="the server")
    parser.add_argument("--model", default="", help="model or adapter (default: the first that it serves)")
    parser.add_argument("--system", default="", help="a system message to begin with")
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N", help="of one answer")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T")
    parser.add_argument("--token", default=os.environ.get("PALESTRA_TOKEN", ""), help="also PALESTRA_TOKEN")


def _chat(args: argparse.Namespace) -> int:
    base = args.url.rstrip("/").removesuffix("/v1") + "/v1"
    with _open(f"{base}/models", args.token, None) as response:
        model = args.model or json.load(response)["data"][0]["id"]
    settings = {"model": model, "stream": True}
    settings |= {"max_tokens": args.max_tokens, "temperature": args.temperature}
    messages = [{"role": "system", "content": args.system}] if args.system else []
    for line in _lines():
        messages.append({"role": "user", "content": line})
        said = ""
        for piece in _pieces(f"{base}/chat/completions", args.token, settings | {"messages": messages}):
            said += piece
            print(safe(piece), end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": said})
    return OK


def _lines() -> Iterator[str]:
    """What the user says: the whole pipe, or line after line until the end of input."""
    if not sys.stdin.isatty():
        yield sys.stdin.read().strip()
        return
    with suppress(EOFError):
        while True:
            if line := input("> ").strip():
                yield line
    print()


def _pieces(url: str, token: str, body: dict[str, Any]) -> Iterator[str]:
    with _open(url, token, body) as response:
        for line in response:
            data = line.strip().removeprefix(b"data: ")
            if not data or data == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise PalestraError(f"the server ended its answer: {event['error']['message']}")
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""


def _open(url: str, token: str, body: dict[str, Any] | None) -> Any:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        return urllib.request.urlopen(urllib.request.Request(url, data, headers))
    except urllib.error.HTTPError as error:
        text = error.read().decode("utf-8", "replace")
        with suppress(ValueError, KeyError, TypeError):  # a proxy's page stays as it is
            text = json.loads(text)["error"]["message"]
        raise PalestraError(f"the server answered {error.code}: {text[:2000]}", where=url) from error
    except (OSError, ValueError) as error:
        next_command = "palestra serve MODEL"
        raise PalestraError(f"no server answers: {error}", where=url, next_command=next_command) from error


COMMANDS = {
    "chat": Command(
        "Talk to a server, here or elsewhere.",
        _arguments,
        _chat,
        json=False,
        examples=("palestra chat", "echo 'What is 6 times 7?' | palestra chat"),
    )
}
