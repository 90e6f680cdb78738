"""Whatever a client sends, it is answered or refused, and never is the fault the server's."""

from __future__ import annotations

import asyncio
import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.fake_engine import FakeEngine
from helpers.templates import make_tokenizer
from palestra.errors import (
    ChatError,
    EngineError,
    ModelSourceError,
    PalestraError,
    TrainerError,
    WeightsError,
)
from palestra.models.tokenizer import Tokenizer
from palestra.rollouts.base import EngineDead, RequestRefused, VersionNotReady
from palestra.rollouts.server.app import GET, POST
from palestra.rollouts.server.errors import Refusal, answer_to
from palestra.rollouts.server.schema import ChatBody, CompletionBody, GenerateBody, bias_of, parsed, read_body
from palestra.rollouts.server.serving import seeds_of, spans_of
from palestra.rollouts.server.tools import ToolCall, parse_calls
from rollouts.server_support import MODEL, eventually, raw_request, served

USER: Any = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
FIELDS = sorted({*ChatBody.model_fields, *CompletionBody.model_fields, *GenerateBody.model_fields})
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["user", "assistant", "tool", "function", "auto", "text", MODEL]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "name", "type", "function", "text", "tool_calls", "1", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
GOOD: dict[str, Any] = {"messages": USER, "prompt": "ab", "prompt_ids": [1, 2], "token_ids": [1, 2]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("fuzz"))


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_any_json_is_answered_or_refused_with_the_field_named(
    data: st.DataObject, tokenizer: Tokenizer
) -> None:
    engine = FakeEngine(lambda _: "fine", tokenizer)
    async with served(engine, tokenizer) as server:
        for _ in range(15):
            path = data.draw(st.sampled_from(sorted(POST)))
            need = {CHAT: "messages", "/v1/completions": "prompt", "/v1/palestra/generate": "prompt_ids"}
            body = {need[path]: GOOD[need[path]]} if path in need and data.draw(st.booleans()) else {}
            body |= data.draw(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3))
            async with server.http.post(server.url + path, json=body) as response:
                text = await response.text()
            assert response.status in (200, 400, 404, 501), (path, body, text)
            if response.status != 200:
                error = json.loads(text)["error"]
                assert error["message"]
                assert set(error) == {"message", "type", "param", "code", "status"}
        assert (engine.running, server.serving.live) == (0, 0)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_json_object_or_a_refusal(raw: bytes) -> None:
    try:
        found: Any = read_body(raw)
    except Refusal as refusal:
        found = refusal.status
    assert isinstance(found, dict) or found == 400


@given(VALUES, st.lists(st.sampled_from(["a", "b", "\u00e9"]), max_size=3))
def test_half_a_character_is_found_wherever_it_lies(value: Any, path: list[str]) -> None:
    hidden: Any = "x\udcff"
    for key in reversed(path):
        hidden = {key: hidden} if len(path) % 2 else [value, hidden]
    raw = json.dumps({"field": hidden}).encode()
    with pytest.raises(Refusal, match="holds half a character") as caught:
        read_body(raw)
    assert caught.value.param.startswith("field")


# -- the pure parts


@given(
    st.dictionaries(st.text(max_size=5), VALUES, max_size=3),
    st.sampled_from(["hermes", "hermes twice", "llama"]),
    st.booleans(),
)
def test_any_arguments_survive_being_written_as_a_call(
    arguments: dict[str, Any], style: str, escaped: bool
) -> None:
    if style == "llama":
        text = json.dumps({"name": "f", "parameters": arguments}, ensure_ascii=escaped)
    else:
        call = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=escaped)
        text = f"<tool_call>\n{call}\n</tool_call>" * (2 if style == "hermes twice" else 1)
    rest, calls = parse_calls(text, {"f"})
    assert rest == ""
    assert {call.name for call in calls} == {"f"}
    assert all(json.loads(call.arguments) == arguments for call in calls)
    assert parse_calls(text, {"g"}) == (text, ())


@given(st.text(max_size=40))
def test_any_text_keeps_all_that_is_no_call(text: str) -> None:
    rest, calls = parse_calls(text, {"f"})
    assert (rest, calls) == (text, ())
    whole = f'<tool_call>{{"name": "f", "arguments": {{}}}}</tool_call>{text}'
    rest, calls = parse_calls(whole, {"f"})
    if "<tool_call>" not in text:
        assert calls == (ToolCall("f", "{}"),)
        assert rest == (text if text.strip() else "")


@given(st.integers(), st.integers(1, 50))
def test_seeds_begin_with_the_requests_and_do_not_repeat(seed: int, count: int) -> None:
    seeds = seeds_of(seed, count)
    assert seeds[0] == seed
    assert len(set(seeds)) == count
    assert seeds_of(seed, count + 1)[:count] == seeds
    assert seeds_of(None, 1) != seeds_of(None, 1)


@given(st.lists(st.integers(0, 3), max_size=30))
def test_spans_cover_every_token_once_and_in_order(versions: list[int]) -> None:
    spans = spans_of(versions)
    assert [v for v, start, end in spans for _ in range(start, end)] == versions
    assert all(a[0] != b[0] and a[2] == b[1] for a, b in pairwise(spans))


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Refusal(418, "no", code="tea"), 418, "tea"),
        (VersionNotReady("later"), 409, "version_not_ready"),
        (EngineDead("gone"), 503, "engine_dead"),
        (RequestRefused("the prompt is empty"), 400, None),
        (EngineError("the model's logits are not finite"), 500, None),
        (EngineError("scoring raised ValueError", detail="Traceback"), 500, None),
        (EngineDead("the decode thread raised", detail="Traceback"), 503, "engine_dead"),
        (ChatError("refused"), 400, None),
        (WeightsError("other bytes"), 400, None),
        (ModelSourceError("no folder"), 400, None),
        (TrainerError("out of place"), 500, None),
    ],
)
def test_each_failure_has_the_status_of_whose_it_is(
    error: PalestraError, status: int, code: str | None
) -> None:
    answer = answer_to(error)
    assert (answer.status, answer.body["error"]["code"]) == (status, code)
    assert ("Retry-After" in answer.response().headers) == (status in (409, 503))
    assert "Traceback" not in json.dumps(answer.body)


def test_every_part_of_an_error_is_in_its_message() -> None:
    error = EngineError("what", where="a file", expected="this", nearest="that", next_command="do it")
    message = answer_to(error).body["error"]["message"]
    assert message == "what; expected: this; nearest: that; next: do it"


def test_a_harmless_field_is_taken_whatever_it_holds_and_no_other_is() -> None:
    body = {"messages": USER, "user": {"any": "thing"}, "metadata": None, "store": True}
    assert parsed(ChatBody, body).messages == USER
    with pytest.raises(Refusal, match="there is no field 'functions'"):
        parsed(ChatBody, body | {"functions": []})


@pytest.mark.parametrize("key", ["-1", "1.0", " 1", "", "²", "1" * 30])
def test_a_bias_is_of_a_token_id(key: str) -> None:
    with pytest.raises(Refusal, match="expected: token ids"):
        bias_of({key: 1.0})


# -- the wire


async def test_a_bomb_of_zeros_is_refused_by_its_size_when_unpacked(tokenizer: Tokenizer) -> None:
    async with served(FakeEngine([], tokenizer), tokenizer, max_body_bytes=100_000) as server:
        packed = gzip.compress(b" " * 50_000_000)
        assert len(packed) < 100_000
        status, _ = await server.post(CHAT, packed, headers={"Content-Encoding": "gzip"})
        assert status == 413
        small = gzip.compress(json.dumps({"messages": USER, "oops": 1}).encode())
        status, answer = await server.post(CHAT, small, headers={"Content-Encoding": "gzip"})
        assert (status, answer["error"]["param"]) == (400, "oops")


async def test_requests_one_after_the_other_on_one_connection_are_answered_in_order(
    tokenizer: Tokenizer,
) -> None:
    engine = FakeEngine(lambda ids: "ab"[ids[0] - 97], tokenizer)
    async with served(engine, tokenizer) as server:
        reader, writer = await raw_request(server.port, "/v1/completions", {"prompt": "a"})
        data = json.dumps({"prompt": "b"}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
        answers = (await reader.read()).decode()
        writer.close()
    assert answers.count("HTTP/1.1 200 OK") == 2
    assert 0 < answers.index('"text": "a"') < answers.index('"text": "b"')


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",  # a TLS greeting
        b"GET /health HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: -5\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: {host}\r\n\r\n",
    ],
    ids=["tls", "no host", "no chunks", "negative length", "endless path"],
)
async def test_what_is_no_http_ends_its_own_connection_only(raw: bytes, tokenizer: Tokenizer) -> None:
    async with served(FakeEngine(lambda _: "a", tokenizer), tokenizer) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(raw.replace(b"{host}", f"127.0.0.1:{server.port}".encode()))
        writer.write_eof()
        answer = await reader.read()
        assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))
        writer.close()
        assert (await server.post(CHAT, {"messages": USER}))[0] == 200


async def test_a_body_cut_short_is_no_fault_of_the_server(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(FakeEngine(lambda _: "a", tokenizer), tokenizer) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: 500\r\n\r\n{{"
        writer.write(head.encode())
        await writer.drain()
        writer.transport.abort()
        assert (await server.post(CHAT, {"messages": USER}))[0] == 200
        await eventually(lambda: server.serving.live == 0)
    assert "a request failed" not in caplog.text


def test_every_route_that_the_page_lists_is_there_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    section = page.partition("## Routes")[2].partition("\nFields beyond")[0]
    for route in {*GET, *POST} - {"/v1/models/{name:.+}"}:
        last = route.removeprefix("/v1/palestra/")
        assert f"`{last}`" in section or f"{route}`" in section, route
