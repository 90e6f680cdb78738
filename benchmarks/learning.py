"""Does it learn, and how surely: the quick start over several seeds, as a Markdown table.

    python benchmarks/learning.py --seeds 0 1 2 --runs-dir runs/learning

Each seed is a whole run (other draws, other samples; the held-out tasks are the same). A seed that is
already finished in the runs directory is read, not run again. The table of docs/learning.md is this output.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import time
from pathlib import Path
from typing import Any

from palestra.recipes.quickstart import expressions_job, python_job
from palestra.records.reader import RunReader
from palestra.run import Run, train
from palestra.settings import resolve


def shown(interval: dict[str, Any] | None) -> str:
    if interval is None:
        return "-"
    return f"{interval['mean']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"


def row(seed: int, run: Run, wall_s: float) -> str:
    reader: RunReader = run.records
    evals = {e["when"]: e for e in reader.evals()}
    before, after = evals["before"], evals["after"]
    rewards = [value for _, value in reader.series("reward/mean")]
    steps = sum(value for _, value in reader.series("time/step_s"))
    apart = "no" if after["sampled"]["low"] <= before["sampled"]["high"] else "yes"
    return (
        f"| {seed} | {rewards[0]:.3f} -> {rewards[-1]:.3f} "
        f"| {shown(before['sampled'])} | {shown(after['sampled'])} "
        f"| {apart} | {shown(before['greedy'])} | {shown(after['greedy'])} | {steps:.0f} | {wall_s:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--task", choices=["python", "expressions"], default="python")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/learning"))
    parser.add_argument("--set", action="append", default=[], dest="sets")
    options = parser.parse_args()
    rows: list[str] = []
    for seed in options.seeds:
        job = python_job() if options.task == "python" else expressions_job()
        sets = [
            *options.sets,
            f"seed={seed}",
            f"name={options.task}-seed{seed}",
            f"runs_dir={options.runs_dir}",
        ]
        started = time.perf_counter()
        run = train(resolve(job, sets=sets), panel=False)
        rows.append(row(seed, run, time.perf_counter() - started))
        print(rows[-1], flush=True)
    print(f"\n{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} logical cores")
    print(f"peak memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB\n")
    print(
        "| seed | training reward, first -> last step | held-out sampled, before | after | intervals apart "
        "| held-out greedy, before | after | seconds in steps | seconds in all |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
