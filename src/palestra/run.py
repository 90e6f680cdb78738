"""The composition root: a resolved job becomes a run directory and the objects that fill it.

This is the one module that knows every implementation. It decides whether a
command starts a run or continues one: the run directory is locked, its recorded
identity (model, tasks, seed, algorithm, number types) must match, and the newest
whole checkpoint is where the run goes on. Nothing is built before the job, the
tasks, the disk and the sandbox were found to be in order. A run ends with its
status and reason on the disk, whichever way it ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from palestra import __version__
from palestra.environments.base import validate_tasks
from palestra.errors import ConfigError, MissingExtraError, PalestraError, RecordError
from palestra.job import Job
from palestra.loop import checkpoints
from palestra.loop.controller import Controller, Pillars, Place
from palestra.loop.draws import derive_seed
from palestra.loop.identity import differences, identity_of
from palestra.loop.ledger import Audit, Ledger
from palestra.records.folder import RunFolder
from palestra.records.reader import RunReader
from palestra.records.writer import RunWriter
from palestra.settings import Resolved
from palestra.types import SamplingParams, Task, Trajectory
from palestra.ui.panel import LivePanel
from palestra.ui.summary import summary_of

INTERRUPTED = 130


class Run:
    """The handle of a run: what it is called, where its records are, how it stands."""

    def __init__(self, path: Path, resolved: Resolved) -> None:
        self.path = path
        self._resolved = resolved
        self._future: Future[None] | None = None
        self._stop: Callable[[], None] | None = None

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def status(self) -> str:
        """running, finished, failed, stopped, lost or empty, as the records say now."""
        return self.records.state()[0]

    @property
    def records(self) -> RunReader:
        """Everything the run wrote; valid while it runs and after."""
        return RunReader(self.path)

    def checkpoints(self) -> list[Path]:
        """The committed checkpoints, oldest first. Each is a Hugging Face model folder."""
        return [c.folder for c in checkpoints.committed(self.path / "checkpoints")]

    def audit(self) -> Audit:
        """What the ledger proves: no prompt skipped or repeated, no update applied twice."""
        ledger = Ledger(self._resolved.job.prompts_per_step)
        return ledger.replay(self.records.ledger()).audit()

    def stop(self) -> None:
        """Finish the step under way, write a checkpoint, end. Returns at once; see ``wait``."""
        if self._stop is not None:
            self._stop()

    def wait(self, timeout_s: float | None = None) -> Run:
        """Block until the run ends; raises what it raised. TimeoutError after ``timeout_s`` seconds."""
        if self._future is not None:
            self._future.result(timeout_s)
        return self

    def resume(self, *, panel: bool | None = None) -> Run:
        """Continue from the newest checkpoint, as running the same command again would."""
        return train(self._resolved, wait=True, panel=panel)


def train(resolved: Resolved, *, wait: bool = True, panel: bool | None = None) -> Run:
    """Start or continue the run that ``resolved`` names; the handle of it.

    Raises ConfigError, TaskError, ModelSourceError, IsolationUnavailable or RecordError
    before anything was sampled, RunStopped where the run cannot go on, and whatever
    failed inside a pillar with its boundary.
    """
    job = resolved.job
    run = Run(job.runs_dir / job.name, resolved)
    attempt = _Attempt(run, resolved, panel)
    if wait:
        attempt.main()
    else:
        executor = ThreadPoolExecutor(1, thread_name_prefix=f"run-{run.id}")
        run._future = executor.submit(attempt.main)
        executor.shutdown(wait=False)
    return run


class _Status:
    """Writes how the attempt ended: whatever leaves the block is on the disk before it goes on."""

    def __init__(self, folder: RunFolder, writer: RunWriter) -> None:
        self._folder = folder
        self._writer = writer
        self.outcome: tuple[str, str] = ("failed", "ended without an outcome")

    def __enter__(self) -> _Status:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if isinstance(error, KeyboardInterrupt):
            self.outcome = ("stopped", "interrupted before the first step; the same command continues")
        elif error is not None:
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            self.outcome = ("failed", first_line)
            self._writer.event("state", state="failed", reason=str(error))
        self._writer.flush()
        self._folder.set_status(*self.outcome)
        return False


@dataclass(frozen=True, slots=True)
class _Start:
    """What an attempt starts from."""

    tasks: tuple[Task, ...]
    evaluation_tasks: tuple[Task, ...]
    model: Any
    dtypes: dict[str, str]
    threads: int
    created: datetime
    """When the run began: what a chat template that prints the date prints, in every attempt."""


class _Attempt:
    """One process's try at a run: prepares, builds, runs, and leaves nothing behind."""

    def __init__(self, run: Run, resolved: Resolved, panel: bool | None) -> None:
        self._run = run
        self._resolved = resolved
        self._job: Job = resolved.job
        self._wants_panel = panel is not False
        self._interrupts = 0

    def main(self) -> None:
        _require_torch()
        tasks = validate_tasks(self._job.environment)
        evaluation_tasks = tuple(self._job.environment.evaluation_tasks())
        folder = RunFolder.open(self._run.path, create=True)
        folder.lock()
        try:
            start = self._prepare(folder, tasks, evaluation_tasks)
            if self._finished_already(folder):
                self._say_finished()
                return
            panel = LivePanel(self._run.id, self._job.steps) if self._wants_panel else None
            if panel is not None:
                panel.replay(self._run.records)
            folder.begin_attempt(
                {"argv": sys.argv, "cwd": os.getcwd(), "palestra": __version__, "python": sys.version},
                self._resolved.to_json(),
                self._resolved.provenance_json(),
            )
            writer = RunWriter(folder)
            try:
                self._run_attempt(folder, writer, start, panel)
            finally:
                writer.close()
        finally:
            folder.unlock()

    def _say_finished(self) -> None:
        if self._wants_panel:
            print(summary_of(self._run.records))
            print(
                f"run {self._run.id} is already finished; more steps continue it, --name NEW starts another"
            )

    def _finished_already(self, folder: RunFolder) -> bool:
        done = checkpoints.committed(folder.checkpoints_dir)
        finished = folder.info.get("status") == "finished"
        return finished and bool(done) and done[-1].step >= self._job.steps

    def _prepare(
        self, folder: RunFolder, tasks: tuple[Task, ...], evaluation_tasks: tuple[Task, ...]
    ) -> _Start:
        """Everything that can be refused is refused here."""
        from palestra.models.dtypes import resolve_dtype
        from palestra.models.sources import resolve_model

        job = self._job
        model = resolve_model(job.model, progress=lambda line: print(f"palestra: {line}", file=sys.stderr))
        recorded = folder.info.get("identity")
        dtypes = (recorded or {}).get("dtypes") or {
            "trainer": resolve_dtype(job.trainer.dtype),
            "engine": resolve_dtype(job.engine.dtype),
        }
        identity = identity_of(job, tasks, evaluation_tasks, model_digest=model.digest, dtypes=dtypes)
        if recorded is not None:
            self._require_same(recorded, identity)
        # A resumed run keeps its number of threads: sums in another order are other losses.
        threads = job.threads or int(folder.info.get("threads") or len(os.sched_getaffinity(0)))
        if recorded is None:
            folder.update(identity=identity, model=job.model, name=job.name, threads=threads)
        folder.update(steps=job.steps)
        created = datetime.fromtimestamp(float(folder.info["created"]))
        return _Start(tasks, evaluation_tasks, model, dtypes, threads, created)

    def _require_same(self, recorded: dict[str, Any], identity: dict[str, Any]) -> None:
        changed = differences(recorded, identity)
        if changed:
            raise ConfigError(
                [
                    f"run {self._run.id!r} was started with {key} = {old!r}, and this command says {new!r}"
                    for key, old, new in changed
                ],
                next_command=f"undo the change to continue {self._run.path}, or start another: --name NEW",
            )

    def _run_attempt(
        self, folder: RunFolder, writer: RunWriter, start: _Start, panel: LivePanel | None
    ) -> None:
        with _Status(folder, writer) as status:
            if panel is not None:
                writer.subscribe(panel.feed)
                panel.start()
            try:
                status.outcome = asyncio.run(self._supervise(folder, writer, start, panel))
                writer.event("state", state=status.outcome[0], reason=status.outcome[1])
            finally:
                if panel is not None:
                    writer.flush()
                    panel.stop()
        if self._wants_panel:
            print(summary_of(self._run.records))

    async def _supervise(
        self, folder: RunFolder, writer: RunWriter, start: _Start, panel: LivePanel | None
    ) -> tuple[str, str]:
        async with AsyncExitStack() as stack:
            build = _Build(self._job, start, self._run.id, stack)
            pillars = await asyncio.to_thread(build.pillars, writer)
            ledger, place = self._restore(folder, writer, pillars)
            controller = Controller(
                self._job,
                self._run.id,
                start.tasks,
                start.evaluation_tasks,
                pillars,
                ledger,
                place,
                folder.checkpoints_dir,
            )
            loop = asyncio.get_running_loop()
            self._run._stop = lambda: _call(loop, controller.stop.set)
            self._watch_signals(loop, controller, folder, writer, panel)
            evaluated = frozenset((str(e["when"]), int(e["step"])) for e in self._run.records.evals())
            if await controller.run(evaluated):
                return "finished", f"{controller.step} steps"
            return "stopped", f"asked to stop after step {controller.step}; the same command continues"

    def _restore(self, folder: RunFolder, writer: RunWriter, pillars: Pillars) -> tuple[Ledger, Place]:
        """The ledger as recorded, and the trainer's state at the newest checkpoint that is whole."""
        for name in checkpoints.sweep(folder.checkpoints_dir):
            writer.event("notice", text=f"removed a half-written checkpoint: {name}")
        ledger = Ledger(self._job.prompts_per_step).replay(self._run.records.ledger())
        found = checkpoints.committed(folder.checkpoints_dir)
        for checkpoint in reversed(found):
            try:
                pillars.trainer.load_state(checkpoint.trainer_folder)
            except PalestraError as error:
                writer.event("notice", text=f"checkpoint {checkpoint.step} refused: {error.what}")
                continue
            state = checkpoint.loop_state()
            writer.event("state", state="resuming", reason=f"from checkpoint of step {checkpoint.step}")
            return ledger, Place(step=int(state["step"]), seconds=float(state["seconds"]))
        if found:
            raise RecordError(
                f"none of the {len(found)} checkpoints of run {self._run.id} can be read",
                where=str(folder.checkpoints_dir),
                next_command="remove that folder to start again from the model, keeping the records",
            )
        needed = checkpoint_bytes(pillars)
        checkpoints.require_space(folder.checkpoints_dir, needed)
        return ledger, Place()

    def _watch_signals(
        self,
        loop: asyncio.AbstractEventLoop,
        controller: Controller,
        folder: RunFolder,
        writer: RunWriter,
        panel: LivePanel | None,
    ) -> None:
        """Once: finish the step and checkpoint. Twice: end now; records and checkpoints are whole."""
        if threading.current_thread() is not threading.main_thread():
            return

        def interrupt() -> None:
            self._interrupts += 1
            if self._interrupts == 1:
                controller.stop.set()
                writer.event(
                    "notice",
                    text="stopping: finishing the step under way, then a checkpoint (again: stop at once)",
                )
                return
            reason = f"interrupted at once after step {controller.step}; the same command continues"
            writer.event("state", state="stopped", reason=reason)
            writer.flush(timeout_s=2)
            if panel is not None:
                panel.stop()
            folder.set_status("stopped", reason)
            print(f"\npalestra: {reason}", file=sys.stderr, flush=True)
            os._exit(INTERRUPTED)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)


def _call(loop: asyncio.AbstractEventLoop, what: Callable[[], None]) -> None:
    """Ask ``loop``, from any thread, to call ``what``; a loop that has ended has nothing to stop."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(what)


def checkpoint_bytes(pillars: Pillars) -> int:
    """About what one checkpoint takes: fp32 masters, two Adam moments, and the exported model."""
    parameters = sum(tensor.numel() for _, tensor in pillars.trainer.export())
    return parameters * (4 * 3 + 4)


def _require_torch() -> None:
    for module in ("torch", "numpy", "safetensors", "tokenizers", "jinja2", "xxhash"):
        try:
            __import__(module)
        except ModuleNotFoundError as error:
            raise MissingExtraError(module, "torch") from error


class _Build:
    """Builds the pillars of one attempt; everything opened is closed by the exit stack."""

    def __init__(self, job: Job, start: _Start, run_id: str, stack: AsyncExitStack) -> None:
        self._job = job
        self._start = start
        self._run_id = run_id
        self._stack = stack

    def pillars(self, writer: RunWriter) -> Pillars:
        from palestra.algorithms.advantages import group_advantages
        from palestra.algorithms.packing import pack
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
        _require_prompts_fit(chat, start.tasks + start.evaluation_tasks, context)
        host = self._sandbox_host()
        trainer = TorchTrainer(folder, _trainer_settings(job, start))
        self._stack.callback(trainer.close)
        engine = NativeEngine(
            folder,
            dtype=start.dtypes["engine"],  # type: ignore[arg-type]  # a recorded DtypeName
            threads=start.threads,
            max_running=job.engine.max_running,
            context_tokens=job.engine.context_tokens,
        )
        self._stack.push_async_callback(engine.close)
        workers = RewardWorkers()
        self._stack.push_async_callback(workers.close)
        algorithm, deadlines = job.algorithm, job.deadlines

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

        def advantages(rewards: Sequence[float]) -> list[float]:
            return group_advantages(
                rewards, normalize_std=algorithm.normalize_std, epsilon=algorithm.std_epsilon
            )

        def describe(trajectory: Trajectory) -> tuple[str, str]:
            prompt = [t for turn in trajectory.turns[:1] for t in turn.token_ids]
            rest = [t for turn in trajectory.turns[1:] for t in turn.token_ids]
            return tokenizer.decode(prompt), tokenizer.decode(rest)

        sync = WeightSync(trainer, engine, self._probe(chat), start.dtypes["engine"])
        return Pillars(engine, trainer, sync, episode, advantages, pack, describe, writer)

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


def _context(job: Job, folder: Path) -> int:
    from palestra.models.config import ModelConfig

    model = ModelConfig.from_folder(folder).max_positions
    return min(job.engine.context_tokens or model, model)


def _require_prompts_fit(chat: Any, tasks: Sequence[Task], context: int, most: int = 2000) -> None:
    """Refuse the job before it starts if a prompt leaves no room (the first ``most`` are measured)."""
    lengths = [(len(chat.first(task.chat)), task) for task in tasks[:most]]
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


def _trainer_settings(job: Job, start: _Start) -> Any:
    from palestra.trainer.settings import TrainerSettings

    optimizer = job.optimizer
    return TrainerSettings(
        dtype=start.dtypes["trainer"],  # type: ignore[arg-type]  # a recorded DtypeName
        rollout_dtype=start.dtypes["engine"],  # type: ignore[arg-type]
        threads=start.threads,
        micro_batch_tokens=job.trainer.micro_batch_tokens,
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        epsilon=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        grad_clip=optimizer.grad_clip,
        seed=derive_seed(job.seed, "trainer"),
    )
