"""The pillars of a run, built from a job: the one module that knows every implementation.

Nothing here starts, samples or trains. Whatever is opened is handed to an exit
stack, so an attempt that fails half-way closes what it had. Torch is imported
when something is built, so reading runs stays light.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.algorithms.distill import require_one_vocabulary
from palestra.algorithms.recipe import Logprobs, Recipe
from palestra.errors import ChatError, ConfigError, MissingExtraError
from palestra.job import Job
from palestra.loop.controller import Pillars
from palestra.models.sources import LocalModel
from palestra.records.writer import RunWriter
from palestra.types import SamplingParams, Task, Trajectory

if TYPE_CHECKING:
    from palestra.trainer.torch_trainer import TorchTrainer


@dataclass(frozen=True, slots=True)
class Start:
    """What an attempt starts from."""

    tasks: tuple[Task, ...]
    evaluation_tasks: tuple[Task, ...]
    model: LocalModel
    dtypes: dict[str, Any]
    """Of the trainer and of the engine: fp32 or bf16."""
    threads: int
    created: datetime
    """When the run began: what a chat template that prints the date prints, in every attempt."""


def checkpoint_bytes(pillars: Pillars) -> int:
    """About what one checkpoint takes: fp32 masters, two Adam moments, and the exported model."""
    parameters = sum(tensor.numel() for _, tensor in pillars.trainer.export())
    return parameters * (4 * 3 + 4)


def require_torch() -> None:
    for module in ("torch", "numpy", "safetensors", "tokenizers", "jinja2", "xxhash"):
        try:
            __import__(module)
        except ModuleNotFoundError as error:
            raise MissingExtraError(module, "torch") from error


class Assembly:
    """Builds the pillars of one attempt; everything opened is closed by the exit stack."""

    def __init__(self, job: Job, start: Start, run_id: str, stack: AsyncExitStack) -> None:
        self._job = job
        self._start = start
        self._run_id = run_id
        self._stack = stack

    def pillars(self, writer: RunWriter) -> Pillars:
        from palestra.environments.chat import Chat
        from palestra.environments.runner import run_episode
        from palestra.environments.worker import RewardWorkers
        from palestra.models.tokenizer import Tokenizer
        from palestra.rollouts.native.engine import NativeEngine
        from palestra.trainer.torch_trainer import TorchTrainer
        from palestra.weights.sync import WeightSync

        job, start = self._job, self._start
        folder: Path = start.model.folder
        tokenizer = Tokenizer.from_folder(folder)
        chat = Chat(tokenizer, job.chat_template, now=start.created)
        context = _context(job, folder)
        for tasks in (start.tasks, start.evaluation_tasks):
            _require_prompts_fit(chat, tasks, context)
        host = self._sandbox_host()
        recipe = recipe_of(job)
        trainer = TorchTrainer(folder, _trainer_settings(job, start))
        trainer.skipped_folder = job.runs_dir / self._run_id / "skipped"
        self._stack.callback(trainer.close)
        engine = NativeEngine(
            folder,
            dtype=start.dtypes["engine"],  # type: ignore[arg-type]  # a recorded DtypeName
            threads=start.threads,
            max_running=job.engine.max_running,
            context_tokens=job.engine.context_tokens,
            cache_mb=job.engine.cache_mb,
        )
        self._stack.push_async_callback(engine.close)
        workers = RewardWorkers()
        self._stack.push_async_callback(workers.close)
        deadlines = job.deadlines

        async def episode(task: Task, name: str, sampling: SamplingParams) -> Trajectory:
            return await run_episode(
                job.environment,
                task,
                id=name,
                engine=engine,
                chat=chat,
                sampling=sampling,
                sandbox_host=host,
                sandbox_spec=job.sandbox.spec(),
                workers=workers,
                deadline_s=deadlines.episode_s,
                reward_deadline_s=deadlines.reward_s,
                context_tokens=context,
            )

        def describe(trajectory: Trajectory) -> tuple[str, str]:
            prompt = [t for turn in trajectory.turns[:1] for t in turn.token_ids]
            rest = [t for turn in trajectory.turns[1:] for t in turn.token_ids]
            return tokenizer.decode(prompt), tokenizer.decode(rest)

        sync = WeightSync(trainer, engine, self._probe(chat), start.dtypes["engine"])
        reference = self._reference(tokenizer, trainer) if recipe.needs_reference else None
        return Pillars(engine, trainer, sync, episode, recipe, describe, writer, reference)

    def _reference(self, tokenizer: Any, trainer: TorchTrainer) -> Logprobs:
        """The trainer's own reference, or a second trainer that is never stepped, of the model named."""
        from palestra.models.sources import resolve_model
        from palestra.models.tokenizer import Tokenizer
        from palestra.trainer.torch_trainer import TorchTrainer

        named = self._job.algorithm.reference
        if not named or _mean_decay(named):
            return trainer.reference_logprobs
        folder = resolve_model(named).folder
        other = Tokenizer.from_folder(folder)
        require_one_vocabulary(_vocabulary(tokenizer), _vocabulary(other), named)
        settings = replace(_trainer_settings(self._job, self._start), lora_rank=0)
        frozen = TorchTrainer(folder, settings)
        self._stack.callback(frozen.close)
        return frozen.logprobs

    def _sandbox_host(self) -> Any:
        from palestra.sandboxes.bubblewrap import BubblewrapHost

        host = BubblewrapHost(concurrency=self._job.sandbox.concurrency)
        if self._job.environment.sandbox is not None:
            host.probe()
        self._stack.push_async_callback(host.close)
        return host

    def _probe(self, chat: Any) -> tuple[int, ...]:
        """Probe tokens: the first prompt's last 32, seeded by nothing: the same for every version."""
        ids = chat.first(self._start.tasks[0].chat)
        return tuple(ids[-32:]) if len(ids) >= 2 else tuple(ids) * 2


def recipe_of(job: Job) -> Recipe:
    """The job's algorithm, looked up; ConfigError where it does not fit the environment's rewards."""
    settings = job.algorithm.model_dump(exclude={"group_size", "reference"})
    recipe = Recipe.named(**settings)
    least, low = recipe.rule.least_reward, job.environment.reward_range[0]
    if least is not None and low < least:
        raise ConfigError(
            [
                f"algorithm.advantage {job.algorithm.advantage} takes rewards >= {least:g}, and the "
                f"environment's reward_range begins at {low:g}; nearest: advantage grpo, or rewards "
                "that are never negative"
            ]
        )
    return recipe


def _vocabulary(tokenizer: Any) -> list[bytes]:
    return [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]


def _context(job: Job, folder: Path) -> int:
    from palestra.models.config import ModelConfig

    model = ModelConfig.from_folder(folder).max_positions
    asked, new = job.engine.context_tokens, job.sampling.max_new_tokens
    context = asked or model
    half = max(1, context // 2)
    if asked > model:
        problem = f"engine.context_tokens ({asked}) is above the {model} tokens that the model can hold"
        raise ConfigError(
            [f"{problem}; nearest: {model}"], next_command=f"--set engine.context_tokens={model}"
        )
    if new >= context:
        whose = "engine.context_tokens" if asked else "the model's limit"
        problem = f"sampling.max_new_tokens ({new}) leaves no room for a prompt in {context} tokens ({whose})"
        raise ConfigError(
            [f"{problem}; nearest: {half}"], next_command=f"--set sampling.max_new_tokens={half}"
        )
    return context


def _require_prompts_fit(chat: Any, tasks: Sequence[Task], context: int, most: int = 2000) -> None:
    """Refuse the job before it starts if a prompt leaves no room (the first ``most`` are measured)."""
    rendered = [chat.first(task.chat) for task in tasks[:most]]
    if not rendered:
        return
    different = len({task.chat for task in tasks[:most]})
    if different > 1 and len(set(rendered)) == 1:
        raise ChatError(
            f"the chat template renders {different} different prompts to the same {len(rendered[0])} tokens",
            expected="a template that contains the messages' content",
            next_command="correct chat_template (palestra config show), or use auto",
        )
    lengths = [(len(ids), task) for ids, task in zip(rendered, tasks, strict=False)]
    longest, task = max(lengths, key=lambda pair: pair[0])
    if longest >= context:
        over = sum(length >= context for length, _ in lengths)
        raise ConfigError(
            [
                f"{over} of {len(lengths)} prompts do not fit: the longest (task {task.id}) has {longest} "
                f"tokens, and the context holds {context}, completion included"
            ],
            next_command="shorten the prompts, raise engine.context_tokens, or take a longer-context model",
        )


def _mean_decay(reference: str) -> float:
    """Of a reference given as in ``mean:0.99``; 0 for a model's name."""
    kind, _, text = reference.partition(":")
    if kind != "mean":
        return 0.0
    if re.fullmatch(r"0?\.\d+", text) and float(text) > 0:
        return float(text)
    raise ConfigError([f"algorithm.reference ({reference}) has no decay between 0 and 1; nearest: mean:0.99"])


def _trainer_settings(job: Job, start: Start) -> Any:
    from palestra.trainer.settings import TrainerSettings

    optimizer, trainer = job.optimizer, job.trainer
    lora_rank, lora_alpha, lora_targets = trainer.adapter()
    return TrainerSettings(
        dtype=start.dtypes["trainer"],  # type: ignore[arg-type]  # a recorded DtypeName
        rollout_dtype=start.dtypes["engine"],  # type: ignore[arg-type]
        threads=start.threads,
        micro_batch_tokens=trainer.micro_batch_tokens,
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        epsilon=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        grad_clip=optimizer.grad_clip,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha or 1.0,
        lora_targets=lora_targets,
        reference_decay=_mean_decay(job.algorithm.reference),
        seed=job.seed,
    )
