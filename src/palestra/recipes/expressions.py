"""The quick start without a sandbox: write a five-character expression that equals a number.

A reply is right if it is exactly digit, operator, digit, operator, digit (operators
+ - *) and its value, multiplication first, is the target. Replies are parsed by
`evaluate` below and never executed, so nothing that a model writes can do anything.
The model is made here: `prepare_model` trains a random one on correct examples just
until it is right often enough for RL to have something to prefer. Those examples
cover every target; what `evaluation_tasks` holds out is held out of RL.
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

from palestra.errors import MissingExtraError, ModelSourceError, TrainerError
from palestra.types import Batch, LossSpec, SamplingParams, Task, Version

if TYPE_CHECKING:
    from palestra.models.tokenizer import Tokenizer
    from palestra.rollouts.base import Engine

Say = Callable[[str], None]

DIGITS = "0123456789"
OPERATORS = "+-*"
ALPHABET = DIGITS + OPERATORS + "="
LENGTH = 5
"""Characters of an answer."""
REPLY_TOKENS = LENGTH + 1
"""An answer and its end token; a longer reply is wrong anyway."""

TARGETS = range(81)
"""Each can be reached, 0 in 559 ways and 77 in 5."""
HELD_OUT_TARGETS = range(2, 81, 3)
"""Of both parities and all sizes; no RL task asks for one of them."""


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
def solutions() -> dict[int, tuple[str, ...]]:
    """Every right answer to each of TARGETS, in a fixed order."""
    found: dict[int, list[str]] = {target: [] for target in TARGETS}
    for characters in product(DIGITS, OPERATORS, DIGITS, OPERATORS, DIGITS):
        text = "".join(characters)
        value = evaluate(text)
        if value in found:
            found[value].append(text)
    return {target: tuple(texts) for target, texts in found.items()}


def prompt_of(target: int) -> str:
    return f"{target}="


def tasks() -> list[Task]:
    """The RL tasks: two of three targets."""
    return [_task(target) for target in TARGETS if target not in HELD_OUT_TARGETS]


def evaluation_tasks() -> list[Task]:
    """Every third target: none is a training task."""
    return [_task(target) for target in HELD_OUT_TARGETS]


def _task(target: int) -> Task:
    return Task(prompt=prompt_of(target), secret={"target": target}, id=f"equals-{target}")


def reward(task: Task, reply: str) -> float:
    """1 if the reply is an expression that equals the task's target, else 0."""
    return float(evaluate(reply) == task.secret["target"])


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
    enough: float = 0.33
    """Sampled reward at which the warm-up ends. From below 0.3 RL climbs slowly: few samples are right."""
    check_every: int = 25
    """Steps between two measurements."""
    samples_per_target: int = 4
    max_steps: int = 600
    seed: int = 0

    @property
    def key(self) -> str:
        """12 hex digits over everything that the finished model depends on."""
        content = {"recipe": RECIPE, "alphabet": ALPHABET, "targets": len(TARGETS), **asdict(self)}
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
    trainer = TorchTrainer(start, TrainerSettings(dtype="fp32", rollout_dtype="fp32"))
    engine = NativeEngine(start, dtype="fp32", max_running=128)
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
                right = await _sampled_reward(engine, tokenizer, settings)
                best = max(best, right)
                say(f"step {step}: {right:.0%} of its samples are right; RL begins at {settings.enough:.0%}")
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
    """Random targets, each with a random right answer: every token of the answers is a target to learn."""
    tokens, positions, segments = array("q"), array("q"), array("q")
    predictors, targets, sequences = array("q"), array("q"), array("q")
    for sequence in range(count):
        target = draws.choice(TARGETS)
        prompt = tokenizer.encode(prompt_of(target))
        answer = [*tokenizer.encode(draws.choice(solutions()[target])), tokenizer.eos_token_ids[0]]
        first = len(tokens) + len(prompt) - 1
        length = len(prompt) + len(answer) - 1
        tokens.extend([*prompt, *answer[:-1]])
        positions.extend(range(length))
        segments.extend([sequence] * length)
        predictors.extend(range(first, first + len(answer)))
        targets.extend(answer)
        sequences.extend([sequence] * len(answer))
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


async def _sampled_reward(engine: Engine, tokenizer: Tokenizer, settings: WarmUp) -> float:
    """Mean reward over all targets, several samples of each at temperature 1."""
    from palestra.rollouts.base import GenerateRequest

    async def one(target: int, sample: int) -> float:
        seed = sample * len(TARGETS) + target
        prompt = tuple(tokenizer.encode(prompt_of(target)))
        sampling = SamplingParams(max_new_tokens=REPLY_TOKENS, seed=seed)
        ids = (await engine.generate(GenerateRequest(prompt, sampling))).token_ids
        ended = ids[-1] in tokenizer.eos_token_ids
        return reward(_task(target), tokenizer.decode(ids[:-1] if ended else ids))

    asked = [one(target, sample) for target in TARGETS for sample in range(settings.samples_per_target)]
    rewards = await asyncio.gather(*asked)
    return sum(rewards) / len(rewards)
