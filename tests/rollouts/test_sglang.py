"""What is sent to SGLang and how its answers are read, against the schema of SGLang 0.5.23.

`helpers.fake_served` refuses any field that schema does not have; SGLang itself is not run here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from helpers import fake_served as fake
from helpers.tiny import IM_END, make_tiny_model
from palestra.errors import EngineError
from palestra.models.tensors import load_tensors
from palestra.rollouts.base import GenerateRequest
from palestra.rollouts.served.sglang import SglangEngine
from palestra.types import SamplingParams, StopReason, Version
from palestra.weights.manifests import full_manifest


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[SglangEngine]:
    folder = make_tiny_model(tmp_path / "tiny")
    python = fake.make_python(tmp_path)
    engine = SglangEngine(folder, python=python, dtype="bf16", max_running=3, startup_s=30)
    tensors = load_tensors(folder)
    await engine.start(full_manifest(Version("run", 7), tensors.items()), tensors.items())
    yield engine
    await engine.close()


async def journal(engine: SglangEngine) -> dict[str, Any]:
    return await engine._http.get("/journal", timeout_s=5)


async def test_it_is_started_for_itself_alone_at_the_version_it_serves(engine: SglangEngine) -> None:
    words = (await journal(engine))["words"]
    given = dict(pairwise(words))
    assert given["--host"] == "127.0.0.1"
    assert len(given["--api-key"]) == 64
    assert given["--weight-version"] == "run@7"
    assert given["--dtype"] == "bfloat16"
    assert (given["--max-running-requests"], given["--context-length"]) == ("3", "256")
    assert given["--sampling-backend"] == "pytorch", "the default one takes no seed"
    assert "--incremental-streaming-output" in words
    assert "--enable-lora" not in words


async def test_a_request_says_everything_the_port_asks_for(engine: SglangEngine) -> None:
    sampling = SamplingParams(
        max_new_tokens=9, temperature=0.7, top_p=0.9, stop=("ab",), stop_token_ids=(17,), seed=2**40
    )
    request = GenerateRequest((1, 2), sampling, min_new_tokens=2, logit_bias={5: 1.5})
    done = await engine.generate(request)
    body = (await journal(engine))["asked"][-1]
    assert body["input_ids"] == [1, 2]
    assert (body["return_logprob"], body["stream"], body["return_sampling_mask"]) == (True, True, True)
    params = body["sampling_params"]
    assert params["stop_token_ids"] == [17, IM_END]
    assert params["ignore_eos"] is False, "with it SGLang would ignore stop tokens too"
    assert (params["max_new_tokens"], params["min_new_tokens"]) == (9, 2)
    assert (params["temperature"], params["top_p"], params["top_k"]) == (0.7, 0.9, -1)
    assert (params["stop"], params["logit_bias"]) == (["ab"], {"5": 1.5})
    assert 0 <= params["sampling_seed"] < 2**31
    assert done.stop_reason is StopReason.LENGTH


async def test_with_top_k_or_top_p_the_logprobs_are_those_after_the_cut(engine: SglangEngine) -> None:
    """trl#4159 and four others (case 10): the plain ones are before it, the fake's are twice as large."""
    ask = GenerateRequest((1, 2), SamplingParams(max_new_tokens=4))
    plain = await engine.generate(ask)
    cut = await engine.generate(replace(ask, sampling=replace(ask.sampling, top_k=5)))
    assert cut.token_ids == plain.token_ids
    assert cut.logprobs == pytest.approx([value / 2 for value in plain.logprobs])
    assert "return_sampling_mask" not in (await journal(engine))["asked"][0]


async def test_scoring_is_plain_or_refused_by_name(engine: SglangEngine) -> None:
    assert len(await engine.score((1, 2, 3), SamplingParams())) == 2
    assert len(await engine.score((1, 2, 3), SamplingParams(temperature=0))) == 2
    with pytest.raises(EngineError, match="temperature 1 without top-k or top-p only"):
        await engine.score((1, 2, 3), SamplingParams(temperature=0.5))
    body = (await journal(engine))["asked"][-1]
    assert (body["logprob_start_len"], body["sampling_params"]["max_new_tokens"]) == (0, 0)


async def test_a_server_that_says_another_version_does_not_come_up(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    python = fake.make_python(tmp_path)
    tensors = load_tensors(folder)
    arguments = ["--weight-version", "run@8"]
    engine = SglangEngine(folder, python=python, dtype="fp32", startup_s=30, arguments=arguments)
    with pytest.raises(EngineError, match="says it serves 'run@8'"):
        await engine.start(full_manifest(Version("run", 7), tensors.items()), tensors.items())
    assert engine.version is None
    await engine.close()
