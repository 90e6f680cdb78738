"""Tokens per CPU-second of the native engine and of transformers.generate, interleaved in one run.

    python benchmarks/rollout.py MODEL_FOLDER --tokens 32 --concurrency 1 8 32 64 --rounds 5

Both sample the same prompts at temperature 1 with the end token ignored, so both
compute exactly ``tokens`` tokens for each prompt. The engine returns a logprob and
a version with each token; transformers is not asked for logprobs unless
``--baseline-logprobs`` is given. CPU-seconds are user and system time of the whole
process. The machine's own limit is the engine's matrix products alone on the same
row counts, timed in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from palestra.models.dtypes import TORCH_DTYPES, DtypeName
from palestra.models.tensors import load_tensors
from palestra.models.tokenizer import Tokenizer
from palestra.rollouts.base import GenerateRequest
from palestra.rollouts.native.engine import NativeEngine
from palestra.rollouts.native.linears import LinearOps
from palestra.types import SamplingParams, Version
from palestra.weights.manifests import full_manifest

SUBJECTS = ("a river", "the sea", "bread", "a clock", "snow", "a bridge", "tea", "a violin")


@dataclass
class Rates:
    """Tokens per CPU-second of each round, by concurrency."""

    ours: dict[int, list[float]] = field(default_factory=dict)
    baseline: dict[int, list[float]] = field(default_factory=dict)


def prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """``count`` different chat prompts of about 25 tokens."""
    question = "Write {} short sentences about {} for a child of {} years."
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return [
        tokenizer.encode(text.format(2 + i % 3, SUBJECTS[i % len(SUBJECTS)], 4 + i // len(SUBJECTS)))
        for i in range(count)
    ]


async def cpu_seconds(work: Callable[[], Awaitable[object]]) -> float:
    start = time.process_time()
    await work()
    return time.process_time() - start


async def started_engine(folder: Path, dtype: DtypeName, threads: int, slots: int) -> NativeEngine:
    engine = NativeEngine(folder, dtype=dtype, threads=threads, max_running=slots, eos_token_ids=())
    tensors = load_tensors(folder)
    await engine.start(full_manifest(Version("benchmark", 0), tensors.items()), tensors.items())
    return engine


async def run_engine(engine: NativeEngine, batch: list[list[int]], tokens: int, seed: int) -> None:
    requests = [
        GenerateRequest(tuple(ids), SamplingParams(max_new_tokens=tokens, seed=seed + i))
        for i, ids in enumerate(batch)
    ]
    done = await asyncio.gather(*(engine.generate(request) for request in requests))
    assert all(len(completion.token_ids) == tokens for completion in done)


async def run_transformers(network: Any, batch: list[list[int]], tokens: int, logprobs: bool) -> None:
    width = max(map(len, batch))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in batch])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
    with torch.inference_mode():
        done = network.generate(
            ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0,
            max_new_tokens=tokens, min_new_tokens=tokens, output_logits=logprobs,
            return_dict_in_generate=True,
        )  # fmt: skip
        if logprobs:
            network.compute_transition_scores(done.sequences, done.logits, normalize_logits=True)


def product_ceiling(engine: NativeEngine, rows: int, rounds: int = 3) -> float:
    """Tokens per CPU-second if a step were its matrix products and nothing else."""
    config = engine._config
    ops = LinearOps.best(engine._ops.dtype, engine._threads)
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes = [
        (queries + 2 * keys, config.hidden_size),
        (config.hidden_size, queries),
        (2 * config.intermediate_size, config.hidden_size),
        (config.hidden_size, config.intermediate_size),
    ]
    # Every layer has its own weights: they must come from memory, as in a real step.
    layers = [
        [ops.make(torch.randn(shape, dtype=ops.dtype)) for shape in shapes] for _ in range(config.layers)
    ]
    head = ops.make(torch.randn(config.vocab_size, config.hidden_size, dtype=ops.dtype))
    inputs = [torch.randn(ops.padded(rows), inner, dtype=ops.dtype) for _, inner in shapes]
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        for layer in layers:
            for linear, x in zip(layer, inputs, strict=True):
                linear(x)
        head(inputs[0])
        best = min(best, time.process_time() - start)
    return rows / best


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    dtype: DtypeName = args.dtype
    torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.from_folder(args.model)
    engine = await started_engine(args.model, dtype, args.threads, max(args.concurrency))
    network = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=TORCH_DTYPES[dtype]).eval()
    rates = Rates()
    for round_index in range(-1, args.rounds):
        for count in args.concurrency:
            batch = prompts(tokenizer, count)
            tokens = 2 if round_index < 0 else args.tokens
            ours = await cpu_seconds(lambda b=batch, t=tokens, s=round_index: run_engine(engine, b, t, s))
            theirs = await cpu_seconds(
                lambda b=batch, t=tokens: run_transformers(network, b, t, args.baseline_logprobs)
            )
            if round_index >= 0:
                rates.ours.setdefault(count, []).append(count * tokens / ours)
                rates.baseline.setdefault(count, []).append(count * tokens / theirs)
    with torch.inference_mode():
        ceilings = {count: product_ceiling(engine, count) for count in args.concurrency}
    await engine.close()
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": args.threads,
        "dtype": dtype,
        "prepacked": engine._ops.packed,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "load_average": os.getloadavg()[0],
        "rows": [
            {
                "concurrency": count,
                "ours": statistics.median(rates.ours[count]),
                "transformers": statistics.median(rates.baseline[count]),
                "ratio": statistics.median(
                    a / b for a, b in zip(rates.ours[count], rates.baseline[count], strict=True)
                ),
                "products_only": ceilings[count],
            }
            for count in args.concurrency
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--baseline-logprobs", action="store_true")
    parser.add_argument("--json", action="store_true")
    report = asyncio.run(measure(args := parser.parse_args()))
    if args.json:
        print(json.dumps(report, indent=2))
        return
    print(", ".join(f"{name} {value}" for name, value in report.items() if name != "rows"))
    print(f"{'concurrency':>11} {'ours':>9} {'transformers':>13} {'ratio':>7} {'products':>9} {'share':>6}")
    for row in report["rows"]:
        share = row["ours"] / row["products_only"]
        print(
            f"{row['concurrency']:>11} {row['ours']:>9.1f} {row['transformers']:>13.1f} "
            f"{row['ratio']:>6.2f}x {row['products_only']:>9.1f} {share:>6.0%}"
        )


if __name__ == "__main__":
    main()
