"""What a user declares: one Job, at most 60 settings, each with a unit and a working default.

A Job is data. Building one imports no torch, reads no file and starts nothing;
wrong values raise one ConfigError that names all of them with the caller's line.
Values that cannot work together (`conflicts`) are refused twice: when they were
written side by side, and again when `palestra.settings` has laid files, environment
and ``--set`` over them. Nothing here can be changed once built.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from palestra.environments.base import Environment, check_declaration
from palestra.errors import TaskError
from palestra.fields import (
    Flag,
    Folder,
    Real,
    Section,
    Strings,
    Text,
    Whole,
    leaves,
    setting,
    short_path,
    show,
)
from palestra.presets import Algorithm, algorithm_conflicts
from palestra.sandboxes.base import SandboxSpec

if TYPE_CHECKING:
    from palestra.run import Run

Dtype = Literal["auto", "fp32", "bf16"]
MAX_SEED = 2**63 - 1
MAX_EPISODES = 100_000
_NO_GREEDY = (
    "at temperature 0 all samples of a group are equal, so every advantage would be 0; "
    "evaluation.greedy measures greedy answers"
)


class Sampling(Section):
    """How completions are sampled while training."""

    max_new_tokens: Whole = setting(128, "Longest reply in one turn", "tokens", ge=1)
    temperature: Real = setting(1.0, "Divides the logits before sampling", "factor", gt=0, why=_NO_GREEDY)
    top_p: Real = setting(1.0, "Sample from the fewest tokens that reach this probability; 1 is off",
                          "probability", gt=0, le=1)  # fmt: skip
    top_k: Whole = setting(0, "Sample from this many likeliest tokens; 0 is off", "tokens", ge=0)
    stop: Strings = setting((), "Strings that end a reply; they are kept in it", "strings")


class Optimizer(Section):
    """AdamW and its learning rate over the run."""

    learning_rate: Real = setting(1e-5, "Peak learning rate", "per update", gt=0, le=1,
                                  why="at 0 no weight would change; above 1 every model breaks")  # fmt: skip
    beta1: Real = setting(0.9, "Decay of the gradient's running mean", "per update", ge=0, lt=1)
    beta2: Real = setting(0.95, "Decay of the squared gradient's running mean", "per update", ge=0, lt=1)
    epsilon: Real = setting(1e-8, "Added to the root of the squared gradient's mean", "gradient", gt=0)
    weight_decay: Real = setting(0.0, "Decoupled weight decay, times the learning rate", "per update", ge=0)
    grad_clip: Real = setting(1.0, "Largest global L2 norm of a gradient; longer ones are scaled to it",
                              "gradient norm", gt=0)  # fmt: skip
    warmup_steps: Whole = setting(0, "Steps over which the learning rate rises to its peak", "steps", ge=0)
    schedule: Literal["constant", "linear", "cosine"] = setting(
        "constant", "The learning rate after warm-up: constant, or falling towards 0 at the last step", "name"
    )


class TrainerConfig(Section):
    """Forward, backward and update."""

    dtype: Dtype = setting(
        "auto", "Number type of the computation; masters are always fp32; auto measures", "name"
    )
    micro_batch_tokens: Whole = setting(
        512, "Tokens that go through the model at once; the loss differs by rounding only", "tokens", ge=1
    )
    max_skipped_updates: Whole = setting(
        3, "Updates in a row that may be skipped for a gradient that is not finite, before the run stops",
        "updates", ge=0,
    )  # fmt: skip
    lora: Text = setting(
        "", "Train low-rank adapters beside frozen weights, as RANK, RANK:ALPHA or RANK:ALPHA:LAYER,LAYER; "
        "empty trains every weight", "rank:factor:names",
        pattern=r"^([1-9]\d*(:\d*\.?\d+(:[A-Za-z0-9_]+(,[A-Za-z0-9_]+)*)?)?)?$",
        words="nothing, or as in 16, 16:32 or 16:32:q_proj,v_proj",
    )  # fmt: skip

    def adapter(self) -> tuple[int, float, tuple[str, ...]]:
        """Rank (0 is none), alpha (twice the rank if not given) and the layers (none named is all)."""
        rank, _, rest = self.lora.partition(":")
        alpha, _, layers = rest.partition(":")
        whole = int(rank or 0)
        return whole, float(alpha or 2 * whole), tuple(filter(None, layers.split(",")))


class EngineConfig(Section):
    """The rollout engine."""

    dtype: Dtype = setting("auto", "Number type of the rollout weights; auto measures", "name")
    max_running: Whole = setting(64, "Completions sampled at once; more of them wait", "completions", ge=1)
    context_tokens: Whole = setting(
        0, "Longest prompt and reply together; 0 is the model's limit", "tokens", ge=0
    )
    cache_mb: Whole = setting(
        0, "Keys and values of all completions at once; 0 is what fits an eighth of the free memory",
        "MiB", ge=0,
    )  # fmt: skip


class SandboxConfig(Section):
    """What one sandbox of this run may use. There is never a network."""

    memory_mb: Whole = setting(256, "Address space of each process", "MiB", ge=16)
    scratch_mb: Whole = setting(16, "Size of the private /tmp; it counts as memory", "MiB", ge=1)
    time_s: Real = setting(5.0, "Longest one program may run", "seconds", gt=0)
    processes: Whole = setting(1, "Processes and threads at once, the first included", "processes", ge=1)
    output_kb: Whole = setting(64, "Standard output and error together", "KiB", ge=1)
    concurrency: Whole = setting(2, "Sandboxes that run at once; more of them wait", "sandboxes", ge=1)

    def spec(self) -> SandboxSpec:
        """The same limits as the sandbox port takes them."""
        return SandboxSpec(self.memory_mb, self.scratch_mb, self.time_s, self.processes, self.output_kb)


class Evaluation(Section):
    """Reward on the environment's held-out tasks."""

    every_steps: Whole = setting(
        0, "Evaluate after every so many steps; 0 is only before and after", "steps", ge=0
    )
    tasks: Whole = setting(0, "Held-out tasks to use, the first ones; 0 is all", "tasks", ge=0)
    samples_per_task: Whole = setting(4, "Samples of each held-out task; 0 is none", "samples", ge=0)
    greedy: Flag = setting(True, "Also measure one greedy answer to each task", "yes or no")
    before: Flag = setting(True, "Evaluate the starting model", "yes or no")
    after: Flag = setting(True, "Evaluate the trained model", "yes or no")


class Checkpoints(Section):
    """What the same command continues from."""

    every_steps: Whole = setting(5, "Save after every so many steps, and after the last", "steps", ge=1)
    keep: Whole = setting(2, "Newest checkpoints that stay on disk", "checkpoints", ge=1,
                          why="the newest checkpoint is what a run resumes from")  # fmt: skip


class Deadlines(Section):
    """Nested: a reward ends within its episode, an episode within its step."""

    step_s: Real = setting(1800.0, "Longest that one step's sampling and rewards may take", "seconds", gt=0)
    episode_s: Real = setting(600.0, "Longest episode; a longer one abstains", "seconds", gt=0)
    reward_s: Real = setting(
        30.0, "Longest reward computation, waits for sandboxes not counted", "seconds", gt=0
    )


class Limits(Section):
    """When a run stops itself."""

    max_starved_steps: Whole = setting(
        5, "Steps in a row in which no group had any signal, before the run stops", "steps", ge=1
    )


class Job(Section):
    """What to train, on what, and how. A section is given as its class or as a dict:

    ``Job(model="./m", environment=env, algorithm=pa.GRPO(group_size=4), optimizer={"learning_rate": 3e-5})``
    """

    model: Text = Field(
        min_length=1,
        description="The model to start from: a folder, a hub id or pypi:NAME==VERSION [source]",
        json_schema_extra={"unit": "source", "words": "a model: ./FOLDER, ORG/NAME or pypi:NAME==VERSION"},
    )
    environment: Environment = Field(
        description="Tasks, episodes and rewards; only Python can give it [object]",
        json_schema_extra={"unit": "object"},
    )
    name: Text = setting(
        "", "The run's name and its folder in runs_dir; empty is the job file's name", "name",
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$",
        words="letters, digits, '.', '_' and '-', beginning with a letter or digit",
    )  # fmt: skip
    runs_dir: Folder = setting(Path("runs"), "Where runs are kept", "folder")
    seed: Whole = setting(0, "Everything random follows from it", "number", ge=0, le=MAX_SEED)
    steps: Whole = setting(20, "Optimiser updates in the whole run", "steps", ge=1)
    prompts_per_step: Whole = setting(8, "Different prompts in each step", "prompts", ge=1)
    chat_template: Text = setting(
        "auto", "auto is the model's own, none is raw text; else a file or the template itself", "template",
        min_length=1, words="auto, none, a file or the template itself",
    )  # fmt: skip
    threads: Whole = setting(0, "Processor threads for the model; 0 is all cores", "threads", ge=0)
    algorithm: Algorithm = Algorithm()
    sampling: Sampling = Sampling()
    optimizer: Optimizer = Optimizer()
    trainer: TrainerConfig = TrainerConfig()
    engine: EngineConfig = EngineConfig()
    sandbox: SandboxConfig = SandboxConfig()
    evaluation: Evaluation = Evaluation()
    checkpoints: Checkpoints = Checkpoints()
    deadlines: Deadlines = Deadlines()
    limits: Limits = Limits()

    def train(self, steps: int | None = None, *, wait: bool = True, panel: bool | None = None) -> Run:
        """Train, or continue the run of this name; returns its handle.

        Files, environment variables and ``palestra train --set`` lie over what Python
        wrote; ``steps`` counts as written in Python. ``wait=False`` returns at once;
        ``panel`` forces the live panel on or off (None: on where there is a terminal).
        """
        from palestra import settings  # it imports this module

        layers = settings.active()
        resolved = settings.for_training(self, layers, steps=steps)
        from palestra.run import train  # the one upward arrow: it knows every room

        run = train(resolved, wait=wait, panel=panel if layers.panel is None else layers.panel)
        layers.runs.append(run)
        return run

    @classmethod
    def _disagreements(cls, values: Mapping[str, Any]) -> list[str]:
        clashes = conflicts({**defaults(), **values})
        found = [clash.text for clash in clashes if values.keys() >= set(clash.keys)]
        return found + _undeclared(values.get("environment"))


def _undeclared(environment: Environment | None) -> list[str]:
    """What an environment's class lacks: said where the job is built, not after a model was loaded."""
    try:
        if environment is not None:
            check_declaration(environment)
    except TaskError as error:
        file, _, line = error.where.rpartition(":")
        place = f" ({short_path(file)}:{line})" if file else ""
        return [f"environment: {error.what}{place}; expected {error.expected}"]
    return []


def defaults() -> dict[str, Any]:
    """Every setting that has a default, by dotted key."""
    return {key: leaf.default for key, leaf in leaves(Job).items() if not leaf.info.is_required()}


def default_name(job: Job, job_file: Path | None) -> str:
    """A run's name where none was given: the job file's stem, or the environment's class in snake case."""
    kind = type(job.environment).__name__
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", kind).lower()
    for candidate in (job_file.stem if job_file else "", snake):
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", candidate).lstrip("._-")
        if name:
            return name
    return "run"


@dataclass(frozen=True, slots=True)
class Conflict:
    """Values that are valid one by one and cannot work together."""

    keys: tuple[str, ...]
    text: str


def conflicts(values: Mapping[str, Any]) -> list[Conflict]:
    """Every conflict among the settings' values (dotted keys, all settings with a default present)."""
    found: list[Conflict] = []

    def check(broken: bool, keys: tuple[str, ...], text: str) -> None:
        if broken:
            found.append(Conflict(keys, text))

    steps, warmup = values["steps"], values["optimizer.warmup_steps"]
    check(
        warmup > steps,
        ("optimizer.warmup_steps", "steps"),
        f"optimizer.warmup_steps ({warmup}) is above steps ({steps}), so the learning rate would never reach "
        f"its peak; nearest: warmup_steps at most {steps}, or steps at least {warmup}",
    )
    episodes = values["prompts_per_step"] * values["algorithm.group_size"]
    check(
        episodes > MAX_EPISODES,
        ("prompts_per_step", "algorithm.group_size"),
        f"prompts_per_step times algorithm.group_size is {episodes} episodes a step; "
        f"nearest: at most {MAX_EPISODES}",
    )
    found.extend(Conflict(keys, text) for keys, text in algorithm_conflicts(values))
    found.extend(_deadline_conflicts(values))
    context, new = values["engine.context_tokens"], values["sampling.max_new_tokens"]
    check(
        0 < context <= new,
        ("engine.context_tokens", "sampling.max_new_tokens"),
        f"engine.context_tokens ({context}) leaves no room for a prompt "
        f"before sampling.max_new_tokens ({new}); "
        + (f"nearest: max_new_tokens at most {context - 1}, or " if context > 1 else "nearest: ")
        + f"context_tokens above {new}, or 0 for the model's limit",
    )
    asked = values["evaluation.before"] or values["evaluation.after"] or values["evaluation.every_steps"] > 0
    check(
        bool(asked) and values["evaluation.samples_per_task"] == 0 and not values["evaluation.greedy"],
        ("evaluation.samples_per_task", "evaluation.greedy"),
        "evaluation.samples_per_task is 0 and evaluation.greedy is false, so an evaluation would measure "
        "nothing; nearest: samples_per_task 1, or greedy true, or no evaluation: before and after false",
    )
    return found


_NESTED = (
    ("deadlines.reward_s", "deadlines.episode_s", "a reward is computed inside its episode"),
    ("deadlines.episode_s", "deadlines.step_s", "an episode runs inside its step"),
)
_PROGRAM = "a sandboxed program runs inside its episode"


def _deadline_conflicts(values: Mapping[str, Any]) -> list[Conflict]:
    """One deadline tree: what runs inside something must end before it.

    A program's time counts where somebody set it: the default says nothing where there is no sandbox.
    """
    timed = [(inner, inner, values[inner], outer, why) for inner, outer, why in _NESTED]
    own = getattr(values.get("environment"), "sandbox", None)
    if isinstance(own, SandboxSpec):  # it takes the place of the job's
        timed.append(
            ("environment", "the environment's sandbox.time_s", own.time_s, "deadlines.episode_s", _PROGRAM)
        )
    elif values["sandbox.time_s"] != SandboxConfig().time_s:
        key = "sandbox.time_s"
        timed.append((key, key, values[key], "deadlines.episode_s", _PROGRAM))
    return [
        Conflict(
            (key, outer),
            f"{inner} ({show(inner_s)} s) is not below {outer} ({show(values[outer])} s): {why}; "
            f"nearest: {inner} below {show(values[outer])}, or {outer} above {show(inner_s)}",
        )
        for key, inner, inner_s, outer, why in timed
        if not inner_s < values[outer]
    ]
