"""Bad input, bad clients and too many of them: a clear refusal, nothing left behind, the server goes on."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import openai
import pytest

from helpers.fake_engine import HANG, Fail, FakeEngine
from helpers.templates import NO_SYSTEM, make_tokenizer
from palestra.models.tokenizer import Tokenizer
from palestra.rollouts.base import EngineDead, RequestRefused, VersionNotReady
from rollouts.server_support import MODEL, WEATHER, StepEngine, eventually, raw_request, served

USER: Any = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/v1/palestra/generate"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return make_tokenizer(tmp_path / "tokenizer")


def answering(tokenizer: Tokenizer) -> StepEngine:
    return StepEngine(lambda _: "fine", tokenizer)


# -- bodies


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (CHAT, {"messages": USER, "temprature": 1}, "temprature", "nearest: temperature"),
        (CHAT, {"messages": USER, "best_of": 2}, "best_of", "there is no field 'best_of'"),
        (CHAT, {"messages": USER, "temperature": "1"}, "temperature", "valid number"),
        (CHAT, {"messages": USER, "temperature": -1}, "temperature", "greater than or equal to 0"),
        (CHAT, {"messages": USER, "top_p": 0}, "top_p", "greater than 0"),
        (CHAT, {"messages": USER, "n": 0}, "n", "greater than or equal to 1"),
        (CHAT, {"messages": USER, "n": 100000}, "n", "less than or equal to 128"),
        (CHAT, {"messages": USER, "n": True}, "n", "valid integer"),
        (CHAT, {"messages": USER, "max_tokens": 0}, None, "max_new_tokens must be >= 1"),
        (CHAT, {"messages": USER, "max_tokens": 3, "min_tokens": 4}, None, "min_new_tokens must be in"),
        (CHAT, {"messages": USER, "stop": ""}, "stop", "a stop string is empty"),
        (CHAT, {"messages": USER, "stop": ["a", 3]}, "stop.1", "valid string"),
        (CHAT, {"messages": USER, "stop": "x" * 2000}, "stop", "at most 1024 characters"),
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 5}, "top_logprobs", "less than"),
        (CHAT, {"messages": USER, "top_logprobs": 0}, "top_logprobs", "top_logprobs without logprobs"),
        (CHAT, {"messages": USER, "presence_penalty": 0.5}, "presence_penalty", "less than or equal to 0"),
        (CHAT, {"messages": USER, "logit_bias": {"x": 1}}, "logit_bias", "names 'x'; expected: token ids"),
        (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice", "'auto' or 'none'"),
        (CHAT, {"messages": USER, "parallel_tool_calls": False}, "parallel_tool_calls", "True"),
        (CHAT, {"messages": USER, "response_format": {"type": "json"}}, "response_format.type", "'text'"),
        (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools", "tools.0.function is missing"),
        (CHAT, {"messages": USER, "stream_options": {"use": True}}, "stream_options.use", "not permitted"),
        (CHAT, {"messages": []}, "messages", "at least 1 item"),
        (CHAT, {}, "messages", "messages is missing"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "the role 'robot'"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content", "is not text"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content",
         "parts of type text"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages.0", "holds 'mood'"),
        (CHAT, {"messages": [*USER, {"role": "assistant", "tool_calls": [3]}]}, "messages.1.tool_calls",
         "names no function"),
        (CHAT, {"messages": [*USER, {"role": "assistant", "content": "x"}]}, None, "the assistant's own"),
        (COMPLETIONS, {"prompt": []}, "prompt", "0 prompts"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "prompt 0 is empty"),
        (COMPLETIONS, {"prompt": ["a", 3]}, "prompt", "prompt 1 is neither text nor token ids"),
        (COMPLETIONS, {"prompt": [[1, -2]]}, "prompt", "prompt 0 is neither"),
        (COMPLETIONS, {"prompt": [1, 99999]}, "prompt", "token 99999 is outside the vocabulary"),
        (COMPLETIONS, {"prompt": [True, False]}, "prompt", "neither text nor token ids"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix", "there is no field 'suffix'"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 3}, "logprobs", "less than or equal to 0"),
        (GENERATE, {"prompt_ids": [1.5]}, "prompt_ids.0", "valid integer"),
        (GENERATE, {"prompt_ids": []}, None, "the prompt is empty"),
        (GENERATE, {"prompt_ids": [1], "sampling": {"tempo": 1}}, "sampling.tempo", "not permitted"),
        ("/v1/palestra/score", {"token_ids": []}, "token_ids", "at least 1 item"),
    ],
)  # fmt: skip
async def test_a_field_that_is_wrong_is_named_in_a_400(
    path: str, body: Any, param: str | None, said: str, tokenizer: Tokenizer
) -> None:
    async with served(answering(tokenizer), tokenizer) as server:
        status, answer = await server.post(path, body)
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert said in answer["error"]["message"]
        assert answer["error"]["type"] == "invalid_request_error"
        assert (await server.post(CHAT, {"messages": USER}))[0] == 200


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"messages": [], "temperature": NaN}', "NaN is not a JSON number"),
        (b'{"messages": [], "temperature": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"messages": "\xff"}', "not valid UTF-8"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', "temperature"),
        (b'{"messages": [{"role": "user", "content": "x"}], "seed": 1' + b"0" * 5000 + b"}", "JSON"),
        (b'{"messages": ' + b"[" * 200_000, "not valid JSON"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stop": "\\ud800"}', "stop holds half"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stop": ["a", "\\udfff"]}', "stop.1 holds half"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "messages.0.content holds half"),
        (b'{"messages": [{"role": "user", "content": "x"}], "\\ud800": 1}', "holds half a character"),
    ],
)  # fmt: skip
async def test_what_is_no_strict_json_is_refused(raw: bytes, said: str, tokenizer: Tokenizer) -> None:
    """Invalid UTF-8 and halves of characters must not reach a stop string's search."""
    async with served(answering(tokenizer), tokenizer) as server:
        status, answer = await server.post(CHAT, raw)
        assert status == 400
        assert said in answer["error"]["message"]
        status, answer = await server.post(CHAT, {"messages": USER, "stop": "😀"})
        assert status == 200


async def test_a_body_over_the_limit_is_refused_and_not_read_to_its_end(tokenizer: Tokenizer) -> None:
    async with served(answering(tokenizer), tokenizer, max_body_bytes=1000) as server:
        status, answer = await server.post(CHAT, b"x" * 5000)
    assert status == 413
    assert "at most 1000 bytes" in answer["error"]["message"]


async def test_the_body_of_another_route_or_method_is_answered_with_the_nearest(tokenizer: Tokenizer) -> None:
    async with served(answering(tokenizer), tokenizer) as server:
        status, answer = await server.post("/v1/chat/completion", {})
        assert (status, answer["error"]["code"]) == (404, "unknown_route")
        assert "nearest: /v1/chat/completions" in answer["error"]["message"]
        status, text = await server.get(CHAT)
        assert status == 405
        assert "expected: POST" in json.loads(text)["error"]["message"]


async def test_a_template_that_refuses_a_chat_is_the_clients_400(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, NO_SYSTEM)
    async with served(answering(tokenizer), tokenizer) as server:
        status, answer = await server.post(CHAT, {"messages": [{"role": "system", "content": "x"}, *USER]})
    assert status == 400
    assert "System role not supported" in answer["error"]["message"]


async def test_a_model_without_a_template_completes_and_does_not_chat(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, None)
    async with served(answering(tokenizer), tokenizer) as server:
        status, answer = await server.post(CHAT, {"messages": USER})
        assert status == 400
        assert "has no chat template" in answer["error"]["message"]
        assert (await server.post(COMPLETIONS, {"prompt": "a"}))[0] == 200


# -- what the engine says


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (VersionNotReady("serves a@1", expected="version 2"), openai.ConflictError, "version_not_ready"),
        (EngineDead("the process is gone"), openai.InternalServerError, "engine_dead"),
        (RequestRefused("the prompt has 9 tokens and the context is 8"), openai.BadRequestError, None),
        (ValueError("a fault of ours"), openai.InternalServerError, None),
    ],
)  # fmt: skip
async def test_a_failure_before_the_first_token_has_its_status_also_in_a_stream(
    stream: bool, error: Exception, kind: type[openai.APIStatusError], code: str | None, tokenizer: Tokenizer
) -> None:
    engine = FakeEngine([Fail(error)], tokenizer)
    async with served(engine, tokenizer) as server:
        with pytest.raises(kind) as caught:
            await server.openai.chat.completions.create(model=MODEL, messages=USER, stream=stream)
        assert caught.value.code == code
        assert str(error).splitlines()[0] in caught.value.message
        assert ("Retry-After" in caught.value.response.headers) == (caught.value.status_code in (409, 503))
        health, _ = await server.get("/health")
        assert health == (503 if isinstance(error, EngineDead) else 200)


async def test_a_failure_within_a_stream_is_an_event_and_no_end(tokenizer: Tokenizer) -> None:
    class Breaks(StepEngine):
        async def generate(self, request: Any, on_token: Any = None) -> Any:
            await super().generate(request, on_token)
            raise EngineDead("killed half-way")

    async with served(Breaks(lambda _: "abc", tokenizer), tokenizer) as server:
        events = await server.events(CHAT, {"messages": USER, "stream": True})
        assert events[-1]["error"]["status"] == 503
        assert "killed half-way" in events[-1]["error"]["message"]
        assert len(events) > 3
        _, health = await server.get("/health")
        assert "the engine is gone: killed half-way" in health
        server.engine.__class__ = StepEngine  # another replica took its place
        assert (await server.post(CHAT, {"messages": USER}))[0] == 200
        assert (await server.get("/health"))[0] == 200


async def test_one_sample_that_fails_ends_the_others(tokenizer: Tokenizer) -> None:
    engine = FakeEngine([HANG, Fail("no"), HANG], tokenizer)
    async with served(engine, tokenizer) as server:
        assert (await server.post(CHAT, {"messages": USER, "n": 3}))[0] == 500
        assert (engine.running, server.serving.live) == (0, 0)


async def test_an_unknown_model_is_a_404_with_the_nearest(tokenizer: Tokenizer) -> None:
    async with served(answering(tokenizer), tokenizer) as server:
        with pytest.raises(openai.NotFoundError, match="nearest: tiny-model") as caught:
            await server.openai.chat.completions.create(model="tiny-modle", messages=USER)
        assert caught.value.code == "model_not_found"
        assert [model.id async for model in server.openai.models.list()] == [MODEL]
        with pytest.raises(openai.NotFoundError):
            await server.openai.models.retrieve("gpt-4")


async def test_an_engine_without_weights_is_unavailable_and_says_what_is_missing(
    tokenizer: Tokenizer,
) -> None:
    engine = answering(tokenizer)
    engine._version = None
    async with served(engine, tokenizer) as server:
        assert (await server.get("/health"))[0] == 503
        status, answer = await server.post(CHAT, {"messages": USER})
        assert (status, answer["error"]["code"]) == (503, "not_ready")


# -- clients


@pytest.mark.parametrize("body", [{"stream": True}, {"stream": False}, {"stream": True, "n": 5}])
async def test_a_client_that_goes_away_ends_its_completions_at_once(
    body: dict[str, Any], tokenizer: Tokenizer
) -> None:
    engine = StepEngine(lambda _: "and so on ", tokenizer, endless=True)
    async with served(engine, tokenizer) as server:
        reader, writer = await raw_request(server.port, CHAT, {"messages": USER, **body})
        await engine.first.wait()
        if body["stream"]:
            assert b"200 OK" in await reader.readline()
        assert engine.running == body.get("n", 1)
        writer.transport.abort()
        await eventually(lambda: engine.running + server.serving.live == 0)
        assert engine.cancelled == body.get("n", 1)
        engine.endless = False
        assert (await server.post(CHAT, {"messages": USER}))[0] == 200


async def test_a_client_that_closes_before_its_turn_leaves_nothing_in_the_queue(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda _: HANG, tokenizer)
    async with served(engine, tokenizer) as server:
        writers = [(await raw_request(server.port, GENERATE, {"prompt_ids": [1]}))[1] for _ in range(50)]
        await eventually(lambda: engine.running == 50)
        for writer in writers:
            writer.close()
        await eventually(lambda: engine.running + server.serving.live == 0)


async def test_a_reader_that_takes_nothing_is_cut_off_and_disturbs_nobody(tokenizer: Tokenizer) -> None:
    engine = StepEngine(lambda _: "x" * 3000, tokenizer, endless=True)
    async with served(engine, tokenizer, stalled_s=0.2) as server:
        stuck = socket.socket()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", server.port))
        data = json.dumps({"messages": USER, "stream": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: {len(data)}\r\n\r\n"
        stuck.sendall(head.encode() + data)
        await engine.first.wait()
        await eventually(lambda: engine.running + server.serving.live == 0, tries=4000)
        engine.endless = False
        assert (await server.post(CHAT, {"messages": USER}))[0] == 200
        stuck.close()


async def test_a_slow_reader_still_gets_every_event(tokenizer: Tokenizer) -> None:
    engine = StepEngine(["y" * 2000], tokenizer)
    async with served(engine, tokenizer) as server:
        reader, writer = await raw_request(server.port, CHAT, {"messages": USER, "stream": True})
        received = b""
        while b"[DONE]" not in received:
            received += await reader.read(700)
            await asyncio.sleep(0)
        writer.close()
    assert received.count(b'"content": "y"') == 1024  # as many as a chat may take that does not say


async def test_ten_thousand_queued_completions_are_all_answered_or_refused(tokenizer: Tokenizer) -> None:
    """Past the limit a request is told to come later; what was taken is answered (issue: 10,000 requests)."""
    gate = asyncio.Event()

    class Gated(FakeEngine):
        async def generate(self, request: Any, on_token: Any = None) -> Any:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            await gate.wait()
            self.running -= 1
            return await super().generate(request, on_token)

    engine = Gated(lambda _: "a", tokenizer)
    async with served(engine, tokenizer, max_waiting=9000) as server:
        body = {"prompt": "p", "n": 100, "max_tokens": 2}
        tasks = [asyncio.create_task(server.post(COMPLETIONS, body)) for _ in range(100)]
        await eventually(lambda: sum(task.done() for task in tasks) == 10)
        assert engine.most_running == server.serving.live == 9000
        gate.set()
        answers = await asyncio.gather(*tasks)
        assert sorted(status for status, _ in answers) == [200] * 90 + [429] * 10
        assert all(len(a["choices"]) == 100 for status, a in answers if status == 200)
        assert server.serving.live == 0
        assert (await server.post(COMPLETIONS, body))[0] == 200


async def test_hundreds_of_connections_beyond_the_limit_are_each_answered(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda _: "a", tokenizer, delay_s=0.05)
    async with served(engine, tokenizer, max_waiting=300) as server:
        answers = await asyncio.gather(*(server.post(GENERATE, {"prompt_ids": [1]}) for _ in range(500)))
    counted = [status for status, _ in answers]
    assert set(counted) <= {200, 429}
    assert counted.count(200) >= 300
    refused = next((answer for status, answer in answers if status == 429), None)
    assert refused is None or "the same request, later" in refused["error"]["message"]
    assert engine.running == 0


async def test_the_tools_of_a_request_do_not_stay_for_the_next(tokenizer: Tokenizer) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    async with served(StepEngine(lambda _: call, tokenizer), tokenizer) as server:
        _, first = await server.post(CHAT, {"messages": USER, "tools": [WEATHER]})
        _, second = await server.post(CHAT, {"messages": USER})
    assert first["choices"][0]["finish_reason"] == "tool_calls"
    assert second["choices"][0]["message"]["content"] == call
