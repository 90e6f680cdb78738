"""The server as OpenAI's own client meets it, over a scripted engine and over a real tiny one."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from helpers.fake_engine import Abort, FakeEngine, Say
from helpers.templates import make_tokenizer
from palestra.models.tokenizer import Tokenizer
from palestra.rollouts.base import GenerateRequest
from palestra.types import SamplingParams, StopReason
from rollouts.conftest import Start
from rollouts.server_support import MODEL, WEATHER, Served, StepEngine, served, tools_tokenizer
from rollouts.support import Tiny

USER: Any = [{"role": "user", "content": "Hi"}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return make_tokenizer(tmp_path / "tokenizer")


@pytest.fixture
async def real(tiny: Tiny, serve: Start) -> AsyncIterator[Served]:
    async with served(await serve(), Tokenizer.from_folder(tiny.folder)) as server:
        yield server


def says(tokenizer: Tokenizer, *answers: Any) -> StepEngine:
    return StepEngine(list(answers), tokenizer)


# -- chat


async def test_a_chat_is_rendered_by_the_models_template_and_answered(tokenizer: Tokenizer) -> None:
    engine = says(tokenizer, "Grüß dich 😀")
    async with served(engine, tokenizer) as server:
        messages: Any = [{"role": "system", "content": "Be kind."}, *USER]
        answer = await server.openai.chat.completions.create(model=MODEL, messages=messages)
    prompt = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert engine.requests[0].prompt_ids == tuple(tokenizer.encode(prompt))
    assert engine.requests[0].sampling.max_new_tokens == 1024
    (choice,) = answer.choices
    assert choice.message.content == "Grüß dich 😀"
    assert (choice.finish_reason, choice.message.role) == ("stop", "assistant")
    assert answer.model == MODEL
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenizer.encode(prompt))
    assert answer.usage.completion_tokens == len("Grüß dich 😀".encode()) + 1


async def test_a_streamed_chat_is_the_chat_with_usage_at_its_end(tokenizer: Tokenizer) -> None:
    async with served(says(tokenizer, "Grüß dich 😀"), tokenizer) as server:
        stream = await server.openai.chat.completions.create(
            model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "Grüß dich 😀"
    assert len([text for text in texts if text]) == len("Grüß dich 😀")
    assert all("\ufffd" not in text for text in texts)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len("Grüß dich 😀".encode()) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("hi", "stop"),
        (Say("hi", StopReason.STOP), "stop"),
        (Say("hi", StopReason.LENGTH), "length"),
        (Say("hi", StopReason.CONTEXT), "length"),
        (Abort("hi"), "abort"),
        (Abort(""), "abort"),
    ],
)
async def test_why_an_answer_ended_is_said_alike_in_stream_and_whole(
    answer: Any, reason: str, tokenizer: Tokenizer
) -> None:
    async with served(says(tokenizer, answer, answer), tokenizer) as server:
        body = {"messages": USER}
        _, whole = await server.post("/v1/chat/completions", body)
        *chunks, done = await server.events("/v1/chat/completions", body | {"stream": True})
    assert whole["choices"][0]["finish_reason"] == reason
    assert chunks[-1]["choices"][0]["finish_reason"] == reason
    assert done == "[DONE]"
    assert whole["choices"][0]["version_spans"] == chunks[-1]["choices"][0]["version_spans"]


async def test_token_ids_logprobs_and_version_spans_are_those_of_the_engine(tokenizer: Tokenizer) -> None:
    """NeMo-RL and others decoded and encoded again, and trained on other tokens (trl#5224, case 13)."""
    async with served(says(tokenizer, "né", "né"), tokenizer) as server:
        body = {"messages": USER, "logprobs": True, "top_logprobs": 0, "return_token_ids": True}
        _, whole = await server.post("/v1/chat/completions", body)
        *chunks, _ = await server.events("/v1/chat/completions", body | {"stream": True})
    ids = [*tokenizer.encode("né"), tokenizer.eos_token_ids[0]]
    choice = whole["choices"][0]
    assert choice["token_ids"] == ids
    assert whole["prompt_token_ids"] == list(server.engine.requests[0].prompt_ids)
    assert choice["version_spans"] == [[0, 0, 4]]
    rows = choice["logprobs"]["content"]
    assert [row["logprob"] for row in rows] == [-0.5] * 4
    assert [row["bytes"] for row in rows][:3] == [[0x6E], [0xC3], [0xA9]]
    assert rows[0]["token"] == "n"
    parts = [chunk["choices"][0] for chunk in chunks]
    assert [token for part in parts for token in part["token_ids"]] == ids
    assert [row for part in parts if part["logprobs"] for row in part["logprobs"]["content"]] == rows
    assert [c["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c] == [whole["prompt_token_ids"]]


async def test_samples_have_seeds_of_their_own_that_follow_from_the_requests(tokenizer: Tokenizer) -> None:
    engine = StepEngine(lambda _: "ok", tokenizer)
    async with served(engine, tokenizer) as server:
        for seed in (7, 7, 8):
            answer = await server.openai.chat.completions.create(model=MODEL, messages=USER, n=3, seed=seed)
            assert [choice.index for choice in answer.choices] == [0, 1, 2]
        await server.openai.chat.completions.create(model=MODEL, messages=USER, n=2)
    seeds = [request.sampling.seed for request in engine.requests]
    assert seeds[0] == 7
    assert seeds[:3] == seeds[3:6]
    assert len({*seeds[:3], *seeds[6:]}) == 8


async def test_several_samples_stream_side_by_side(tokenizer: Tokenizer) -> None:
    async with served(says(tokenizer, "one", "two", "three"), tokenizer) as server:
        stream = await server.openai.chat.completions.create(model=MODEL, messages=USER, n=3, stream=True)
        texts, order = ["", "", ""], []
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                order.append(choice.index)
    assert sorted(texts) == ["one", "three", "two"]
    assert order != sorted(order)


async def test_every_setting_of_a_request_reaches_the_engine(tokenizer: Tokenizer) -> None:
    engine = says(tokenizer, "x")
    async with served(engine, tokenizer) as server:
        await server.openai.chat.completions.create(
            model=MODEL, messages=USER, max_completion_tokens=9, temperature=0.6, top_p=0.9, seed=5,
            stop=["\n", "END"], logit_bias={"65": -100, "66": 3}, user="me", metadata={"a": "b"}, store=False,
            extra_body={"top_k": 20, "min_tokens": 2, "session": "s", "min_version": 0, "exact_version": 0},
        )  # fmt: skip
    (request,) = engine.requests
    assert request.sampling == SamplingParams(9, 0.6, 0.9, 20, ("\n", "END"), (), 5)
    assert dict(request.logit_bias) == {65: -100.0, 66: 3.0}
    assert (request.min_new_tokens, request.session) == (2, "s")
    assert (request.min_version, request.exact_version) == (0, 0)


async def test_a_stop_string_across_tokens_is_cut_from_the_text_and_kept_in_the_tokens(
    tokenizer: Tokenizer,
) -> None:
    answer = Say("one\n\nUser: tw", StopReason.STOP)
    async with served(says(tokenizer, answer, answer), tokenizer) as server:
        body = {"messages": USER, "stop": "User: tw", "return_token_ids": True}
        _, whole = await server.post("/v1/chat/completions", body)
        *chunks, _ = await server.events("/v1/chat/completions", body | {"stream": True})
    assert whole["choices"][0]["message"]["content"] == "one\n\n"
    assert tokenizer.decode(whole["choices"][0]["token_ids"]) == "one\n\nUser: tw"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "one\n\n"


# -- tools


async def test_tools_are_shown_to_the_model_and_its_calls_come_back_parsed(tmp_path: Path) -> None:
    tokenizer = tools_tokenizer(tmp_path)
    engine = says(tokenizer, f"Let me look. {CALL}", "It is dry.")
    async with served(engine, tokenizer) as server:
        create = server.openai.chat.completions.create
        first = await create(model=MODEL, messages=USER, tools=[WEATHER], tool_choice="auto")
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert message.content == "Let me look. "
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert (call.type, call.function.name) == ("function", "weather")
        assert json.loads(call.function.arguments) == {"city": "Ulm"}
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "dry"}
        again: Any = message.model_dump()
        last = await create(model=MODEL, messages=[*USER, again, result], tools=[WEATHER])
    assert last.choices[0].message.content == "It is dry."
    shown = [tokenizer.decode(request.prompt_ids) for request in engine.requests]
    assert '"name": "weather"' in shown[0]
    assert '<call weather {"city": "Ulm"}>' in shown[1]
    assert "<|im_start|>tool\ndry<|im_end|>" in shown[1]


async def test_streamed_calls_arrive_whole_after_the_text_before_them(tmp_path: Path) -> None:
    tokenizer = tools_tokenizer(tmp_path)
    async with served(says(tokenizer, f"So: {CALL}{CALL}"), tokenizer) as server:
        stream = await server.openai.chat.completions.create(
            model=MODEL, messages=USER, tools=[WEATHER], stream=True
        )
        deltas = [chunk.choices[0] async for chunk in stream]
    assert "".join(d.delta.content or "" for d in deltas) == "So: "
    calls = [call for d in deltas for call in d.delta.tool_calls or []]
    assert [(c.index, c.function and c.function.name) for c in calls] == [(0, "weather"), (1, "weather")]
    assert deltas[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "text",
    ["<tool_call>{oops}</tool_call>", '{"name": "wether", "parameters": {}}', "<tool_call>" + "[" * 9000],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_malformed_call_is_content_and_never_an_error(
    text: str, stream: bool, tmp_path: Path
) -> None:
    tokenizer = tools_tokenizer(tmp_path)
    engine = StepEngine([text], tokenizer, context_tokens=10_000)
    async with served(engine, tokenizer, default_tokens=9_900) as server:
        body = {"messages": USER, "tools": [WEATHER], "stream": stream}
        if stream:
            *chunks, _ = await server.events("/v1/chat/completions", body)
            content = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
            reason = chunks[-1]["choices"][0]["finish_reason"]
        else:
            status, whole = await server.post("/v1/chat/completions", body)
            assert status == 200
            content, reason = whole["choices"][0]["message"]["content"], whole["choices"][0]["finish_reason"]
    assert (content, reason) == (text, "stop")


async def test_without_tools_or_with_choice_none_a_call_is_text(tmp_path: Path) -> None:
    tokenizer = tools_tokenizer(tmp_path)
    engine = says(tokenizer, CALL, CALL)
    async with served(engine, tokenizer) as server:
        create = server.openai.chat.completions.create
        plain = await create(model=MODEL, messages=USER)
        none = await create(model=MODEL, messages=USER, tools=[WEATHER], tool_choice="none")
    assert [a.choices[0].message.content for a in (plain, none)] == [CALL, CALL]
    assert all("tools:" not in tokenizer.decode(request.prompt_ids) for request in engine.requests)


# -- completions


@pytest.mark.parametrize("kind", ["text", "texts", "ids", "lists of ids"])
async def test_a_prompt_is_a_text_or_token_ids_or_several_of_either(kind: str, tokenizer: Tokenizer) -> None:
    engine = StepEngine(lambda ids: tokenizer.decode(ids).upper(), tokenizer)
    prompts: Any = {
        "text": "ab",
        "texts": ["ab", "cd"],
        "ids": [97, 98],
        "lists of ids": [[97, 98], [99, 100]],
    }
    async with served(engine, tokenizer) as server:
        answer = await server.openai.completions.create(model=MODEL, prompt=prompts[kind], n=2, max_tokens=9)
    texts = [choice.text for choice in answer.choices]
    assert texts == (["AB", "AB"] if kind in ("text", "ids") else ["AB", "AB", "CD", "CD"])
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(texts)


async def test_a_streamed_completion_with_echo_and_logprobs_is_the_whole_one(tokenizer: Tokenizer) -> None:
    engine = StepEngine(lambda _: "né!", tokenizer)
    async with served(engine, tokenizer) as server:
        body = {"prompt": ["ab", "c"], "echo": True, "logprobs": 0, "max_tokens": 9, "return_token_ids": True}
        _, whole = await server.post("/v1/completions", body)
        *chunks, _ = await server.events("/v1/completions", body | {"stream": True})
    for index, choice in enumerate(whole["choices"]):
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for column in ("tokens", "token_logprobs"):
            joined = [row for part in parts for row in part["logprobs"][column]]
            assert joined == choice["logprobs"][column]
        assert [t for part in parts for t in part["token_ids"]] == choice["token_ids"]
        assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert whole["choices"][0]["text"] == "abné!"
    assert whole["choices"][0]["logprobs"]["token_logprobs"][:3] == [None, -0.5, -0.5]
    assert whole["choices"][0]["logprobs"]["text_offset"][:4] == [0, 1, 2, 3]


async def test_a_prompt_alone_is_scored_with_echo_and_no_new_tokens(tokenizer: Tokenizer) -> None:
    engine = says(tokenizer)
    async with served(engine, tokenizer) as server:
        answer = await server.openai.completions.create(
            model=MODEL, prompt="abc", echo=True, max_tokens=0, logprobs=0
        )
        with pytest.raises(openai.BadRequestError, match="max_tokens is 0"):
            await server.openai.completions.create(model=MODEL, prompt="abc", max_tokens=0)
    assert engine.requests == []
    assert answer.choices[0].text == "abc"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs == [None, -0.5, -0.5]


# -- tokens in, tokens out


async def test_the_engine_port_goes_over_http_without_loss(tokenizer: Tokenizer) -> None:
    engine = says(tokenizer, "abc", "abc")
    body = {
        "prompt_ids": [1, 2, 3], "id": "g1/0", "session": "s", "min_version": 0, "min_new_tokens": 1,
        "sampling": {"max_new_tokens": 5, "temperature": 0.5, "top_k": 3, "stop": ["z"], "seed": 2**70,
                     "stop_token_ids": [9]},
        "logit_bias": {"4": 1.5},
    }  # fmt: skip
    async with served(engine, tokenizer) as server:
        _, whole = await server.post("/v1/palestra/generate", body)
        *events, done = await server.events("/v1/palestra/generate", body | {"stream": True})
        _, scored = await server.post("/v1/palestra/score", {"token_ids": [1, 2, 3]})
    ids = [*b"abc", tokenizer.eos_token_ids[0]]
    assert whole == {"token_ids": ids, "logprobs": [-0.5] * 4, "versions": [0] * 4, "stop_reason": "eos"}
    assert [row for event in events for row in event["tokens"]] == [[token, -0.5, 0] for token in ids]
    assert (events[-1]["stop_reason"], done) == ("eos", "[DONE]")
    assert scored == {"logprobs": [-0.5, -0.5]}
    sampling = SamplingParams(5, 0.5, 1.0, 3, ("z",), (9,), 2**70)
    expected = GenerateRequest((1, 2, 3), sampling, "g1/0", "s", "", 0, None, 1, {4: 1.5})
    assert engine.requests == [expected, expected]


async def test_a_logprob_of_minus_infinity_is_null(tokenizer: Tokenizer) -> None:
    class Cuts(FakeEngine):
        async def score(self, token_ids: Any, sampling: SamplingParams) -> tuple[float, ...]:
            return (-math.inf, -1.0)

    async with served(Cuts([], tokenizer), tokenizer) as server:
        _, scored = await server.post(
            "/v1/palestra/score", {"token_ids": [1, 2, 3], "sampling": {"top_k": 1}}
        )
        _, echoed = await server.post(
            "/v1/completions", {"prompt": "abc", "echo": True, "logprobs": 0, "max_tokens": 0}
        )
    assert scored == {"logprobs": [None, -1.0]}
    assert echoed["choices"][0]["logprobs"]["token_logprobs"] == [None, None, -1.0]


# -- over the native engine


async def test_the_native_engines_tokens_are_the_same_through_every_route(real: Served) -> None:
    prompt = list(b"Once upon a time")
    sampling = SamplingParams(max_new_tokens=12, seed=3)
    direct = await real.engine.generate(GenerateRequest(tuple(prompt), sampling))
    body = {"prompt": prompt, "max_tokens": 12, "seed": 3, "return_token_ids": True, "logprobs": 0}
    _, whole = await real.post("/v1/completions", body)
    *chunks, _ = await real.events("/v1/completions", body | {"stream": True})
    _, tokens = await real.post(
        "/v1/palestra/generate", {"prompt_ids": prompt, "sampling": {"max_new_tokens": 12, "seed": 3}}
    )
    assert whole["choices"][0]["token_ids"] == list(direct.token_ids) == tokens["token_ids"]
    assert whole["choices"][0]["logprobs"]["token_logprobs"] == list(direct.logprobs) == tokens["logprobs"]
    assert [t for c in chunks for t in c["choices"][0]["token_ids"]] == list(direct.token_ids)
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole["choices"][0]["text"]


async def test_prompt_logprobs_are_those_of_the_native_engines_scoring(real: Served) -> None:
    prompt = list(b"Once upon")
    scores = await real.engine.score(prompt, SamplingParams(temperature=0.7))
    body = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 0, "temperature": 0.7}
    _, answer = await real.post("/v1/completions", body)
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, *scores]


async def test_the_official_client_chats_with_the_native_engine(real: Served) -> None:
    create = real.openai.chat.completions.create
    greedy = await create(model=MODEL, messages=USER, max_tokens=8, temperature=0, logprobs=True)
    stream = await create(model=MODEL, messages=USER, max_tokens=8, temperature=0, stream=True)
    text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
    assert text == greedy.choices[0].message.content
    assert greedy.choices[0].logprobs is not None
    assert len(greedy.choices[0].logprobs.content or []) == greedy.usage.completion_tokens  # type: ignore[union-attr]


async def test_a_stop_string_ends_the_native_engines_answer_alike_in_stream_and_whole(real: Served) -> None:
    body = {"prompt": list(b"abc"), "max_tokens": 40, "seed": 1, "return_token_ids": True}
    _, free = await real.post("/v1/completions", body)
    ids = free["choices"][0]["token_ids"]
    stop = next(bytes(ids[i : i + 2]).decode() for i in range(5, 38) if max(ids[i : i + 2]) < 128)
    _, whole = await real.post("/v1/completions", body | {"stop": [stop]})
    *chunks, _ = await real.events("/v1/completions", body | {"stop": [stop], "stream": True})
    choice = whole["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert stop not in choice["text"]
    assert bytes(choice["token_ids"]).endswith(stop.encode())
    assert "".join(c["choices"][0]["text"] for c in chunks) == choice["text"]


async def test_a_context_that_is_full_is_a_length_and_a_prompt_over_it_is_refused(real: Served) -> None:
    answer = await real.openai.completions.create(model=MODEL, prompt=[65] * 250, max_tokens=100, seed=1)
    assert answer.choices[0].finish_reason in ("length", "stop")
    with pytest.raises(openai.BadRequestError, match="the prompt has 256 tokens and the context is 256"):
        await real.openai.completions.create(model=MODEL, prompt=[65] * 256, max_tokens=1)
    answer = await real.openai.completions.create(model=MODEL, prompt="still here", max_tokens=2)
    assert answer.choices[0].text is not None
