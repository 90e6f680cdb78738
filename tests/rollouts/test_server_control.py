"""Weights, pausing, adapters and access over HTTP: what the engine can, to those who may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from helpers.fake_engine import FakeEngine
from helpers.templates import make_tokenizer
from palestra.models.tensors import save_tensors
from palestra.models.tokenizer import Tokenizer
from palestra.types import Manifest, SamplingParams, Version
from rollouts.conftest import Start
from rollouts.server_support import (
    MODEL,
    CountingEngine,
    Served,
    eventually,
    raw_request,
    save_adapter,
    served,
)
from rollouts.support import Tiny, manifest_of

USER: Any = [{"role": "user", "content": "Hi"}]
CHAT, PALESTRA = "/v1/chat/completions", "/v1/palestra"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return make_tokenizer(tmp_path / "tokenizer")


@pytest.fixture
async def real(tiny: Tiny, serve: Start) -> AsyncIterator[Served]:
    async with served(await serve(), Tokenizer.from_folder(tiny.folder)) as server:
        yield server


# -- weights


async def test_a_version_is_staged_from_a_folder_proven_by_its_digest_and_committed(
    real: Served, tiny: Tiny, tmp_path: Path
) -> None:
    """Frozen weights passed for new ones (verl#7495, case 1): the digest says what was read."""
    new = tiny.changed()
    save_tensors(tmp_path, new)
    manifest = manifest_of(new, 1)
    body = {"folder": str(tmp_path), "manifest": manifest.to_json()}
    status, answer = await real.post(f"{PALESTRA}/stage", body)
    assert (status, answer) == (200, {"version": "test@0", "digest": manifest.digest, "staged": True})
    before = await real.engine.score([1, 2, 3], SamplingParams())
    assert (await real.post(f"{PALESTRA}/commit", {"version": "test@1"}))[1] == {"version": "test@1"}
    _, after = await real.post(f"{PALESTRA}/score", {"token_ids": [1, 2, 3]})
    assert after["logprobs"] != list(before)
    _, answer = await real.post(
        f"{PALESTRA}/generate", {"prompt_ids": [1], "sampling": {"max_new_tokens": 2}, "min_version": 1}
    )
    assert set(answer["versions"]) == {1}


async def test_weights_that_are_not_those_announced_are_refused_and_the_old_version_serves(
    real: Served, tiny: Tiny, tmp_path: Path
) -> None:
    save_tensors(tmp_path, tiny.changed())
    body = {"folder": str(tmp_path), "manifest": manifest_of(tiny.tensors, 1).to_json()}
    status, answer = await real.post(f"{PALESTRA}/stage", body)
    assert status == 400
    assert "are not those its manifest announced" in answer["error"]["message"]
    status, answer = await real.post(f"{PALESTRA}/commit", {"version": "test@1"})
    assert status == 400
    assert "nothing is staged" in answer["error"]["message"]
    assert (await real.openai.chat.completions.create(model=MODEL, messages=USER, max_tokens=2)).choices


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("stage", {"folder": "relative", "manifest": Manifest(Version("a", 1), "full", None, ()).to_json()},
         "no absolute path"),
        ("stage", {"folder": "/nowhere", "manifest": Manifest(Version("a", 1), "full", None, ()).to_json()},
         "no safetensors weights"),
        ("stage", {"folder": "/nowhere", "manifest": {"version": "a@1"}}, "not a manifest"),
        ("stage", {"folder": "/nowhere"}, "manifest is missing"),
        ("commit", {"version": "three"}, "not a version"),
        ("pause", {"mode": "later"}, "'keep', 'drain' or 'abort'"),
        ("resume", {"now": True}, "there is no field 'now'"),
        ("adapters/load", {"name": "", "folder": "/nowhere"}, "name"),
        ("adapters/load", {"name": MODEL, "folder": "/nowhere"}, "the model's own name"),
        ("adapters/load", {"name": "a", "folder": "/nowhere"}, "no adapter_config.json"),
    ],
)  # fmt: skip
async def test_a_control_request_that_makes_no_sense_is_refused(
    path: str, body: Any, said: str, real: Served
) -> None:
    status, answer = await real.post(f"{PALESTRA}/{path}", body)
    assert status == 400, answer
    assert said in answer["error"]["message"]


async def test_a_version_that_does_not_serve_is_a_409_that_says_when_to_come_back(real: Served) -> None:
    for wish in ({"min_version": 1}, {"exact_version": 4}):
        with pytest.raises(openai.ConflictError, match="the engine serves test@0") as caught:
            await real.openai.chat.completions.create(model=MODEL, messages=USER, extra_body=wish)
        assert caught.value.response.headers["Retry-After"] == "1"
        assert caught.value.code == "version_not_ready"


async def test_asleep_nothing_is_served_and_a_first_version_wakes_the_engine(
    real: Served, tiny: Tiny, tmp_path: Path
) -> None:
    """Weights were not refreshed after sleep (trl#5312, case 3): waking takes the tensors, proven again."""
    assert (await real.post(f"{PALESTRA}/sleep", {}))[1] == {"version": None}
    assert (await real.get("/health"))[0] == 503
    assert (await real.post(CHAT, {"messages": USER}))[1]["error"]["code"] == "not_ready"
    save_tensors(tmp_path, tiny.tensors)
    manifest = manifest_of(tiny.tensors, 5)
    body = {"folder": str(tmp_path), "manifest": manifest.to_json()}
    _, answer = await real.post(f"{PALESTRA}/stage", body)
    assert answer == {"version": "test@5", "digest": manifest.digest, "staged": False}
    assert (await real.get("/health"))[0] == 200


async def test_asleep_every_control_route_that_needs_weights_says_503(
    real: Served, tiny: Tiny, tmp_path: Path
) -> None:
    await real.post(f"{PALESTRA}/sleep", {})
    save_adapter(tmp_path, tiny.tensors)
    for path, body in (
        ("adapters/load", {"name": "a", "folder": str(tmp_path)}),
        ("adapters/drop", {"name": "a"}),
        ("commit", {"version": "test@1"}),
        ("pause", {}),
        ("resume", {}),
    ):
        status, answer = await real.post(f"{PALESTRA}/{path}", body)
        assert (status, answer["error"]["code"]) == (503, "not_ready"), path


async def test_paused_requests_wait_and_go_on(real: Served) -> None:
    await real.post(f"{PALESTRA}/pause", {"mode": "keep"})
    asked = asyncio.create_task(real.post(CHAT, {"messages": USER, "max_tokens": 3, "seed": 1}))
    await eventually(lambda: real.serving.live == 1)
    assert not asked.done()
    assert (await real.post(f"{PALESTRA}/resume", {}))[0] == 200
    assert (await asked)[0] == 200


async def test_an_abort_is_said_in_what_the_requests_get(real: Served) -> None:
    asked = asyncio.create_task(
        real.post(CHAT, {"messages": USER, "max_tokens": 200, "logit_bias": {"258": -100}})
    )
    await eventually(lambda: real.engine.stats().running == 1)
    await real.post(f"{PALESTRA}/pause", {"mode": "abort"})
    _, answer = await asked
    assert answer["choices"][0]["finish_reason"] in ("abort", "length")
    await real.post(f"{PALESTRA}/resume", {})


async def test_a_client_that_goes_away_frees_the_native_engines_row(real: Served) -> None:
    await real.post(f"{PALESTRA}/pause", {})
    body = {"messages": USER, "max_tokens": 200, "stream": True}
    _, writer = await raw_request(real.port, CHAT, body)
    await eventually(lambda: real.engine.stats().running + real.engine.stats().waiting == 1)
    writer.transport.abort()
    await eventually(lambda: real.engine.stats().running + real.engine.stats().waiting == 0)
    await real.post(f"{PALESTRA}/resume", {})


async def test_adapters_are_models_that_can_be_asked_for_and_dropped(
    real: Served, tiny: Tiny, tmp_path: Path
) -> None:
    """SkyRL PR#1606, #2129 (case 5): a name answers while it is listed, and is a 404 after."""
    save_adapter(tmp_path, tiny.tensors)
    for name in ("maths", "law"):
        status, answer = await real.post(f"{PALESTRA}/adapters/load", {"name": name, "folder": str(tmp_path)})
        assert status == 200, answer
    assert answer["adapters"] == ["law", "maths"]
    assert [model.id async for model in real.openai.models.list()] == [MODEL, "law", "maths"]
    ask = {"prompt": list(b"abc"), "max_tokens": 8, "temperature": 0, "logprobs": 0}
    _, plain = await real.post("/v1/completions", ask)
    _, adapted = await real.post("/v1/completions", ask | {"model": "maths"})
    assert (
        plain["choices"][0]["logprobs"]["token_logprobs"]
        != adapted["choices"][0]["logprobs"]["token_logprobs"]
    )
    assert adapted["model"] == "maths"
    await real.post(f"{PALESTRA}/adapters/drop", {"name": "maths"})
    with pytest.raises(openai.NotFoundError):
        await real.openai.completions.create(model="maths", prompt="a")
    status, answer = await real.post(f"{PALESTRA}/adapters/drop", {"name": "lwa"})
    assert status == 404
    assert "nearest: law" in answer["error"]["message"]
    status, answer = await real.post(
        "/v1/completions", {"model": "law", "prompt": "ab", "echo": True, "logprobs": 0, "max_tokens": 0}
    )
    assert status == 400
    assert "scored by the model itself" in answer["error"]["message"]


@pytest.mark.parametrize("path", ["pause", "resume", "sleep", "adapters/load", "adapters/drop"])
async def test_what_an_engine_cannot_do_is_a_501_with_the_port_it_lacks(
    path: str, tokenizer: Tokenizer
) -> None:
    async with served(FakeEngine([], tokenizer), tokenizer) as server:
        status, answer = await server.post(f"{PALESTRA}/{path}", {"name": "a", "folder": "/a"})
    assert status == 501
    assert "this engine (FakeEngine) is no " in answer["error"]["message"]


@pytest.mark.parametrize(
    "wild",
    [
        {"temperature": 1e-300}, {"temperature": 100}, {"top_k": 2**31}, {"top_p": 1e-300},
        {"max_tokens": 2**53},
        {"seed": -(2**63)}, {"logit_bias": {str(i): -100 for i in range(259)}}, {"logit_bias": {"258": 100}},
        {"logit_bias": {"99999": 1}}, {"stop": ["\x00", "\U0010ffff"]}, {"session": "x" * 10_000},
        {"min_tokens": 5, "max_tokens": 5},
    ],
    ids=lambda wild: str(wild)[:30],
)  # fmt: skip
async def test_no_setting_however_wild_breaks_the_engine_for_others(
    wild: dict[str, Any], real: Served
) -> None:
    body = {"messages": USER, "max_tokens": 5, "n": 2, **wild}
    status, answer = await real.post(CHAT, body)
    assert status in (200, 400), answer
    assert (await real.post(CHAT, {"messages": USER, "max_tokens": 2}))[0] == 200
    assert (await real.get("/health"))[0] == 200


# -- state and metrics


async def test_state_and_metrics_say_what_the_engine_counts(tokenizer: Tokenizer) -> None:
    async with served(CountingEngine(lambda _: "a", tokenizer), tokenizer) as server:
        await server.post(CHAT, {"messages": USER})
        await server.post(CHAT, {"mesages": USER})
        _, text = await server.get("/metrics")
        async with server.http.get(f"{server.url}{PALESTRA}/state") as response:
            state = await response.json()
    assert state["version"] == "fake@0"
    assert (state["prompt_tokens"], state["generated_tokens"], state["waiting"]) == (11, 22, 3)
    rows = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert rows["palestra_generated_tokens_total"] == "22"
    assert rows["palestra_busy_seconds_total"] == "4.5"
    assert rows["palestra_requests_waiting"] == "3"
    assert rows['palestra_http_requests_total{route="/v1/chat/completions",status="200"}'] == "1"
    assert rows['palestra_http_requests_total{route="/v1/chat/completions",status="400"}'] == "1"
    assert all(line.startswith("palestra_") for line in rows)


# -- access


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "localhost:1", "127.0.0.1.evil"]
)
async def test_a_page_that_rebinds_its_name_to_this_machine_is_refused(
    host: str, tokenizer: Tokenizer
) -> None:
    """DNS rebinding made a dashboard run code (CVE-2025-62593, case 34)."""
    async with served(CountingEngine(lambda _: "a", tokenizer), tokenizer) as server:
        headers = {"Host": host.format(port=server.port)}
        for path in ("/health", "/v1/models", "/metrics", f"{PALESTRA}/state"):
            assert (await server.get(path, headers=headers))[0] == 403
        assert (await server.post(f"{PALESTRA}/sleep", {}, headers=headers))[0] == 403
        assert server.engine.version is not None


@pytest.mark.parametrize("host", ["localhost:{port}", "LOCALHOST:{port}", "127.0.0.1:{port}", "[::1]:{port}"])
async def test_this_machine_under_its_own_names_is_served(host: str, tokenizer: Tokenizer) -> None:
    async with served(FakeEngine([], tokenizer), tokenizer) as server:
        assert (await server.get("/health", headers={"Host": host.format(port=server.port)}))[0] == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1", "http://localhost:1"])
async def test_a_browsers_request_from_another_page_is_refused(origin: str, tokenizer: Tokenizer) -> None:
    async with served(FakeEngine(lambda _: "a", tokenizer), tokenizer) as server:
        status, answer = await server.post(CHAT, {"messages": USER}, headers={"Origin": origin})
        assert (status, answer["error"]["code"]) == (403, "forbidden_origin")
        own = {"Origin": server.url}
        assert (await server.post(CHAT, {"messages": USER}, headers=own))[0] == 200


async def test_with_a_token_every_route_but_health_needs_it(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda _: "a", tokenizer)
    async with served(engine, tokenizer, token="sécret", key="wrong") as server:
        assert (await server.get("/health"))[0] == 200
        with pytest.raises(openai.AuthenticationError) as caught:
            await server.openai.chat.completions.create(model=MODEL, messages=USER)
        assert caught.value.code == "invalid_api_key"
        for header in ({}, {"Authorization": "Bearer "}, {"Authorization": "Basic secret"}):
            assert (await server.get("/metrics", headers=header))[0] == 401
            assert (await server.post(f"{PALESTRA}/sleep", {}, headers=header))[0] == 401
        right = {"Authorization": "Bearer sécret"}
        assert (await server.get("/v1/models", headers=right))[0] == 200
        assert (await server.post(CHAT, {"messages": USER}, headers=right))[0] == 200
    assert len(engine.requests) == 1


async def test_beyond_loopback_any_host_is_served_to_holders_of_the_token(tokenizer: Tokenizer) -> None:
    async with served(FakeEngine([], tokenizer), tokenizer, token="t", local_only=False) as server:
        headers = {"Host": "gpu7.example", "Authorization": "Bearer t"}
        assert (await server.get("/v1/models", headers=headers))[0] == 200
        assert (await server.get("/v1/models", headers=headers | {"Origin": "https://evil.example"}))[
            0
        ] == 403
        assert (await server.get("/v1/models", headers=headers | {"Origin": "https://gpu7.example"}))[
            0
        ] == 200
