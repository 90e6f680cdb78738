"""``/v1/chat/completions``: a chat in, the assistant's message out, in OpenAI's shapes.

The prompt is what the model's own template renders, and the answer carries the token
ids of both when asked. The streamed pieces of a message joined are the message that
is not streamed, tool calls included.
"""

from __future__ import annotations

import json
import time
import uuid
from contextlib import aclosing
from functools import partial
from typing import Any

from aiohttp import web

from palestra.rollouts.base import GenerateRequest
from palestra.rollouts.server.errors import Refusal
from palestra.rollouts.server.events import Events, send_events
from palestra.rollouts.server.schema import ChatBody, parsed, read_body
from palestra.rollouts.server.serving import Heard, Serving, apart, spans_of
from palestra.rollouts.server.tools import ToolCall, ToolText
from palestra.types import ROLES, Completion, StopReason

FINISH = {
    StopReason.EOS: "stop",
    StopReason.STOP: "stop",
    StopReason.LENGTH: "length",
    StopReason.CONTEXT: "length",
    StopReason.ABORTED: "abort",
}
"""`StopReason` in OpenAI's words; ``abort``, which only pausing and sleeping cause, is vLLM's."""
_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
_DROPPED = ("refusal", "annotations", "audio", "function_call")
"""What OpenAI's answers hold beside the message, empty here: it comes back with the next request."""


async def chat_completions(serving: Serving, request: web.Request) -> web.StreamResponse:
    """Answer one request."""
    raw = await request.read()
    body = parsed(ChatBody, read_body(raw))
    if serving.renderer is None:
        raise Refusal(
            400, f"{serving.model} has no chat template", next_command="POST /v1/completions with a prompt"
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise Refusal(400, "top_logprobs without logprobs", param="top_logprobs", expected="logprobs: true")
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or () if body.tool_choice != "none"]
    messages = [_message(message, f"messages.{i}") for i, message in enumerate(body.messages)]
    render = partial(serving.renderer.render, messages, tools or None)
    prompt = tuple(await apart(len(raw), render))
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    asked = serving.requests(prompt, body, most)
    reply = _Reply(serving, body, prompt, tuple(tool["function"]["name"] for tool in tools))
    if body.stream:
        return await send_events(request, reply.events(asked), serving.stalled_s)
    return web.json_response(reply.whole(await serving.completions(asked)))


class _Reply:
    """One request's answer, whole or in pieces."""

    def __init__(
        self, serving: Serving, body: ChatBody, prompt: tuple[int, ...], tool_names: tuple[str, ...]
    ) -> None:
        self._serving = serving
        self._body = body
        self._prompt = prompt
        self._tool_names = tool_names
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model or serving.model,
        }

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        ids = {"prompt_token_ids": list(self._prompt)} if self._body.return_token_ids else {}
        usage = usage_of(len(self._prompt), completions)
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage, **ids}

    async def events(self, asked: list[GenerateRequest]) -> Events:
        """The answer's chunks, each choice's in order."""
        texts = [_MessageText(self._serving, self._body, self._tool_names) for _ in asked]
        done: list[Completion] = []
        begun = False
        async with aclosing(self._serving.heard(asked)) as heard:
            async for index, item in heard:
                for first in range(0 if begun else len(asked)):
                    yield self._chunk(first, {"role": "assistant", "content": ""}, first=True)
                begun = True
                if isinstance(item, Heard):
                    text = texts[index].push(item.token)
                    if text or self._body.logprobs or self._body.return_token_ids:
                        yield self._chunk(index, {"content": text}, (item,))
                    continue
                done.append(item)
                text, calls = texts[index].finish(item.stop_reason)
                delta: dict[str, Any] = {"content": text} if text else {}
                if calls:
                    delta["tool_calls"] = [{"index": i, **_call_json(call)} for i, call in enumerate(calls)]
                yield self._chunk(index, delta, (), item, finish="tool_calls" if calls else "")
        if self._body.usage_in_stream:
            yield {
                **self._head,
                "object": "chat.completion.chunk",
                "choices": [],
                "usage": usage_of(len(self._prompt), done),
            }

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        text = _MessageText(self._serving, self._body, self._tool_names)
        content = "".join(map(text.push, completion.token_ids))
        rest, calls = text.finish(completion.stop_reason)
        content += rest
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": [_call_json(call) for call in calls]}
        heard = tuple(map(Heard, completion.token_ids, completion.logprobs, completion.versions))
        return {
            "index": index,
            "message": message,
            "finish_reason": "tool_calls" if calls else FINISH[completion.stop_reason],
            "logprobs": self._logprobs(heard),
            "version_spans": spans_of(completion.versions),
            **({"token_ids": list(completion.token_ids)} if self._body.return_token_ids else {}),
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        heard: tuple[Heard, ...] = (),
        completion: Completion | None = None,
        *,
        finish: str = "",
        first: bool = False,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": None}
        choice["logprobs"] = self._logprobs(heard) if heard else None
        if completion is not None:
            choice["finish_reason"] = finish or FINISH[completion.stop_reason]
            choice["version_spans"] = spans_of(completion.versions)
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        if self._body.return_token_ids:
            choice["token_ids"] = [item.token for item in heard]
            if first and index == 0:
                chunk["prompt_token_ids"] = list(self._prompt)
        if self._body.usage_in_stream:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, heard: tuple[Heard, ...]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        rows: list[dict[str, Any]] = []
        for item in heard:
            data = self._serving.tokenizer.token_bytes(item.token)
            text = data.decode("utf-8", "replace")
            rows.append({"token": text, "logprob": item.logprob, "bytes": list(data), "top_logprobs": []})
        return {"content": rows, "refusal": None}


class _MessageText:
    """From tokens to what a message says, and the tools it calls."""

    def __init__(self, serving: Serving, body: ChatBody, tool_names: tuple[str, ...]) -> None:
        self._pieces = serving.pieces(body.stops)
        self._tools = ToolText(tool_names)

    def push(self, token: int) -> str:
        return self._tools.push(self._pieces.push(token))

    def finish(self, reason: StopReason) -> tuple[str, tuple[ToolCall, ...]]:
        text = self._tools.push(self._pieces.finish(reason))
        rest, calls = self._tools.finish()
        return text + rest, calls


def usage_of(prompt_tokens: int, completions: list[Completion]) -> dict[str, int]:
    """OpenAI's ``usage``; a prompt counts once, however many samples follow it."""
    sampled = sum(len(completion.token_ids) for completion in completions)
    total = prompt_tokens + sampled
    return {"prompt_tokens": prompt_tokens, "completion_tokens": sampled, "total_tokens": total}


def _call_json(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _message(given: dict[str, Any], where: str) -> dict[str, Any]:
    """One message as templates expect it: text content, tool arguments as objects."""
    for key, value in given.items():
        if key not in _FIELDS and not (key in _DROPPED and not value):
            raise Refusal(
                400, f"{where} holds {key[:100]!r}", param=where, expected=f"of {', '.join(_FIELDS)}"
            )
    role = "system" if given.get("role") == "developer" else given.get("role")
    if role not in ROLES:
        raise Refusal(
            400, f"{where} has the role {str(role)[:100]!r}", param=f"{where}.role",
            expected=f"one of {', '.join(ROLES)}, developer",
        )  # fmt: skip
    message = {key: value for key, value in given.items() if key in _FIELDS and value is not None}
    calls = _calls(given.get("tool_calls") or [], where)
    content = _content(given.get("content"), where, may_lack=bool(calls))
    return message | {"role": role, "content": content} | ({"tool_calls": calls} if calls else {})


def _content(content: Any, where: str, *, may_lack: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_lack:
        return ""
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise Refusal(
            400, f"the content of {where} is not text", param=f"{where}.content",
            expected="a string, or a list of parts of type text",
        )  # fmt: skip
    return "".join(map(str, texts))


def _calls(given: Any, where: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for call in given if isinstance(given, list) else [given]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refusal(
                400, f"a tool call of {where} names no function", param=f"{where}.tool_calls",
                expected='{"type": "function", "function": {"name", "arguments"}}',
            )  # fmt: skip
        arguments = _arguments(function.get("arguments"))
        found.append({**dict(call), "function": {**function, "arguments": arguments}})
    return found


def _arguments(given: Any) -> Any:
    """Templates write arguments as JSON themselves; what is no JSON stays the text that it is."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return given
