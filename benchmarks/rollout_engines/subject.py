"""One engine in a process of its own, which generates on demand: a line of JSON in, a line out.

The parent asks for (count, tokens, seed); the answer is the CPU-seconds of this process
and of all it started, the wall clock, the median time to the first token where the engine
tells it, and the peak memory of all of them so far. Every engine samples the same prompts
at temperature 1, ends nothing early, and so computes exactly ``tokens`` tokens for each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from palestra.models.tokenizer import Tokenizer

SUBJECTS = ("a river", "the sea", "bread", "a clock", "snow", "a bridge", "tea", "a violin")
TICKS = os.sysconf("SC_CLK_TCK")

Run = Callable[[list[list[int]], int, int], Awaitable[float]]
"""(prompts, tokens, seed) -> median seconds to the first token, or nan."""


def prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """``count`` different chat prompts of about 25 tokens."""
    question = "Write {} short sentences about {} for a child of {} years."
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return [
        tokenizer.encode(text.format(2 + i % 3, SUBJECTS[i % len(SUBJECTS)], 4 + i // len(SUBJECTS)))
        for i in range(count)
    ]


def tree(pid: int) -> list[int]:
    """This process and every one below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += tree(int(child))
    return found


def cpu_seconds() -> float:
    """User and system time of this process and every living one below it."""
    total = 0.0
    for pid in tree(os.getpid()):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / TICKS
    return total


def peak_bytes() -> int:
    """Sum of the peak resident memory of this process and every living one below it."""
    total = 0
    for pid in tree(os.getpid()):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                total += int(line.split()[1]) * 1024
    return total


def first_token(beginnings: list[float], start: float) -> float:
    return statistics.median(b - start for b in beginnings) if beginnings else float("nan")


async def ours(args: argparse.Namespace) -> Run:
    """An engine of the port: native, or vLLM behind it."""
    from palestra.models.tensors import load_tensors
    from palestra.rollouts.base import GenerateRequest
    from palestra.types import SamplingParams, Version
    from palestra.weights.manifests import full_manifest

    if args.engine == "native":
        from palestra.rollouts.native.engine import NativeEngine

        engine: Any = NativeEngine(
            args.model, dtype=args.dtype, threads=args.threads, max_running=args.most, eos_token_ids=()
        )
    else:
        from palestra.rollouts.served.vllm import VllmEngine, default_python

        engine = VllmEngine(
            args.model, python=default_python(), dtype=args.dtype, threads=args.threads,
            max_running=args.most, context_tokens=2048, cache_gb=4, eos_token_ids=(),
        )  # fmt: skip
    tensors = load_tensors(args.model)
    await engine.start(full_manifest(Version("benchmark", 0), tensors.items()), tensors.items())
    del tensors

    async def run(batch: list[list[int]], tokens: int, seed: int) -> float:
        beginnings: dict[int, float] = {}
        start = time.perf_counter()

        async def one(index: int, ids: list[int]) -> None:
            def hear(*_: object) -> None:
                beginnings.setdefault(index, time.perf_counter())

            request = GenerateRequest(tuple(ids), SamplingParams(max_new_tokens=tokens, seed=seed + index))
            done = await engine.generate(request, hear)
            assert len(done.token_ids) == tokens

        await asyncio.gather(*(one(index, ids) for index, ids in enumerate(batch)))
        return first_token(list(beginnings.values()), start)

    return run


async def theirs(args: argparse.Namespace) -> Run:
    """``transformers.generate`` on a padded batch, or its continuous batching."""
    import torch
    import transformers

    from palestra.models.dtypes import TORCH_DTYPES

    torch.set_num_threads(args.threads)
    kind = "paged|sdpa" if args.engine == "continuous" else "sdpa"
    network = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=TORCH_DTYPES[args.dtype], attn_implementation=kind
    ).eval()
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}

    async def padded(batch: list[list[int]], tokens: int, seed: int) -> float:
        torch.manual_seed(seed)
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
        with torch.inference_mode():
            network.generate(
                ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, **sampling
            )
        return float("nan")

    async def continuous(batch: list[list[int]], tokens: int, seed: int) -> float:
        wanted = transformers.GenerationConfig(max_new_tokens=tokens, eos_token_id=-1, **sampling)
        limits = transformers.generation.ContinuousBatchingConfig(
            num_blocks=2 * args.most, max_batch_tokens=4096, max_memory_percent=0.3, seed=seed % 2**31
        )
        done = network.generate_batch(
            inputs=batch, generation_config=wanted, continuous_batching_config=limits, progress_bar=False
        )
        assert all(len(answer.generated_tokens) == tokens for answer in done.values())
        return float("nan")

    return continuous if args.engine == "continuous" else padded


async def serve(args: argparse.Namespace) -> None:
    run = await (ours(args) if args.engine in ("native", "vllm") else theirs(args))
    tokenizer = Tokenizer.from_folder(args.model)
    print(json.dumps({"ready": args.engine}), flush=True)
    for line in iter(sys.stdin.readline, ""):
        asked = json.loads(line)
        batch = prompts(tokenizer, asked["count"])
        cpu, wall = cpu_seconds(), time.perf_counter()
        first_s = await run(batch, asked["tokens"], asked["seed"])
        answer = {
            "cpu_s": cpu_seconds() - cpu,
            "wall_s": time.perf_counter() - wall,
            "first_s": first_s,
            "peak_bytes": peak_bytes(),
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=["native", "generate", "continuous", "vllm"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--most", type=int, default=64)
    asyncio.run(serve(parser.parse_args()))
