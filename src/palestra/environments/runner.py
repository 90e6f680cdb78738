"""The boundary around one episode: whatever happens inside, a trajectory comes out.

An exception, a deadline, an absent or impossible verdict, a broken engine or sandbox
becomes an `Abstain` with its boundary and traceback, and the tokens sampled so far
stay in the trajectory; nothing that failed is ever a number. Only cancellation from
outside passes through, after the episode was ended. Cleaning up may fail: that is
written into the detail.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from palestra.environments.base import Environment, where_defined
from palestra.environments.episode import Episode
from palestra.environments.rewards import verdict_of
from palestra.environments.single_turn import SingleTurn
from palestra.errors import PalestraError, TaskError, boundary, traceback_of
from palestra.rollouts.base import Engine
from palestra.sandboxes.base import SandboxHost, SandboxSpec
from palestra.types import Abstain, Boundary, Outcome, Reward, SamplingParams, Span, Task, Trajectory

if TYPE_CHECKING:
    from palestra.environments.chat import Chat
    from palestra.environments.worker import RewardWorkers

_LOG = logging.getLogger(__name__)
CLEANUP_S = 10.0
"""How long a cancelled episode may take to end before it is left behind."""


async def run_episode(
    environment: Environment,
    task: Task,
    *,
    id: str,
    engine: Engine,
    chat: Chat,
    sampling: SamplingParams,
    sandbox_host: SandboxHost | None = None,
    sandbox_spec: SandboxSpec | None = None,
    workers: RewardWorkers | None = None,
    deadline_s: float,
    reward_deadline_s: float,
    context_tokens: int | None = None,
    cleanup_s: float = CLEANUP_S,
) -> Trajectory:
    """Play ``task`` once under ``deadline_s`` seconds. Raises nothing but CancelledError.

    ``context_tokens`` is the engine's limit of prompt and completion together: a
    later turn that does not fit ends the episode's talking (StopReason.CONTEXT)
    instead of failing in the engine. Unknown (None), it abstains.
    """
    episode = Episode(
        task,
        id,
        engine=engine,
        chat=chat,
        sampling=sampling,
        sandbox_host=sandbox_host,
        sandbox_spec=environment.sandbox or sandbox_spec,
        workers=workers,
        reward_deadline_s=reward_deadline_s,
        context_tokens=context_tokens,
        session="" if isinstance(environment, SingleTurn) else id,  # one turn continues nothing
    )
    playing = asyncio.ensure_future(_play(environment, task, episode))
    try:
        outcome = await _outcome_of(playing, episode, deadline_s, cleanup_s)
    finally:
        # Reached unfinished only when we are cancelled ourselves.
        await _end(playing, cleanup_s)
    started = time.monotonic()
    failures = await _settle(asyncio.ensure_future(episode.close()), cleanup_s)
    spans = episode.spans
    if failures:
        spans += (Span("cleanup_failed", started, time.monotonic()),)
        _LOG.warning("cleaning up after episode %s: %s", id, "\n".join(failures))
    return Trajectory(id, task.hash, episode.turns, _with_cleanup(outcome, failures), spans)


async def _play(environment: Environment, task: Task, episode: Episode) -> Outcome:
    """The episode's verdict; PalestraError with a boundary for everything that is none."""
    name = f"{type(environment).__name__}.episode"
    where = where_defined(environment.episode)
    with boundary(Boundary.TASK, name):
        try:
            playing: object = environment.episode(task, episode)
            if not isinstance(playing, Awaitable):
                raise TaskError(
                    f"{name} is not a coroutine function", where=where, expected=f"async def {name}"
                )
            value: object = await playing
        except (SystemExit, KeyboardInterrupt) as error:
            # Left alone, asyncio would take either for the end of the whole run.
            raise TaskError(
                f"{name} raised {type(error).__name__}", where=where, detail=traceback_of(error)
            ) from error
    verdict = verdict_of(value, environment.reward_range, environment.episode)
    if isinstance(verdict, Abstain):
        return verdict
    if episode.unresolved:
        failure = next(iter(episode.unresolved.values()))
        return Abstain(
            f"{failure.what} (the episode caught it and returned {verdict.value:g}, which is no verdict)",
            failure.boundary or Boundary.TASK,
            detail=traceback_of(failure),
        )
    if not any(any(turn.sampled_mask) for turn in episode.turns):
        raise TaskError(
            f"{name} returned {verdict.value:g} without having sampled anything: there is nothing to train",
            where=where,
            expected="await ep.say(...) before the verdict",
        )
    return verdict


async def _outcome_of(
    playing: asyncio.Task[Outcome], episode: Episode, deadline_s: float, cleanup_s: float
) -> Outcome:
    await asyncio.wait({playing}, timeout=deadline_s)
    if not playing.done():
        room = episode.doing or Boundary.TASK
        stack = _stack_of(playing)
        ended = await _end(playing, cleanup_s)
        late = "" if ended else f"\nit did not end within {cleanup_s:g} s of its end and is left behind"
        return Abstain(
            f"the episode did not end within {deadline_s:g} s", room, detail=f"it was at:\n{stack}{late}"
        )
    if playing.cancelled():
        return Abstain("the episode cancelled itself", Boundary.TASK)
    error = playing.exception()
    return playing.result() if error is None else _abstention(error)


def _abstention(error: BaseException) -> Abstain:
    if isinstance(error, PalestraError):
        reason = f"{error.what} ({error.where})" if error.where else error.what
        room = error.boundary or Boundary.TASK
        return Abstain(reason, room, traceback_of(error), where=error.where, expected=error.expected)
    return Abstain(f"{type(error).__name__}: {error}", Boundary.TASK, detail=traceback_of(error))


async def _end(task: asyncio.Task[Outcome], cleanup_s: float) -> bool:
    """Cancel the task and wait until it is over; False if it ignores that."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=cleanup_s)
    if task.done():
        return True
    task.add_done_callback(_looked_at)
    return False


def _looked_at(task: asyncio.Task[Outcome]) -> None:
    """Keep asyncio from reporting an exception that nobody can act on any more."""
    if not task.cancelled():
        task.exception()


async def _settle(closing: asyncio.Task[list[str]], cleanup_s: float) -> list[str]:
    """What went wrong in cleaning up, as text."""
    try:
        await asyncio.wait({closing}, timeout=cleanup_s)
    finally:
        if not closing.done():
            closing.cancel()
    if not closing.done() or closing.cancelled():
        return [f"cleaning up did not end within {cleanup_s:g} s"]
    error = closing.exception()
    return closing.result() if error is None else [f"cleaning up failed:\n{traceback_of(error)}"]


def _with_cleanup(outcome: Outcome, failures: list[str]) -> Outcome:
    """A verdict stays one when cleaning up failed (a span and the log say it); an abstention tells it."""
    if not failures or isinstance(outcome, Reward):
        return outcome
    return replace(outcome, detail="\n".join(part for part in (outcome.detail, *failures) if part))


def _stack_of(task: asyncio.Task[Outcome]) -> str:
    """Where the task waits: every coroutine from the episode's down to the innermost await."""
    frames: list[traceback.FrameSummary] = []
    waiting: Any = task.get_coro()
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        if frame is not None:
            code = frame.f_code
            frames.append(traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name))
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
    return "".join(traceback.format_list(frames))
