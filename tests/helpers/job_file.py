"""A job file as a user would write it, and the command that trains it in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = """
import time, zlib
import palestra as pa

def reward(task, reply):
    time.sleep({delay})
    return zlib.crc32(reply.encode()) / 2**32

def tasks(name, count):
    return [pa.Task(prompt=f"{{name}} {{i}}") for i in range(count)]

job = pa.Job(
    model={model!r},
    environment=pa.SingleTurn(tasks("question", 7), reward, evaluation_tasks=tasks("held out", 2)),
    name={name!r}, runs_dir={runs!r}, steps={steps}, prompts_per_step=2, threads=1,
    algorithm=pa.GRPO(group_size=3), sampling=pa.Sampling(max_new_tokens=5),
    optimizer=pa.Optimizer(learning_rate=1e-3), checkpoints=pa.Checkpoints(every_steps={every}, keep=2),
    evaluation=pa.Evaluation(samples_per_task=1),
)
"""


def write_job(
    folder: Path, model: Path, *, name: str = "run", steps: int = 6, every: int = 2, delay: float = 0.0
) -> Path:
    """Write the job file into ``folder``; its runs go to ``folder/runs``."""
    path = folder / f"{name}_job.py"
    runs = str(folder / "runs")
    path.write_text(
        SOURCE.format(model=str(model), name=name, runs=runs, steps=steps, every=every, delay=delay)
    )
    return path


def command(job: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "palestra", "train", str(job), *flags]


def start(job: Path, *flags: str) -> subprocess.Popen[str]:
    """The training command, in a process group of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    return subprocess.Popen(
        command(job, *flags), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, env=environment, cwd=job.parent,
    )  # fmt: skip


def finish(job: Path, *flags: str, timeout_s: float = 110) -> tuple[int, str]:
    """Run the command to its end: exit code and everything it printed."""
    child = start(job, *flags)
    output, _ = child.communicate(timeout=timeout_s)
    return child.returncode, output
