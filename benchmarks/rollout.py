"""Tokens per CPU-second of the native engine beside what else runs on this machine, interleaved in one run.

    python benchmarks/rollout.py MODEL_FOLDER --tokens 32 --concurrency 1 8 32 64 --rounds 5

Each engine lives in a process of its own (benchmarks/rollout_engines/subject.py): native,
`transformers.generate`, its continuous batching, and vLLM behind our port where it is
installed (docs/engines.md). CPU-seconds are user and system time of the process and of
all it started. The machine's own limits are measured in the same run: at one request
the weights' bytes over the memory's bandwidth, above it the engine's matrix products alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from palestra.models.config import ModelConfig
from palestra.models.dtypes import TORCH_DTYPES
from palestra.models.tensors import load_tensors
from palestra.rollouts.base import GenerateRequest
from palestra.rollouts.native.engine import NativeEngine
from palestra.rollouts.native.kernels import missing_because
from palestra.rollouts.native.linears import LinearOps
from palestra.types import SamplingParams, Version
from palestra.weights.manifests import full_manifest

HERE = Path(__file__).parent
ENGINES = ("native", "generate", "continuous", "vllm")


class Subject:
    """One engine's process."""

    def __init__(self, engine: str, args: argparse.Namespace) -> None:
        script = HERE / "rollout_engines" / "subject.py"
        command = [sys.executable, str(script), engine, str(args.model), "--threads", str(args.threads)]
        command += ["--dtype", args.dtype, "--most", str(max(args.concurrency))]
        environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env=environment,
        )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        """The next line that is an answer; engines print other things too. RuntimeError if it ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"it ended with exit status {self._process.wait()}")

    def run(self, count: int, tokens: int, seed: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"count": count, "tokens": tokens, "seed": seed}) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.terminate()
        self._process.wait()


def product_ceiling(config: ModelConfig, ops: LinearOps, rows: int, rounds: int = 3) -> float:
    """Tokens per CPU-second if a step were its matrix products and nothing else."""
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


def bandwidth_ceiling(config: ModelConfig, dtype: torch.dtype, rounds: int = 5) -> float:
    """Tokens per CPU-second if one request's step were reading the weights once and nothing else."""
    kept = 2 * (config.heads + config.kv_heads) * config.head_dim * config.hidden_size
    layer = kept + 3 * config.intermediate_size * config.hidden_size
    nbytes = (config.layers * layer + config.vocab_size * config.hidden_size) * dtype.itemsize
    memory = torch.ones(2**27)  # 512 MiB: no cache holds it
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        memory.sum()
        best = min(best, time.process_time() - start)
    return memory.nbytes / best / nbytes


async def group_prefill(args: argparse.Namespace) -> dict[str, float]:
    """CPU-seconds of eight samples' first tokens after one prompt of 500, together and one by one."""
    engine = NativeEngine(args.model, dtype=args.dtype, threads=args.threads, eos_token_ids=())
    tensors = load_tensors(args.model)
    await engine.start(full_manifest(Version("benchmark", 0), tensors.items()), tensors.items())

    async def cost(first: int, members: int) -> float:
        prompts = [tuple((first + i * 7) % 40_000 + 100 for i in range(500)) for _ in range(members)]
        start = time.process_time()
        await asyncio.gather(
            *(
                engine.generate(GenerateRequest(prompt, SamplingParams(max_new_tokens=1, seed=i)))
                for i, prompt in enumerate(prompts)
            )
        )
        return time.process_time() - start

    await cost(0, 1)
    alone = statistics.median([await cost(1 + i, 1) for i in range(3)])
    group = statistics.median([await cost(11 + i, 8) for i in range(3)])
    await engine.close()
    return {"one_s": alone, "group_of_8_s": group}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    subjects: dict[str, Subject] = {}
    skipped: dict[str, str] = {}
    for name in args.engines:
        subject = Subject(name, args)
        try:
            subject.answer()
            subject.run(min(args.concurrency), 2, 0)
            subjects[name] = subject
        except RuntimeError as error:
            skipped[name] = str(error)
    found: dict[str, dict[int, list[dict[str, Any]]]] = {name: {} for name in subjects}
    for round_index in range(args.rounds):
        for count in args.concurrency:
            for name, subject in subjects.items():
                answer = subject.run(count, args.tokens, 1000 * round_index)
                answer["rate"] = count * args.tokens / answer["cpu_s"]
                found[name].setdefault(count, []).append(answer)
    for subject in subjects.values():
        subject.close()
    config = ModelConfig.from_folder(args.model)
    ops = LinearOps.best(TORCH_DTYPES[args.dtype], args.threads)
    with torch.inference_mode():
        ceilings = {count: product_ceiling(config, ops, count) for count in args.concurrency}
        ceilings[1] = min(ceilings.get(1, float("inf")), bandwidth_ceiling(config, ops.dtype))
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": args.threads,
        "dtype": args.dtype,
        "prepacked": ops.packed,
        "kernels": missing_because() or "C",
        "tokens": args.tokens,
        "rounds": args.rounds,
        "load_average": os.getloadavg()[0],
        "skipped": skipped,
        "group": asyncio.run(group_prefill(args)),
        "ceilings": ceilings,
        "found": found,
    }


def rows_of(report: dict[str, Any]) -> list[list[str]]:
    """One line per concurrency and engine, native first."""
    rows: list[list[str]] = []
    for count, ceiling in report["ceilings"].items():
        for name, by_count in report["found"].items():
            answers = by_count.get(count)
            if not answers:
                continue
            base = report["found"]["native"][count] if "native" in report["found"] else answers
            rate = statistics.median(a["rate"] for a in answers)
            ratio = statistics.median(b["rate"] / a["rate"] for a, b in zip(answers, base, strict=True))
            first = statistics.median(a["first_s"] for a in answers)
            rows.append(
                [
                    str(count),
                    name,
                    f"{rate:.1f}",
                    "" if name == "native" else f"{ratio:.2f}x",
                    f"{rate / ceiling:.0%}",
                    "-" if first != first else f"{first:.2f}",
                    f"{max(a['peak_bytes'] for a in answers) / 2**30:.1f}",
                ]
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--json", action="store_true")
    report = measure(args := parser.parse_args())
    if args.json:
        print(json.dumps(report, indent=2))
        return
    print(", ".join(f"{k} {v}" for k, v in report.items() if k not in ("found", "ceilings", "group")))
    header = ["concurrency", "engine", "tokens/CPU-s", "native is", "of limit", "first token s", "peak GiB"]
    print("".join(f"{title:>14}" for title in header))
    for row in rows_of(report):
        print("".join(f"{cell:>14}" for cell in row))
    group = report["group"]
    ratio = group["group_of_8_s"] / group["one_s"]
    print(f"first tokens of 8 samples after one prompt of 500: {ratio:.2f}x the CPU time of one sample")


if __name__ == "__main__":
    main()
