"""The quick start without a sandbox: complete a five-character expression that equals a number.

The model is given a target and a first digit (``24=3``) and writes the rest (``*7+3``):
the whole must be digit, operator, digit, operator, digit, with the operators + - * and
multiplication first. Replies are parsed by `evaluate` and never executed, so nothing that
a model writes can do anything. The model is made here: `prepare_model` trains a random one
on right answers until it is right often enough for RL to have something to prefer. That
warm-up sees every task; what `evaluation_tasks` holds out is held out of RL.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import shutil
import sys
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache as once
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from palestra.batches import Batch, LossSpec
from palestra.errors import MissingExtraError, ModelSourceError, TrainerError
from palestra.types import SamplingParams, Task, Version

if TYPE_CHECKING:
    from palestra.models.tokenizer import Tokenizer
    from palestra.rollouts.base import Engine

Say = Callable[[str], None]

DIGITS = "0123456789"
OPERATORS = "+-*"
ALPHABET = DIGITS + OPERATORS + "="
LENGTH = 5
"""Characters of an expression."""
REPLY_TOKENS = LENGTH
"""A right reply and its end token; whatever is longer is wrong."""

LARGEST_TARGET = 30
FEWEST_ANSWERS = 3
"""Beginnings with fewer answers are left out: samples rarely find them, and RL learns from what they find."""


@dataclass(frozen=True, slots=True, order=True)
class Beginning:
    """What the model is given: the target and the expression's first digit, as in ``24=3``."""

    target: int
    first: str

    @property
    def prompt(self) -> str:
        return f"{self.target}={self.first}"

    @property
    def held_out(self) -> bool:
        """Whether no RL task asks for it: one of five, spread over all targets and all first digits."""
        return (3 * self.target + int(self.first)) % 5 == 0


def evaluate(expression: str) -> int | None:
    """The value of digit, operator, digit, operator, digit; None for any other text."""
    if len(expression) != LENGTH:
        return None
    a, first, b, second, c = expression
    if not (a in DIGITS and b in DIGITS and c in DIGITS and first in OPERATORS and second in OPERATORS):
        return None
    if second == "*" and first != "*":
        return _apply(first, int(a), int(b) * int(c))
    return _apply(second, _apply(first, int(a), int(b)), int(c))


def _apply(operator: str, left: int, right: int) -> int:
    if operator == "+":
        return left + right
    return left - right if operator == "-" else left * right


@once
def answers() -> dict[Beginning, tuple[str, ...]]:
    """Every right reply to every beginning, in a fixed order."""
    found: dict[Beginning, list[str]] = {}
    for characters in product(DIGITS, OPERATORS, DIGITS, OPERATORS, DIGITS):
        text = "".join(characters)
        value = evaluate(text)
        if value is not None and 0 <= value <= LARGEST_TARGET:
            found.setdefault(Beginning(value, text[0]), []).append(text[1:])
    return {b: tuple(found[b]) for b in sorted(found) if len(found[b]) >= FEWEST_ANSWERS}


def tasks() -> list[Task]:
    """The RL tasks, in a fixed order."""
    return [_task(beginning) for beginning in answers() if not beginning.held_out]


def evaluation_tasks() -> list[Task]:
    """The beginnings that no RL task asks for."""
    return [_task(beginning) for beginning in answers() if beginning.held_out]


def _task(beginning: Beginning) -> Task:
    secret = {"target": beginning.target, "first": beginning.first}
    return Task(prompt=beginning.prompt, secret=secret, id=f"{beginning.target}-from-{beginning.first}")


def reward(task: Task, reply: str) -> float:
    """1 if the first digit and the reply together are an expression that equals the target, else 0."""
    return float(evaluate(task.secret["first"] + reply) == task.secret["target"])


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The model's size, and how it is trained before RL. Equal settings share one cached model."""

    layers: int = 4
    hidden: int = 128
    intermediate: int = 384
    heads: int = 4
    pairs_per_step: int = 128
    learning_rate: float = 1e-3
    ramp_steps: int = 20
    """Steps over which the learning rate rises from 0."""
    enough: float = 0.25
    """Sampled reward at which the warm-up ends. From far below, RL climbs slowly: few samples are right."""
    check_every: int = 25
    """Steps between two measurements."""
    samples_per_task: int = 2
    max_steps: int = 600
    threads: int = 0
    """CPU threads; 0 is all. Another number rounds differently, and so makes another model."""
    seed: int = 0

    @property
    def key(self) -> str:
        """12 hex digits over everything that the finished model depends on."""
        content = {"recipe": RECIPE, "alphabet": ALPHABET, "beginnings": len(answers()), **asdict(self)}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


RECIPE = 1
"""To be raised with any change of the code below that changes the model."""
RECORD = "warm_up.json"


def prepare_model(
    cache: Path | None = None, progress: Say | None = None, *, settings: WarmUp | None = None
) -> Path:
    """The folder of the warmed-up model, made by the first call in about 40 CPU-seconds.

    ``cache`` is $PALESTRA_CACHE or ~/.cache/palestra where it is None; ``progress`` hears
    short lines (None: standard error). A killed call leaves nothing that a later one would
    take for a model. Raises TrainerError if the model is not good enough in ``max_steps``.
    """
    try:
        from palestra.models.cache import build_folder, building, default_cache
        from palestra.models.folder import check_folder
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "torch") from error
    chosen, say = settings or WarmUp(), progress or _to_stderr
    root = (cache or default_cache()).expanduser().absolute()
    final = root / "models" / f"expressions-{chosen.key}"
    if not _is_whole(final):
        with building(final, say):
            if not _is_whole(final):
                build_folder(final, lambda folder: _make(folder, chosen, say))
                say(f"the model is ready in {final}")
    check_folder(final)
    return final


def _to_stderr(line: str) -> None:
    print(f"palestra: {line}", file=sys.stderr, flush=True)


def _is_whole(folder: Path) -> bool:
    """Whether the folder holds a finished model, byte for byte as it was written."""
    from palestra.models.config import read_json
    from palestra.models.folder import fingerprint

    if not folder.is_dir():
        return False
    try:
        recorded = read_json(folder / RECORD).get("files")
        return recorded == {name: list(mark) for name, mark in fingerprint(folder).items()}
    except (ModelSourceError, OSError):
        return False


def _make(folder: Path, settings: WarmUp, say: Say) -> None:
    from palestra.models.folder import fingerprint
    from palestra.models.scratch import make_character_model

    say("making a small character model and teaching it the task's form (once, about a minute)")
    start = make_character_model(
        folder / "start",
        alphabet=ALPHABET,
        layers=settings.layers,
        hidden=settings.hidden,
        intermediate=settings.intermediate,
        heads=settings.heads,
        max_positions=32,
        seed=settings.seed,
    )
    steps, right = asyncio.run(_warm_up(start, folder, settings, say))
    shutil.rmtree(start)
    record = {
        "schema": 1,
        "settings": asdict(settings),
        "steps": steps,
        "sampled_reward": right,
        "files": fingerprint(folder),
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")


async def _warm_up(start: Path, finished: Path, settings: WarmUp, say: Say) -> tuple[int, float]:
    """Train until it is good enough and save; how many steps it took, and the sampled reward then."""
    from palestra.models.tokenizer import Tokenizer
    from palestra.rollouts.native.engine import NativeEngine
    from palestra.trainer.settings import TrainerSettings
    from palestra.trainer.torch_trainer import TorchTrainer
    from palestra.weights.sync import WeightSync

    tokenizer = Tokenizer.from_folder(start)
    trainer = TorchTrainer(start, TrainerSettings(threads=settings.threads))
    engine = NativeEngine(start, dtype="fp32", threads=settings.threads, max_running=128)
    sync = WeightSync(trainer, engine, tuple(tokenizer.encode(ALPHABET)), "fp32")
    draws = random.Random(settings.seed)
    best = 0.0
    try:
        for step in range(1, settings.max_steps + 1):
            rate = settings.learning_rate * min(1.0, step / settings.ramp_steps)
            batch = _pairs(tokenizer, settings.pairs_per_step, draws)
            await asyncio.to_thread(trainer.step, batch, LossSpec("nll"), rate)
            if step % settings.check_every == 0 or step == settings.max_steps:
                await sync.serve(Version("warm-up", trainer.updates))
                right = await _sampled_reward(engine, tokenizer, settings.samples_per_task)
                best = max(best, right)
                say(f"step {step}: {right:.0%} of its samples are right (RL begins at {settings.enough:.0%})")
                if right >= settings.enough:
                    trainer.save_model(finished)
                    return step, right
    finally:
        await engine.close()
        trainer.close()
    raise TrainerError(
        f"the expression model was right in {best:.1%} of its samples at best, "
        f"after {settings.max_steps} warm-up steps",
        expected=f"{settings.enough:.0%}, below which RL has too little to prefer",
        next_command="raise max_steps, or lower enough: prepare_model(settings=WarmUp(...))",
    )


def _pairs(tokenizer: Tokenizer, count: int, draws: random.Random) -> Batch:
    """Random beginnings, each with a random right reply, whose every token is a target to learn."""
    tokens, positions, segments = array("q"), array("q"), array("q")
    predictors, targets, sequences = array("q"), array("q"), array("q")
    beginnings = list(answers())
    for sequence in range(count):
        beginning = draws.choice(beginnings)
        prompt = tokenizer.encode(beginning.prompt)
        reply = [*tokenizer.encode(draws.choice(answers()[beginning])), tokenizer.eos_token_ids[0]]
        first = len(tokens) + len(prompt) - 1
        length = len(prompt) + len(reply) - 1
        tokens.extend([*prompt, *reply[:-1]])
        positions.extend(range(length))
        segments.extend([sequence] * length)
        predictors.extend(range(first, first + len(reply)))
        targets.extend(reply)
        sequences.extend([sequence] * len(reply))
    return Batch(
        tokens_T=tokens,
        positions_T=positions,
        segment_ids_T=segments,
        segment_parents_S=array("q", [-1] * count),
        predictors_N=predictors,
        targets_N=targets,
        weights_N=array("f", [1 / len(targets)] * len(targets)),
        sampler_logprobs_N=array("f", [0.0] * len(targets)),
        sequence_ids_N=sequences,
    )


async def _sampled_reward(engine: Engine, tokenizer: Tokenizer, samples: int) -> float:
    """Mean reward over the RL tasks, ``samples`` of each at temperature 1."""
    from palestra.rollouts.base import GenerateRequest

    async def one(task: Task, seed: int) -> float:
        prompt = tuple(tokenizer.encode(task.prompt or ""))
        sampling = SamplingParams(max_new_tokens=REPLY_TOKENS, seed=seed)
        ids = (await engine.generate(GenerateRequest(prompt, sampling))).token_ids
        ended = ids[-1] in tokenizer.eos_token_ids
        return reward(task, tokenizer.decode(ids[:-1] if ended else ids))

    asked = [task for task in tasks() for _ in range(samples)]
    rewards = await asyncio.gather(*(one(task, seed) for seed, task in enumerate(asked)))
    return sum(rewards) / len(rewards)
