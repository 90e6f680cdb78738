"""The run: draw, sample, judge, train, sync, record - one step after the other.

Each step's draws are durable before anything is sampled and its update entry is
durable after the trainer applied it; a checkpoint makes a step permanent. Whatever
kills the process, the same command starts from the last committed checkpoint,
repeats the steps after it with the same prompts and seeds, and so arrives where
it would have arrived. A step that can teach nothing is a visible state and counts
towards a limit. The controller meets trainer, engine and environments through
their ports only and owns no tensor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.algorithms.recipe import Logprobs, Recipe, Weighing
from palestra.batches import Batch
from palestra.errors import RunStopped, TrainerError, WeightsError, boundary
from palestra.job import Job
from palestra.loop import checkpoints
from palestra.loop.draws import draws_of_step
from palestra.loop.evaluate import EvalResult, When, evaluate
from palestra.loop.ledger import EntryKind, Ledger
from palestra.loop.sampling import EpisodeRunner, sample_groups
from palestra.loop.schedule import learning_rate
from palestra.loop.verdict import Signal, Verdict, judge, nothing_rewarded, step_metrics
from palestra.records.writer import RunWriter
from palestra.rollouts.base import Engine
from palestra.trainer.base import StepReport, Trainer
from palestra.types import UNVERSIONED, Boundary, Group, SamplingParams, Task, Trajectory, Version

if TYPE_CHECKING:
    from palestra.weights.sync import SyncReport, WeightSync

Describe = Callable[[Trajectory], tuple[str, str]]
"""Prompt text and reply text of a trajectory, for the records."""


@dataclass(frozen=True, slots=True)
class Pillars:
    """What a run is made of, already built and not yet started."""

    engine: Engine
    trainer: Trainer
    sync: WeightSync
    episode: EpisodeRunner
    recipe: Recipe
    describe: Describe
    writer: RunWriter
    reference: Logprobs | None = None
    """The frozen model, where the recipe asks one."""


class Controller:
    """Runs one job's steps after ``step``. ``stop`` ends it after the step under way.

    A step in which nothing but abstentions came back is not kept: a checkpoint is
    taken at the last step before such a tail, so a restarted run samples its prompts again.
    """

    def __init__(
        self,
        job: Job,
        run_id: str,
        tasks: Sequence[Task],
        evaluation_tasks: Sequence[Task],
        pillars: Pillars,
        ledger: Ledger,
        step: int,
        checkpoints_dir: Path,
    ) -> None:
        self._job = job
        self._run_id = run_id
        self._tasks = tasks
        self._evaluation_tasks = evaluation_tasks
        self._p = pillars
        self._ledger = ledger
        self._root = checkpoints_dir
        self._step = self._kept_step = self._saved_step = step
        self._starved = 0
        self._skipped = 0
        self._ever_rewarded = step > 0
        self.stop = asyncio.Event()
        self._sampling = SamplingParams(
            max_new_tokens=job.sampling.max_new_tokens,
            temperature=job.sampling.temperature,
            top_p=job.sampling.top_p,
            top_k=job.sampling.top_k,
            stop=tuple(job.sampling.stop),
        )
        self._most_at_once = 2 * job.engine.max_running

    @property
    def step(self) -> int:
        """The last finished step."""
        return self._step

    @property
    def kept_step(self) -> int:
        """The last step that a checkpoint keeps: no tail of abstentions."""
        return self._kept_step

    @property
    def version(self) -> Version:
        return Version(self._run_id, self._p.trainer.updates)

    async def run(self, evaluated: frozenset[tuple[str, int]]) -> bool:
        """Run to the job's last step; True if it got there, False if stopped before.

        ``evaluated`` names the (when, step) evaluations that earlier attempts finished.
        Raises RunStopped where the run cannot go on by itself; the last checkpoint holds.
        """
        self._entry(EntryKind.ATTEMPT, self._step)
        self._state("starting", f"loading weights of step {self._step}")
        with self._p.writer.span("startup", step=self._step):
            self._record_sync(await self._p.sync.serve(self.version))
        if self._job.evaluation.before and self._step == 0:
            await self._evaluate("before", evaluated)
        await self._steps(evaluated)
        finished = self._kept_step >= self._job.steps
        self.save()
        if finished and self._job.evaluation.after:
            await self._evaluate("after", evaluated)
            finished = not self.stop.is_set()
        return finished

    async def _steps(self, evaluated: frozenset[tuple[str, int]]) -> None:
        while self._step < self._job.steps and not self.stop.is_set():
            try:
                await self._one_step(self._step + 1)
            except RunStopped:
                if self._ever_rewarded:
                    self.save()
                raise
            every = self._job.evaluation.every_steps
            if every and self._step % every == 0 and self._step < self._job.steps:
                await self._evaluate("during", evaluated)

    def save(self) -> None:
        """Commit a checkpoint of the last kept step, unless there is one (step 0 is the source model)."""
        step = self._kept_step
        if self._saved_step == step:
            return
        self._state("checkpointing", f"step {step}")
        self._p.writer.flush()  # what a restarted run will not do again must be on the disk before
        with self._p.writer.span("checkpoint", step=step):
            started = time.perf_counter()
            state = {"step": step, "version": str(self.version)}
            checkpoints.write(self._root, step, self._p.trainer, state, self._job.checkpoints.keep)
        self._saved_step = step
        self._entry(EntryKind.CHECKPOINT, step)
        self._metrics({"time/checkpoint_s": time.perf_counter() - started})

    async def _one_step(self, step: int) -> None:
        started = time.perf_counter()
        groups, rollout_metrics = await self._generate(step)
        with boundary(Boundary.TRAINER, "computing advantages"):
            weighing = self._p.recipe.weigh(groups, self._sampling)
        verdict = judge(groups, weighing.advantages)
        self._record_rollouts(step, groups, verdict)
        self._entry(EntryKind.GROUPS, step, groups=[_summary(g) for g in groups])
        metrics = {**rollout_metrics, **step_metrics(groups, verdict), **weighing.metrics}
        self._report_abstentions(step, verdict)
        metrics |= await self._train(step, groups, verdict, weighing)
        self._step = step
        if verdict.signal is not Signal.ABSTAINED:
            self._kept_step = step
        metrics["time/step_s"] = time.perf_counter() - started
        self._metrics(metrics)
        self._check_limits(verdict)
        if step % self._job.checkpoints.every_steps == 0 and step < self._job.steps:
            self.save()

    async def _generate(self, step: int) -> tuple[list[Group], dict[str, float]]:
        job = self._job
        draws = draws_of_step(
            step, prompts_per_step=job.prompts_per_step, tasks=len(self._tasks), seed=job.seed
        )
        hashes = [self._tasks[d.task_index].hash for d in draws]
        self._entry(EntryKind.DRAWS, step, draws=[d.index for d in draws], tasks=hashes)
        self._state("generating", f"step {step}: {len(draws)} prompts x {job.algorithm.group_size}")
        before = self._p.engine.stats()
        started = time.perf_counter()
        with self._p.writer.span("generate", step=step, version=self.version.number):
            groups = await sample_groups(
                draws,
                self._tasks,
                self._p.episode,
                group_size=job.algorithm.group_size,
                seed=job.seed,
                sampling=self._sampling,
                deadline_s=job.deadlines.step_s,
                most_at_once=self._most_at_once,
            )
        seconds = time.perf_counter() - started
        after = self._p.engine.stats()
        busy = min(seconds, after.busy_s - before.busy_s)
        return groups, {
            "time/rollout_s": seconds,
            "time/generate_s": busy,
            "time/reward_s": seconds - busy,
            "engine/prompt_tokens": float(after.prompt_tokens - before.prompt_tokens),
            "engine/generated_tokens": float(after.generated_tokens - before.generated_tokens),
        }

    async def _train(
        self, step: int, groups: Sequence[Group], verdict: Verdict, weighing: Weighing
    ) -> dict[str, float]:
        """Update and sync if the step can teach; the ledger's update entry says what happened."""
        if verdict.signal is not Signal.USEFUL:
            self._starved += 1
            self._state("starved", f"step {step} taught nothing: {verdict.reason}")
            self._entry(
                EntryKind.UPDATE, step, version=self.version.number, applied=False, why=verdict.reason
            )
            return {"time/train_s": 0.0, "time/sync_s": 0.0}
        self._require_on_policy(step, groups)
        with boundary(Boundary.TRAINER, "packing the batch"):
            batch = self._p.recipe.pack(groups, weighing, self._sampling)
        if batch is None:
            raise TrainerError(f"step {step} has advantages but no trainable token")
        self._state("training", f"step {step}: {batch.target_count} tokens")
        rate = self._rate(step)
        with self._p.writer.span("train", step=step, version=self.version.number):
            report, prepared_metrics = await asyncio.to_thread(self._update, batch, rate)
        self._starved = 0
        why = "" if report.applied else "loss or gradient was not finite"
        self._entry(
            EntryKind.UPDATE,
            step,
            version=self.version.number,
            applied=report.applied,
            why=why,
            loss=report.loss,
        )
        metrics = {**_train_metrics(report), **prepared_metrics}
        if self._p.reference is not None:
            metrics["train/kl_reference"] = report.kl_mean
        if not report.applied:
            self._skipped += 1
            kept = f"; its batch is {report.batch_file}" if report.batch_file else ""
            self._p.writer.event(
                "notice", step=step, text=f"step {step}: {why}; the update was skipped{kept}"
            )
            return {**metrics, "time/sync_s": 0.0}
        self._skipped = 0
        self._state("syncing", str(self.version))
        started = time.perf_counter()
        with self._p.writer.span("sync", step=step, version=self.version.number):
            sync = await self._p.sync.serve(self.version)
        return {**metrics, **_sync_metrics(sync), "time/sync_s": time.perf_counter() - started}

    def _require_on_policy(self, step: int, groups: Sequence[Group]) -> None:
        """Nothing corrects for staleness, so a token of another version must not be trained."""
        now = self.version.number
        sampled = {v for group in groups for t in group.trajectories for v in t.versions if v != UNVERSIONED}
        if sampled - {now}:
            raise WeightsError(
                f"step {step} trains version {now}, but tokens were sampled by versions {sorted(sampled)}",
                expected=f"every token sampled by version {now}",
                next_command="run the same command again: it continues from the last checkpoint",
            )

    def _update(self, batch: Batch, rate: float) -> tuple[StepReport, dict[str, float]]:
        """All updates from one batch; from the second on, the ratio is to the policy before the first."""
        recipe, trainer = self._p.recipe, self._p.trainer
        with boundary(Boundary.TRAINER, "preparing the batch"):
            batch, metrics = recipe.prepare(batch, trainer.logprobs, self._p.reference)
        report = trainer.step(batch, recipe.loss, rate)
        for _ in range(recipe.updates - 1):
            if report.applied:
                report = trainer.step(batch, recipe.loss, rate)
        return report, metrics

    def _rate(self, step: int) -> float:
        optimizer = self._job.optimizer
        return learning_rate(
            step,
            steps=self._job.steps,
            peak=optimizer.learning_rate,
            warmup_steps=optimizer.warmup_steps,
            schedule=optimizer.schedule,
        )

    def _check_limits(self, verdict: Verdict) -> None:
        """Stop a run that cannot learn, at a consistent point, with its reason."""
        limits = self._job.limits
        self._ever_rewarded |= bool(verdict.advantages)
        if not self._ever_rewarded and verdict.abstentions:
            expected = "a reward from at least one episode"
            raise nothing_rewarded("the first step", expected, verdict.abstentions)
        if self._starved >= limits.max_starved_steps:
            raise RunStopped(
                f"{self._starved} steps in a row taught nothing: {verdict.reason}",
                expected="groups whose members' rewards differ: tasks the model sometimes solves",
                next_command="try easier or harder tasks or a larger algorithm.group_size in a new run "
                "(--name NEW), or raise limits.max_starved_steps and continue",
                detail=verdict.abstentions[0].detail if verdict.abstentions else "",
            )
        if self._skipped > self._job.trainer.max_skipped_updates:
            raise RunStopped(
                f"{self._skipped} updates in a row were skipped because loss or gradient was not finite",
                next_command="a new run (--name NEW) with a lower optimizer.learning_rate "
                "or trainer.dtype=fp32",
            )

    async def _evaluate(self, when: When, evaluated: frozenset[tuple[str, int]]) -> None:
        settings = self._job.evaluation
        if not self._evaluation_tasks or (when, self._step) in evaluated or self.stop.is_set():
            return
        chosen = self._evaluation_tasks[: settings.tasks or None]
        self._state("evaluating", f"{len(chosen)} held-out tasks, {when} training")
        with self._p.writer.span("eval", step=self._step, version=self.version.number):
            result = await evaluate(
                chosen,
                self._p.episode,
                when=when,
                step=self._step,
                samples=settings.samples_per_task,
                greedy=settings.greedy,
                seed=self._job.seed,
                sampling=self._sampling,
                reward_range=self.reward_range,
                deadline_s=self._job.deadlines.step_s,
                most_at_once=self._most_at_once,
                stop=self.stop,
            )
        if result is None:
            return
        if result.scored:
            self._record_evaluation(result)
            return
        expected = "a reward from at least one held-out task"
        raise nothing_rewarded(f"the evaluation {when} training", expected, [result.first_abstention])

    @property
    def reward_range(self) -> tuple[float, float]:
        return self._job.environment.reward_range

    def _record_evaluation(self, result: EvalResult) -> None:
        for trajectory in result.trajectories:
            self._record(result.step, "eval", "eval", trajectory, None)
        entry = result.to_json() | {"version": str(self.version)}
        self._p.writer.evaluation(entry)
        values: dict[str, float] = {"tokens/eval": float(result.tokens)}
        for name, interval in (("sampled", result.sampled), ("greedy", result.greedy)):
            if interval is not None:
                values |= {
                    f"eval/{name}": interval.mean,
                    f"eval/{name}_low": interval.low,
                    f"eval/{name}_high": interval.high,
                }
        self._metrics(values)
        shown = {
            name: [i.mean, i.low, i.high, i.n]
            for name, i in (("sampled", result.sampled), ("greedy", result.greedy))
            if i is not None
        }
        self._p.writer.event("eval", step=result.step, when=result.when, abstained=result.abstained, **shown)

    def _record_rollouts(self, step: int, groups: Sequence[Group], verdict: Verdict) -> None:
        for group in groups:
            for trajectory in group.trajectories:
                self._record(step, group.id, "train", trajectory, verdict.advantages.get(trajectory.id))

    def _record(
        self, step: int, group: str, split: str, trajectory: Trajectory, advantage: float | None
    ) -> None:
        prompt_text, reply_text = self._p.describe(trajectory)
        self._p.writer.rollout(
            trajectory,
            group_id=group,
            step=step,
            task_id=trajectory.task_hash[:12],
            reply_text=reply_text,
            prompt_text=prompt_text,
            split="eval" if split == "eval" else "train",
            advantage=advantage,
        )

    def _report_abstentions(self, step: int, verdict: Verdict) -> None:
        by_boundary: dict[str, list[str]] = {}
        for abstention in verdict.abstentions:
            by_boundary.setdefault(abstention.boundary, []).append(abstention.reason)
        for name, reasons in by_boundary.items():
            self._p.writer.event("abstain", step=step, boundary=name, count=len(reasons), reason=reasons[-1])

    def _record_sync(self, sync: SyncReport) -> None:
        self._metrics(_sync_metrics(sync))

    def _metrics(self, values: dict[str, float]) -> None:
        self._p.writer.metrics(values, step=self._step, version=self.version.number)

    def _state(self, state: str, reason: str) -> None:
        self._p.writer.event("state", step=self._step, state=state, reason=reason)

    def _entry(self, kind: EntryKind, step: int, **fields: Any) -> None:
        entry = {"kind": str(kind), "step": step, **fields}
        self._ledger.add(entry)
        self._p.writer.ledger(entry)


def _summary(group: Group) -> dict[str, Any]:
    return {
        "group": group.id,
        "rewards": list(group.rewards),
        "abstained": len(group.trajectories) - len(group.rewarded),
        "tokens": sum(t.sampled_count for t in group.trajectories),
    }


def _train_metrics(report: StepReport) -> dict[str, float]:
    return {
        "train/loss": report.loss,
        "train/grad_norm": report.grad_norm,
        "train/learning_rate": report.learning_rate,
        "train/logprob_mean": report.logprob_mean,
        "train/entropy": report.entropy_mean,
        "train/clip_fraction": report.clip_fraction,
        "train/mismatch_mean": report.mismatch_mean,
        "train/mismatch_max": report.mismatch_max,
        "train/mismatch_kl": report.mismatch_kl,
        "train/tokens": float(report.tokens),
        "train/targets": float(report.targets),
        "train/applied": float(report.applied),
        "time/train_s": report.seconds,
    }


def _sync_metrics(sync: SyncReport) -> dict[str, float]:
    return {
        "sync/bytes": float(sync.nbytes),
        "sync/changed_tensors": float(sync.changed_tensors),
        "sync/publish_s": sync.publish_s,
        "sync/stage_s": sync.stage_s,
        "sync/commit_s": sync.commit_s,
        "sync/prove_s": sync.prove_s,
        "sync/probe_gap_mean": sync.probe_gap_mean,
        "sync/probe_gap_max": sync.probe_gap_max,
    }
