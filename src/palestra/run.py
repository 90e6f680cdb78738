"""The handle of a run, and one attempt at it: start or continue, watch, end.

An attempt decides whether a command starts a run or continues one: the run
directory is locked, the recorded identity (model, tasks, seed, algorithm, number
types) must match once anything was drawn, and the newest whole checkpoint is
where the run goes on. Nothing is sampled before the job, the tasks, the disk and
the sandbox were found to be in order. A run ends with its status and reason on
the disk, whichever way it ends.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from palestra import __version__
from palestra.assembly import Assembly, Start, checkpoint_bytes, require_torch
from palestra.environments.base import all_tasks
from palestra.errors import ConfigError, MissingExtraError, PalestraError, RecordError, traceback_of
from palestra.job import Job
from palestra.loop import checkpoints
from palestra.loop.controller import Controller, Pillars
from palestra.loop.identity import differences, identity_of, source_digest
from palestra.loop.ledger import Audit, Ledger, LedgerError
from palestra.records.folder import RunFolder
from palestra.records.reader import RunReader
from palestra.records.schema import RUN_JSON
from palestra.records.writer import RunWriter
from palestra.settings import Resolved
from palestra.types import Task
from palestra.ui.panel import LivePanel
from palestra.ui.summary import summary_of

INTERRUPTED = 130


class Run:
    """The handle of a run: what it is called, where its records are, how it stands."""

    def __init__(self, path: Path, resolved: Resolved) -> None:
        self.path = path
        self._resolved = resolved
        self._future: Future[None] | None = None
        self._stop_asked = threading.Event()
        self._stop: Callable[[], None] = self._stop_asked.set

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def status(self) -> str:
        """running, finished, failed, stopped, lost or empty, as the records say now."""
        return self.records.state()[0] if (self.path / "run.json").is_file() else "empty"

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


def _say_lost_records(folder: RunFolder, writer: RunWriter) -> None:
    """Records that are not on the disk are said at the end, and kept for ``palestra runs show``."""
    if writer.degraded is None and not writer.dropped:
        return
    why = writer.degraded or "the queue was full"
    text = f"the records of run {folder.path.name} are incomplete ({writer.dropped} dropped): {why}"
    print(f"palestra: {text}", file=sys.stderr)
    lost = {"attempt": folder.attempt, "dropped": writer.dropped, "why": why}
    with suppress(RecordError):  # the disk that dropped them may refuse this too: it was said above
        folder.update(lost_records=[*folder.info.get("lost_records", []), lost])


def _left_behind(writer: RunWriter) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """What asyncio says of tasks that user code started and nobody awaited: a notice, not a raw traceback."""

    def tell(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        why = error.what if isinstance(error, PalestraError) else repr(error or context.get("message"))
        detail = traceback_of(error) if isinstance(error, BaseException) else ""
        writer.event("notice", text=f"a task that was started and never awaited: {why}", detail=detail)

    return tell


class _Attempt:
    """One process's try at a run: prepares, builds, runs, and leaves nothing behind."""

    def __init__(self, run: Run, resolved: Resolved, panel: bool | None) -> None:
        self._run = run
        self._resolved = resolved
        self._job: Job = resolved.job
        self._wants_panel = panel is not False
        self._interrupts = 0
        self._source_changed = False

    def main(self) -> None:
        require_torch()
        tasks, evaluation_tasks = all_tasks(self._job.environment)
        self._require_one_sandbox_spec()
        is_new = not (self._run.path / RUN_JSON).is_file()
        folder = RunFolder.open(self._run.path, create=True)
        folder.lock()
        try:
            with self._nothing_left(folder, is_new):
                self._begin(folder, tasks, evaluation_tasks)
        finally:
            folder.unlock()

    @contextmanager
    def _nothing_left(self, folder: RunFolder, is_new: bool) -> Iterator[None]:
        """A new run that was refused before it drew anything leaves no folder, and its name is free."""
        try:
            yield
        except PalestraError as error:
            refused = error.exit_code in (ConfigError.exit_code, MissingExtraError.exit_code)
            if is_new and refused and not self._has_begun(folder):
                shutil.rmtree(folder.path)
            raise

    def _has_begun(self, folder: RunFolder) -> bool:
        return bool(checkpoints.committed(folder.checkpoints_dir)) or any(
            entry.get("kind") == "draws" for entry in self._run.records.ledger()
        )

    def _begin(self, folder: RunFolder, tasks: tuple[Task, ...], evaluation_tasks: tuple[Task, ...]) -> None:
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
            _say_lost_records(folder, writer)

    def _require_one_sandbox_spec(self) -> None:
        """A limit set for the job must not be overridden in silence by the environment's own."""
        if self._job.environment.sandbox is None:
            return
        unused = [
            f"{key} = {origin.value!r} (from {origin}) has no effect: the environment brings its own "
            f"{self._job.environment.sandbox}"
            for key, origin in self._resolved.provenance.items()
            if key.startswith("sandbox.") and key != "sandbox.concurrency" and origin.source != "default"
        ]
        if unused:
            raise ConfigError(unused, next_command="change the environment's sandbox=..., or remove it there")

    def _say_finished(self) -> None:
        if self._wants_panel:
            print(summary_of(self._run.records))
            print(f"run {self._run.id} is already finished: more steps continue it, --name NEW starts one")

    def _finished_already(self, folder: RunFolder) -> bool:
        done = checkpoints.committed(folder.checkpoints_dir)
        finished = folder.info.get("status") == "finished"
        return finished and bool(done) and done[-1].step >= self._job.steps

    def _prepare(
        self, folder: RunFolder, tasks: tuple[Task, ...], evaluation_tasks: tuple[Task, ...]
    ) -> Start:
        """Everything that can be refused before building is refused here."""
        from palestra.models.sources import resolve_model

        job = self._job
        model = resolve_model(job.model, progress=lambda line: print(f"palestra: {line}", file=sys.stderr))
        info = folder.info
        begun = self._has_begun(folder)
        recorded: dict[str, Any] | None = info.get("identity") if begun else None
        dtypes = self._dtypes((recorded or {}).get("dtypes", {}))
        identity = identity_of(job, tasks, evaluation_tasks, model_digest=model.digest, dtypes=dtypes)
        if recorded is not None:
            self._require_same(recorded, identity)
        source = source_digest(job.environment)
        self._source_changed = begun and info.get("environment_source") not in (None, source)
        # A resumed run keeps its number of threads: sums in another order are other losses.
        kept = info.get("threads") if begun else None
        threads = job.threads or int(kept or len(os.sched_getaffinity(0)))
        folder.update(identity=identity, model=job.model, name=job.name, threads=threads, steps=job.steps,
                      environment_source=source)  # fmt: skip
        created = datetime.fromtimestamp(float(info["created"]))
        return Start(tasks, evaluation_tasks, model, dtypes, threads, created)

    def _dtypes(self, recorded: dict[str, Any]) -> dict[str, Any]:
        """The number types: as the job says, as the run began, or as measured now."""
        from palestra.models.dtypes import resolve_dtype

        trainer, engine = self._job.trainer.dtype, self._job.engine.dtype
        return {
            "trainer": recorded.get("trainer") if trainer == "auto" and recorded else resolve_dtype(trainer),
            "engine": recorded.get("engine") if engine == "auto" and recorded else resolve_dtype(engine),
        }

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
        self, folder: RunFolder, writer: RunWriter, start: Start, panel: LivePanel | None
    ) -> None:
        with _Status(folder, writer) as status:
            if panel is not None:
                writer.subscribe(panel.feed)
                panel.start()
            try:
                if threading.current_thread() is threading.main_thread():
                    # Until the controller listens, being asked to end is being interrupted.
                    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
                status.outcome = asyncio.run(self._supervise(folder, writer, start, panel))
                writer.event("state", state=status.outcome[0], reason=status.outcome[1])
            finally:
                if panel is not None:
                    writer.flush()
                    panel.stop()
        if self._wants_panel:
            print(summary_of(self._run.records))

    async def _supervise(
        self, folder: RunFolder, writer: RunWriter, start: Start, panel: LivePanel | None
    ) -> tuple[str, str]:
        asyncio.get_running_loop().set_exception_handler(_left_behind(writer))
        async with AsyncExitStack() as stack:
            assembly = Assembly(self._job, start, self._run.id, stack)
            pillars = await asyncio.to_thread(assembly.pillars, writer)
            ledger, step = self._restore(folder, writer, pillars)
            controller = Controller(
                self._job,
                self._run.id,
                start.tasks,
                start.evaluation_tasks,
                pillars,
                ledger,
                step,
                folder.checkpoints_dir,
            )
            self._let_it_stop(controller, asyncio.get_running_loop())
            stack.enter_context(self._watch_signals(controller, folder, writer, panel))
            evaluated = frozenset(
                (str(e.get("when")), int(e.get("step", -1))) for e in self._run.records.evals()
            )
            if self._source_changed:
                text = "the file that defines the reward changed: earlier steps were scored by another one"
                writer.event("notice", text=text)
            if await controller.run(evaluated):
                return "finished", "1 step" if controller.step == 1 else f"{controller.step} steps"
            if not controller.stop.is_set():
                lost = controller.step - controller.kept_step
                return (
                    "stopped",
                    f"every episode of the last {lost} steps abstained; the same command redoes them",
                )
            return "stopped", f"asked to stop after step {controller.kept_step}; the same command continues"

    def _let_it_stop(self, controller: Controller, loop: asyncio.AbstractEventLoop) -> None:
        """From here on ``Run.stop`` reaches the controller; a request made before it is passed on."""

        def stop() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(controller.stop.set)

        self._run._stop = stop
        if self._run._stop_asked.is_set():
            controller.stop.set()

    def _restore(self, folder: RunFolder, writer: RunWriter, pillars: Pillars) -> tuple[Ledger, int]:
        """The ledger as recorded, and the trainer's state at the newest checkpoint that is whole."""
        for name in checkpoints.sweep(folder.checkpoints_dir):
            writer.event("notice", text=f"removed a half-written checkpoint: {name}")
        try:
            ledger = Ledger(self._job.prompts_per_step).replay(self._run.records.ledger())
        except LedgerError as error:
            raise RecordError(
                f"the ledger of run {self._run.id} contradicts itself: {error}",
                where=str(folder.path / "ledger"),
                expected="the entries as they were written",
                next_command="restore that folder from a copy, or start another run: --name NEW",
            ) from error
        found = checkpoints.committed(folder.checkpoints_dir)
        for checkpoint in reversed(found):
            try:
                pillars.trainer.load_state(checkpoint.trainer_folder)
            except PalestraError as error:
                writer.event("notice", text=f"checkpoint {checkpoint.step} refused: {error.what}")
                continue
            if checkpoint.step > ledger.step:
                raise RecordError(
                    f"the ledger of run {self._run.id} ends at step {ledger.step}, before its checkpoint "
                    f"of step {checkpoint.step}",
                    where=str(folder.path / "ledger"),
                    expected="every entry that was written",
                    next_command="restore that folder from a copy, or start another run: --name NEW",
                )
            writer.event("state", state="resuming", reason=f"from checkpoint of step {checkpoint.step}")
            self._say_lost_checkpoints(writer, checkpoint.step)
            return ledger, checkpoint.step
        if found:
            raise RecordError(
                f"none of the {len(found)} checkpoints of run {self._run.id} can be read",
                where=str(folder.checkpoints_dir),
                next_command="remove that folder to start again from the model, keeping the records",
            )
        self._say_lost_checkpoints(writer, 0)
        checkpoints.require_space(folder.checkpoints_dir, checkpoint_bytes(pillars))
        return ledger, 0

    def _say_lost_checkpoints(self, writer: RunWriter, restored: int) -> None:
        """A checkpoint that the ledger names and nobody finds was removed by someone: say what is redone."""
        kept = [int(e["step"]) for e in self._run.records.ledger() if e.get("kind") == "checkpoint"]
        if max(kept, default=0) > restored:
            text = f"the checkpoint of step {max(kept)} is gone or damaged: going on from step {restored}"
            writer.event("notice", text=text)

    @contextmanager
    def _watch_signals(
        self, controller: Controller, folder: RunFolder, writer: RunWriter, panel: LivePanel | None
    ) -> Iterator[None]:
        """Once: finish the step and checkpoint. Twice: end now; records and checkpoints are whole.

        Plain signal handlers, so the second one works even while user code blocks the event loop.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()

        def finish_step() -> None:
            controller.stop.set()
            writer.event("notice", text="stopping: finishing the step, then a checkpoint (again: at once)")

        def end_now() -> None:
            try:
                reason = f"interrupted at once after step {controller.step}; the same command continues"
                writer.event("state", state="stopped", reason=reason)
                writer.flush(timeout_s=2)
                if panel is not None:
                    panel.stop()
                folder.set_status("stopped", reason)
                print(f"\npalestra: {reason}", file=sys.stderr, flush=True)
            finally:
                os._exit(INTERRUPTED)

        def handler(number: int, frame: object) -> None:
            self._interrupts += 1
            if self._interrupts == 1:
                loop.call_soon_threadsafe(finish_step)
                return
            # In a thread: the interrupted code may hold the writer's lock.
            threading.Thread(target=end_now, daemon=True).start()
            threading.Timer(5.0, os._exit, (INTERRUPTED,)).start()

        before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, old)
