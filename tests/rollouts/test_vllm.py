"""vLLM itself behind the port: its CPU build, started for real on a tiny Llama. Slow.

Needs vLLM's environment (docs/engines.md says how to make it), at PALESTRA_VLLM_PYTHON or in the cache.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from torch import Tensor

from helpers.tiny import make_tiny_model
from palestra.batches import LossSpec
from palestra.errors import EngineError, WeightsError
from palestra.rollouts.base import EngineDead, GenerateRequest, VersionNotReady
from palestra.rollouts.served.vllm import VllmEngine, default_python
from palestra.trainer.settings import TrainerSettings
from palestra.trainer.torch_trainer import TorchTrainer
from palestra.types import Completion, SamplingParams, StopReason, Version
from palestra.weights.manifests import full_manifest
from palestra.weights.sync import WeightSync, probe_batch

PYTHON = default_python()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"vLLM is not installed at {PYTHON}: see docs/engines.md"),
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]
PROMPT = tuple(b"Once upon a time")
PROBE = tuple(b"The quick brown fox jumps over the lazy dog")[:32]


class CarelessEngine(VllmEngine):
    """One whose loads can be sabotaged: the version is announced and the weights stay the old ones."""

    sabotaged = False

    async def _load(self, file: Path, version: Version) -> None:
        if self.sabotaged:
            await self._control("/update_weight_version", {"new_version": str(version)})
        else:
            await super()._load(file, version)


class Served:
    """One running engine, the trainer whose weights it serves, and the sync between them."""

    def __init__(self, folder: Path) -> None:
        self.trainer = TorchTrainer(folder, TrainerSettings(threads=1))
        self.engine = CarelessEngine(
            folder, python=PYTHON, dtype="fp32", threads=1, cache_gb=1, max_running=8, adapter_rank=8
        )
        self.sync = WeightSync(self.trainer, self.engine, PROBE, "fp32")
        self.updates = 0

    @property
    def number(self) -> int:
        assert self.engine.version is not None
        return self.engine.version.number

    def next(self) -> Version:
        """Change the trainer's weights; the version they are."""
        self.updates += 1
        batch = probe_batch(tuple(b"weights move"))
        batch = replace(batch, weights_N=[1.0] * batch.target_count)  # type: ignore[arg-type]
        self.trainer.step(batch, LossSpec(kind="nll"), 1e-2)
        return Version("run", self.updates)

    async def ask(self, prompt: Sequence[int] = PROMPT, **sampling: object) -> Completion:
        return await self.engine.generate(GenerateRequest(tuple(prompt), SamplingParams(**sampling)))  # type: ignore[arg-type]

    async def begun(
        self, *, exact_version: int | None = None, **sampling: object
    ) -> asyncio.Task[Completion]:
        """A request that has sampled its first token."""
        first = asyncio.Event()
        request = GenerateRequest(PROMPT, SamplingParams(**sampling), exact_version=exact_version)  # type: ignore[arg-type]
        task = asyncio.create_task(self.engine.generate(request, lambda *_: first.set()))
        await first.wait()
        return task

    def trained(self, tokens: Sequence[int], sampling: SamplingParams) -> tuple[float, ...]:
        """The trainer's logprobs of ``tokens[1:]`` under this sampling."""
        batch = replace(
            probe_batch(tuple(tokens)),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )
        return self.trainer.logprobs(batch)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """vLLM's CPU attention needs heads of at least 32: the tiny model is a little wider here."""
    folder = make_tiny_model(tmp_path_factory.mktemp("vllm") / "tiny", hidden=128)
    held = Served(folder)
    await held.sync.serve(Version("run", 0))
    yield held
    await held.engine.close()


async def test_tokens_come_out_with_the_trainers_logprobs_and_the_serving_version(served: Served) -> None:
    done = await served.ask(max_new_tokens=12, seed=4)
    sampling = SamplingParams()
    expected = served.trained((*PROMPT, *done.token_ids), sampling)[len(PROMPT) - 1 :]
    assert done.logprobs == pytest.approx(expected, abs=1e-4)
    assert done.versions == (served.number,) * len(done.token_ids)
    assert done == await served.ask(max_new_tokens=12, seed=4), "the same seed gives the same tokens"


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.3),
        SamplingParams(temperature=0.6, top_k=20),
        SamplingParams(temperature=1.3, top_p=0.9),
    ],
    ids=lambda s: f"T{s.temperature}-k{s.top_k}-p{s.top_p}",
)
async def test_engine_and_trainer_agree_on_the_distribution_sampled_from(
    served: Served, sampling: SamplingParams
) -> None:
    """trl#4159, NeMo-RL PR#316, OpenRLHF PR#853 (case 10): temperature applied on one side only."""
    done = await served.ask(
        max_new_tokens=16,
        seed=2,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
    )
    whole = (*PROMPT, *done.token_ids)
    trained = served.trained(whole, sampling)[len(PROMPT) - 1 :]
    assert done.logprobs == pytest.approx(trained, abs=1e-4)
    scored = await served.engine.score(whole, sampling)
    assert len(scored) == len(whole) - 1
    assert scored[len(PROMPT) - 1 :] == pytest.approx(done.logprobs, abs=1e-4)


async def test_a_token_that_top_k_leaves_out_scores_minus_infinity(served: Served) -> None:
    scored = await served.engine.score(PROBE, SamplingParams(top_k=1))
    best = await served.engine.score(PROBE, SamplingParams())
    assert all(value in (0.0, -float("inf")) for value in scored)
    assert all(value == -float("inf") for value, plain in zip(scored, best, strict=True) if plain < -1)


async def test_greedy_takes_the_largest_and_reports_the_untempered_logprob(served: Served) -> None:
    done = await served.ask(max_new_tokens=8, temperature=0)
    assert done.logprobs == pytest.approx(
        served.trained((*PROMPT, *done.token_ids), SamplingParams())[len(PROMPT) - 1 :], abs=1e-4
    )


async def test_a_completion_ends_for_the_reason_the_native_engine_would_give(served: Served) -> None:
    free = await served.ask(max_new_tokens=20, seed=9)
    third = free.token_ids[2]
    first = free.token_ids.index(third)
    stopped = await served.ask(max_new_tokens=20, seed=9, stop_token_ids=(third,))
    assert (stopped.stop_reason, stopped.token_ids) == (StopReason.STOP, free.token_ids[: first + 1])
    assert (await served.ask(max_new_tokens=5, seed=9)).stop_reason is StopReason.LENGTH
    full = await served.ask(tuple(b"x" * 250), max_new_tokens=20, seed=9)
    assert (full.stop_reason, len(full.token_ids)) == (StopReason.CONTEXT, 6)


async def test_the_models_end_token_is_kept_and_is_the_reason(served: Served) -> None:
    end = served.engine._tokenizer.eos_token_ids[0]
    request = GenerateRequest(PROMPT, SamplingParams(max_new_tokens=9), logit_bias={end: 100.0})
    done = await served.engine.generate(request)
    assert (done.stop_reason, done.token_ids) == (StopReason.EOS, (end,))
    later = await served.engine.generate(replace(request, min_new_tokens=3))
    assert (later.stop_reason, len(later.token_ids)) == (StopReason.EOS, 4)
    assert end not in later.token_ids[:3]


async def test_a_stop_string_across_tokens_ends_the_completion_and_stays_in_it(served: Served) -> None:
    request = GenerateRequest(
        PROMPT, SamplingParams(max_new_tokens=9, stop=("zz",)), logit_bias={ord("z"): 100.0}
    )
    heard: list[int] = []
    done = await served.engine.generate(request, lambda token, *_: heard.append(token))
    assert (done.stop_reason, done.token_ids) == (StopReason.STOP, tuple(b"zz"))
    assert heard == list(b"zz")


async def test_listeners_hear_every_token_before_the_return(served: Served) -> None:
    heard: list[tuple[int, float, int]] = []
    request = GenerateRequest(PROMPT, SamplingParams(max_new_tokens=10, seed=1))
    done = await served.engine.generate(request, lambda *token: heard.append(token))
    assert heard == list(zip(done.token_ids, done.logprobs, done.versions, strict=True))


async def test_a_turn_that_continues_another_computes_only_what_is_new(served: Served) -> None:
    turn = tuple(b"a long enough beginning that fills two blocks of thirty-two tokens, and more")
    await served.ask(turn, max_new_tokens=2)
    before = served.engine.stats()
    await served.ask((*turn, 65, 66), max_new_tokens=2)
    after = served.engine.stats()
    assert after.reused_tokens - before.reused_tokens == 64
    assert after.prompt_tokens - before.prompt_tokens == len(turn) + 2 - 64


async def test_a_cancelled_request_leaves_its_place(served: Served) -> None:
    tasks = [asyncio.create_task(served.ask(max_new_tokens=200, seed=i)) for i in range(20)]
    tasks.append(await served.begun(max_new_tokens=200))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (await served.ask(max_new_tokens=2)).stop_reason is StopReason.LENGTH
    text = await served.engine._http.get("/metrics", timeout_s=10)
    running = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
    assert running
    assert all(line.endswith(" 0.0") for line in running)


async def test_weights_change_under_running_requests_and_each_token_says_which_sampled_it(
    served: Served,
) -> None:
    """verl#7990 (case 8): a sync completes with far more requests in flight than slots."""
    old, version = served.number, served.next()
    heard: list[int] = []
    begun = asyncio.Event()

    def hear(_token: int, _logprob: float, number: int) -> None:
        heard.append(number)
        begun.set()

    first = GenerateRequest(PROMPT, SamplingParams(max_new_tokens=200, seed=3))
    tasks = [asyncio.create_task(served.engine.generate(first, hear))]
    tasks += [asyncio.create_task(served.ask(max_new_tokens=200, seed=i)) for i in range(30)]
    await begun.wait()
    report = await served.sync.serve(version)
    assert report.probe_gap_max <= 1e-4
    done = await asyncio.gather(*tasks)
    assert all(d.versions == tuple(sorted(d.versions)) for d in done), "one defined order of versions"
    assert set(done[0].versions) == {old, version.number}
    assert heard == list(done[0].versions)
    assert {v for d in done for v in d.versions} == {old, version.number}


async def test_no_prompt_computed_by_old_weights_is_used_under_new_ones(served: Served) -> None:
    """NeMo-RL PR#4018, prime-rl PR#2270, vllm#9744 (case 6): the prefix cache survived a weight update."""
    prompt = tuple(b"this beginning is longer than one block of the cache, by far, so it is kept")
    held = asyncio.create_task(served.ask(prompt, max_new_tokens=150, seed=5))
    await served.ask(prompt, max_new_tokens=1)
    assert served.engine.stats().reused_tokens > 0
    await served.sync.serve(served.next())
    done = await served.ask(prompt, max_new_tokens=6, seed=1)
    expected = served.trained((*prompt, *done.token_ids), SamplingParams())[len(prompt) - 1 :]
    assert done.logprobs == pytest.approx(expected, abs=1e-4)
    await held


async def test_a_sync_that_changed_nothing_is_refused_and_a_sabotaged_load_is_found(served: Served) -> None:
    """verl#7495, unsloth PR#8701 (cases 1, 2): syncs that reached nobody looked like slow learning."""
    before = served.number
    with pytest.raises(WeightsError, match="changed no weight"):
        await served.sync.serve(Version("run", before + 100))
    served.engine.sabotaged = True
    try:
        with pytest.raises(WeightsError, match="is not what the engine computes with"):
            await served.sync.serve(served.next())
    finally:
        served.engine.sabotaged = False
    await served.sync.serve(served.next())


async def test_a_request_may_ask_for_a_version(served: Served) -> None:
    ask = GenerateRequest(PROMPT, SamplingParams(max_new_tokens=5))
    with pytest.raises(VersionNotReady, match="at least version"):
        await served.engine.generate(replace(ask, min_version=served.number + 1))
    with pytest.raises(VersionNotReady):
        await served.engine.generate(replace(ask, exact_version=served.number + 1))
    version = served.next()
    task = await served.begun(exact_version=served.number, max_new_tokens=200)
    await served.sync.serve(version)
    with pytest.raises(VersionNotReady):
        await task
    assert (await served.ask(max_new_tokens=1)).versions == (served.number,)


async def test_paused_requests_wait_while_weights_change_and_go_on_under_the_new(served: Served) -> None:
    old, version = served.number, served.next()
    task = await served.begun(max_new_tokens=200, seed=6)
    await served.engine.pause()
    late = asyncio.create_task(served.ask(max_new_tokens=2))
    manifest = full_manifest(version, served.trainer.export())
    assert await served.engine.stage(manifest, served.trainer.export()) == manifest.digest
    await served.engine.commit(version)
    await asyncio.sleep(0.2)
    assert not task.done()
    assert not late.done()
    with pytest.raises(EngineError, match="nothing while it is paused"):
        await served.engine.score(PROBE, SamplingParams())
    await served.engine.resume()
    assert set((await task).versions) == {old, version.number}
    assert (await late).versions == (version.number,) * 2
    scored = await served.engine.score(PROBE, SamplingParams())
    assert scored == pytest.approx(served.trained(PROBE, SamplingParams()), abs=1e-4)


async def test_pausing_with_abort_returns_what_there_is(served: Served) -> None:
    task = await served.begun(max_new_tokens=200, seed=7)
    await served.engine.pause("abort")
    done = await task
    assert done.stop_reason is StopReason.ABORTED
    assert 1 <= len(done.token_ids) < 200
    await served.engine.resume()


async def test_pausing_with_drain_lets_them_finish(served: Served) -> None:
    task = asyncio.create_task(served.ask(max_new_tokens=60, seed=7))
    await asyncio.sleep(0.1)
    await served.engine.pause("drain")
    assert task.done() or (await asyncio.wait_for(task, 2))
    assert len(task.result().token_ids) == 60
    await served.engine.resume()


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (GenerateRequest((), SamplingParams()), "the prompt is empty"),
        (GenerateRequest((5000,), SamplingParams()), "token 5000, which the model does not have"),
        (
            GenerateRequest(tuple(b"x" * 256), SamplingParams(), id="g1"),
            "the prompt of request g1 has 256 tokens",
        ),
        (GenerateRequest(PROMPT, SamplingParams(), adapter="polite"), "no adapter named 'polite' is loaded"),
        (GenerateRequest(PROMPT, SamplingParams(temperature=0.005)), "vLLM samples at 0.01"),
    ],
)
async def test_what_cannot_be_sampled_is_refused_by_name(
    served: Served, request_: GenerateRequest, said: str
) -> None:
    with pytest.raises(EngineError, match=said):
        await served.engine.generate(request_)


def lora(scale: float) -> tuple[dict[str, object], dict[str, Tensor]]:
    """An adapter for queries and values of the tiny model, in PEFT's layout."""
    draw = torch.Generator().manual_seed(int(scale * 100))
    tensors: dict[str, Tensor] = {}
    for layer in range(2):
        for name, rows in (("q_proj", 128), ("v_proj", 64)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(4, 128, generator=draw) * 0.3
            tensors[f"{at}.lora_B.weight"] = torch.randn(rows, 4, generator=draw) * scale
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none",
              "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}  # fmt: skip
    return config, tensors


async def test_an_adapter_is_swapped_whole_under_running_requests_and_survives_new_weights(
    served: Served,
) -> None:
    """SkyRL PR#1606, #2129 (case 5): the adapter was gone before the new one was live."""
    engine = served.engine

    async def with_adapter(tokens: int) -> Completion:
        sampling = SamplingParams(max_new_tokens=tokens, temperature=0)
        return await engine.generate(GenerateRequest(PROMPT, sampling, adapter="tone"))

    plain = await served.ask(max_new_tokens=60, temperature=0)
    await engine.load_adapter("tone", *_items(lora(0.3)))
    first = await with_adapter(60)
    assert engine.adapters == ("tone",)
    assert first.logprobs != plain.logprobs
    running = asyncio.create_task(with_adapter(60))
    await asyncio.sleep(0.05)
    await engine.load_adapter("tone", *_items(lora(0.6)))
    second = await with_adapter(60)
    assert second.logprobs != first.logprobs
    assert (await running).logprobs == pytest.approx(first.logprobs, abs=1e-4), "it ends with what it began"
    assert (await served.ask(max_new_tokens=60, temperature=0)).token_ids == plain.token_ids
    await served.sync.serve(served.next())
    assert (await with_adapter(4)).versions == (served.number,) * 4
    config, tensors = lora(0.3)
    with pytest.raises(WeightsError, match="rank is 64"):
        await engine.load_adapter("tone", {**config, "r": 64}, tensors.items())
    with pytest.raises(WeightsError, match="was not taken"):
        await engine.load_adapter("tone", {**config, "target_modules": ["none_such"]}, ())
    assert (await with_adapter(4)).token_ids, "a failed load changes nothing"
    await engine.drop_adapter("tone")
    with pytest.raises(EngineError, match="no adapter named"):
        await with_adapter(1)


def _items(adapter: tuple[dict[str, object], dict[str, Tensor]]) -> tuple[dict[str, object], object]:
    return adapter[0], adapter[1].items()


async def test_a_version_with_other_bytes_is_never_staged(served: Served) -> None:
    tensors = dict(served.trainer.export())
    manifest = full_manifest(Version("run", 500), tensors.items())
    name = "model.norm.weight"
    with pytest.raises(WeightsError, match=f"bytes received for {name}"):
        await served.engine.stage(manifest, {**tensors, name: tensors[name] + 1}.items())
    with pytest.raises(WeightsError, match="nothing is staged"):
        await served.engine.commit(manifest.version)
    assert (await served.ask(max_new_tokens=1)).versions == (served.number,)


async def test_asleep_it_holds_nothing_and_wakes_with_the_weights_it_is_given(served: Served) -> None:
    """trl#5312, vllm#15254, vime PR#191 (cases 3, 26): old weights after waking, two copies while waking."""
    tasks = [await served.begun(max_new_tokens=200)]
    tasks += [asyncio.create_task(served.ask(max_new_tokens=200, seed=i)) for i in range(30)]
    await asyncio.sleep(0.05)
    group = _group(served)
    await served.engine.pause()
    await served.engine.sleep()
    ended = await asyncio.gather(*tasks)
    assert {done.stop_reason for done in ended} == {StopReason.ABORTED}
    assert served.engine.version is None
    assert not _members(group), "all memory went with the processes"
    with pytest.raises(EngineError, match="has not been started"):
        await served.ask(max_new_tokens=1)
    await served.sync.serve(served.next())
    assert (await served.ask(max_new_tokens=1)).versions == (served.number,)


async def test_a_killed_server_is_told_to_all_who_wait_with_its_last_words(served: Served) -> None:
    """prime-rl PR#3020 (case 9): a child failed and its output was never shown."""
    tasks = [await served.begun(max_new_tokens=200)]
    tasks += [asyncio.create_task(served.ask(max_new_tokens=200, seed=i)) for i in range(30)]
    await asyncio.sleep(0.05)
    group = _group(served)
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in _members(group)}
    server = next(
        pid for pid, line in lines.items() if line[1:3] == [b"-m", b"vllm.entrypoints.openai.api_server"]
    )
    os.kill(server, signal.SIGKILL)
    failures = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(failure, EngineDead) for failure in failures)
    assert "the server ended with exit status 137" in str(failures[0])
    with pytest.raises(EngineDead):
        await served.ask(max_new_tokens=1)
    for _ in range(100):
        if not _members(group):
            break
        await asyncio.sleep(0.05)
    assert not _members(group), "no orphan"


def _group(served: Served) -> int:
    assert served.engine._life is not None
    return served.engine._life._server.group


def _members(group: int) -> list[int]:
    """The processes of a group that are not dead already."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(entry.name))
    return found
