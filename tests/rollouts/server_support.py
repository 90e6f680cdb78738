"""A server under test: one engine, one port, the byte tokenizer, and clients of every kind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from openai import AsyncOpenAI
from safetensors.torch import save_file
from torch import Tensor

from helpers.fake_engine import FakeEngine
from helpers.templates import make_tokenizer
from helpers.tiny_lora import make_lora
from palestra.cli.served_model import build_renderer
from palestra.models.tokenizer import Tokenizer
from palestra.rollouts.base import Engine, EngineStats, GenerateRequest, OnToken
from palestra.rollouts.server.app import SERVING, build_app, run_app
from palestra.rollouts.server.serving import Serving
from palestra.types import Completion

MODEL = "tiny-model"
TOOLS = """\
{%- if tools %}{{- 'tools: ' + (tools | tojson) + '\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] }}
{%- for call in message.tool_calls or [] %}{{- '<call ' + call.function.name + ' '
 + (call.function.arguments | tojson) + '>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@dataclass
class Served:
    """One running server."""

    engine: Any
    tokenizer: Tokenizer
    serving: Serving
    port: int
    http: aiohttp.ClientSession
    openai: AsyncOpenAI

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        """Status and JSON of the answer; ``body`` may be raw bytes."""
        sent = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.http.post(self.url + path, **sent, **options) as response:
            return response.status, await response.json()

    async def get(self, path: str, **options: Any) -> tuple[int, str]:
        async with self.http.get(self.url + path, **options) as response:
            return response.status, await response.text()

    async def events(self, path: str, body: Any) -> list[Any]:
        """Every event of a stream; the last is "[DONE]" where it ended well."""
        async with self.http.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            lines = (await response.text()).split("\n\n")
        data = [line.removeprefix("data: ") for line in lines if line]
        return [part if part == "[DONE]" else json.loads(part) for part in data]


@asynccontextmanager
async def served(
    engine: Engine, tokenizer: Tokenizer, *, template: str = "auto", key: str = "none", **options: Any
) -> AsyncIterator[Served]:
    """``engine`` behind a port of its own for as long as the block runs."""
    app = build_app(engine, tokenizer, build_renderer(tokenizer, template), MODEL, **options)
    runner, port = await run_app(app, "127.0.0.1", 0, grace_s=0.1)
    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=30)
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http, client:
            yield Served(engine, tokenizer, app[SERVING], port, http, client)
    finally:
        await runner.cleanup()
        await engine.close()


class StepEngine(FakeEngine):
    """Tells its tokens one at a time, an iteration of the event loop apart; ``endless`` never ends."""

    def __init__(self, *args: Any, endless: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.endless = endless
        self.told = 0
        self.first = asyncio.Event()

    async def generate(self, request: GenerateRequest, on_token: OnToken | None = None) -> Completion:
        completion = await super().generate(request)
        self.running += 1
        try:
            while True:
                for row in zip(completion.token_ids, completion.logprobs, completion.versions, strict=True):
                    if on_token is not None:
                        on_token(*row)
                    self.told += 1
                    self.first.set()
                    await asyncio.sleep(0)
                if not self.endless:
                    return completion
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


class CountingEngine(FakeEngine):
    """Says how many run as an engine would."""

    def stats(self) -> EngineStats:
        return EngineStats(11, 22, self.running, 3, 4.5, 6)


async def eventually(condition: Any, tries: int = 2000) -> None:
    """Return once ``condition()`` holds; fail after many iterations of the event loop."""
    for _ in range(tries):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to be")


async def raw_request(port: int, path: str, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send one request over a socket of its own and read nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


def save_adapter(folder: Path, model: Mapping[str, Tensor]) -> Path:
    """A random LoRA adapter of ``model`` as PEFT saves it."""
    config, tensors = make_lora(model)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def tools_tokenizer(folder: Path) -> Tokenizer:
    return make_tokenizer(folder, TOOLS)
