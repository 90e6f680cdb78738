"""The real command and a tiny model: stopped once, continued by the same words, seen by the other verbs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.tiny import make_tiny_model

JOB = """\
import palestra as pa

def reward(task, reply):
    return float(len(set(reply)) % 3) / 2

tasks = [pa.Task(prompt=f"say {n}") for n in range(6)]
job = pa.Job(
    model="./model",
    environment=pa.SingleTurn(tasks, reward=reward),
    steps=400,
    prompts_per_step=2,
    algorithm=pa.GRPO(group_size=4),
    sampling={"max_new_tokens": 4},
    evaluation={"before": False, "after": False},
    limits={"max_starved_steps": 400},
    threads=1,
)
"""


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PALESTRA_")}
    return subprocess.Popen(
        [sys.executable, "-m", "palestra.cli.main", *words],
        cwd=folder, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


def wait_for_steps(path: Path, process: subprocess.Popen[str]) -> None:
    while process.poll() is None:
        if any("reward/mean" in file.read_text() for file in path.glob("events/*/metrics-*.jsonl")):
            return
        time.sleep(0.05)
    pytest.fail(f"ended before its first step: {process.communicate()}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path / "model")
    (tmp_path / "tiny.py").write_text(JOB)
    return tmp_path


@pytest.mark.timeout(300)
def test_a_run_stopped_once_exits_4_and_the_same_command_finishes_it(folder: Path) -> None:
    first = start(folder, "train", "tiny.py", "--no-panel")
    wait_for_steps(folder / "runs" / "tiny", first)
    first.send_signal(signal.SIGINT)
    code, _, err = finish(first)
    assert code == 4, err
    code, out, _ = finish(start(folder, "runs", "show", "tiny", "--json"))
    stopped = json.loads(out)
    assert (code, stopped["state"]) == (0, "stopped")
    done = stopped["reward"][-1][0]
    assert stopped["checkpoints"][-1]["step"] == done

    code, out, err = finish(start(folder, "train", "tiny.py", "--json", "--steps", str(int(done) + 2)))
    assert code == 0, err
    (run,) = json.loads(out)["runs"]
    assert run["state"] == "finished"
    code, out, _ = finish(start(folder, "runs", "list", "--json"))
    (summary,) = json.loads(out)["runs"]
    assert (summary["step"], summary["attempts"]) == (done + 2, 2)


def test_a_job_without_its_model_says_so_and_starts_nothing(folder: Path) -> None:
    code, _, err = finish(start(folder, "train", "tiny.py", "--set", "model=./modle"))
    assert code == 3
    assert err.startswith("palestra: ")
    assert "./modle" in err
    assert "Traceback" not in err
