"""The failure model: who raises what, and how a failure finds its room.

Every error a user sees says what went wrong, where, what was expected, the
nearest valid thing and one next command; `PalestraError` holds those parts and
formats them. User code raises plain exceptions; `boundary` gives such a failure
exactly one `Boundary`, keeping the cause and its traceback. An error that
already has a boundary passes through unchanged, so a failure is named once, by
the innermost room that knows it. Policy failures (a crash of model-written
code, a wrong answer) are data and never pass through here.
"""

from __future__ import annotations

import difflib
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from palestra.types import Boundary


class PalestraError(Exception):
    """An error with its remedy. ``str()`` gives one line per part that is known."""

    boundary: Boundary | None = None
    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        expected: str = "",
        nearest: str = "",
        next_command: str = "",
        detail: str = "",
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.expected = expected
        self.nearest = nearest
        self.next_command = next_command
        self.detail = detail
        """A remote traceback or program output: shown after the parts, kept whole in the records."""

    def brief(self) -> str:
        """Everything but ``detail``: what a reader needs who can ask for the rest."""
        rows = [
            ("where", self.where),
            ("expected", self.expected),
            ("nearest", self.nearest),
            ("next", self.next_command),
        ]
        return "\n".join([self.what, *(f"  {name}: {text}" for name, text in rows if text)])

    def __str__(self) -> str:
        lines = [self.brief()]
        if self.detail:
            lines.append("  detail:")
            lines.extend(f"    {line}" for line in self.detail.rstrip().splitlines())
        return "\n".join(lines)


class ConfigError(PalestraError):
    """One or more settings are wrong. All problems are reported at once."""

    exit_code = 2

    def __init__(self, problems: Sequence[str], *, next_command: str = "palestra config schema") -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "the job's configuration " + ("is wrong" if count == 1 else f"has {count} errors")
        super().__init__(head, next_command=next_command)

    def __str__(self) -> str:
        lines = [f"{self.what}:", *(f"  - {p}" for p in self.problems)]
        return "\n".join([*lines, f"  next: {self.next_command}"])


class MissingExtraError(PalestraError):
    """A dependency that is an extra is not installed."""

    exit_code = 3

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(
            f"this needs the Python package {module!r}, which is not installed",
            expected=f"palestra installed with its {extra!r} extra",
            next_command=install_command(extra),
        )


def install_command(extra: str) -> str:
    """What installs an extra into this very Python, whichever ``pip`` the shell would find."""
    python = sys.executable.removeprefix(f"{Path.cwd()}/")
    return f"{shlex.quote(python)} -m pip install 'palestra[{extra}]'"


class TaskError(PalestraError):
    """Wrong usage where it reaches a user: once a run goes on, an episode's failure is an abstention."""

    boundary = Boundary.TASK
    exit_code = 2


class RewardError(PalestraError):
    """As TaskError: while a run goes on it is an abstention, before one it is wrong usage."""

    boundary = Boundary.REWARD
    exit_code = 2


class ChatError(PalestraError):
    """As TaskError."""

    boundary = Boundary.CHAT
    exit_code = 2


class EngineError(PalestraError):
    boundary = Boundary.ENGINE


class SandboxError(PalestraError):
    """The sandbox itself failed (never: the program in it). The episode abstains."""

    boundary = Boundary.SANDBOX


class IsolationUnavailable(SandboxError):
    """This machine cannot isolate a program as asked; nothing was run."""

    exit_code = 3


class TrainerError(PalestraError):
    boundary = Boundary.TRAINER


class WeightsError(PalestraError):
    boundary = Boundary.WEIGHTS


class ClusterError(PalestraError):
    boundary = Boundary.CLUSTER


class RecordError(PalestraError):
    boundary = Boundary.RECORD


class ModelSourceError(PalestraError):
    """A model could not be found, fetched, verified or converted."""

    exit_code = 3


class RunStopped(PalestraError):
    """The run stopped itself at a consistent point and says why; the same command continues it."""


_BY_BOUNDARY: dict[Boundary, type[PalestraError]] = {
    Boundary.TASK: TaskError,
    Boundary.REWARD: RewardError,
    Boundary.CHAT: ChatError,
    Boundary.ENGINE: EngineError,
    Boundary.SANDBOX: SandboxError,
    Boundary.TRAINER: TrainerError,
    Boundary.WEIGHTS: WeightsError,
    Boundary.CLUSTER: ClusterError,
    Boundary.RECORD: RecordError,
}


class boundary:  # noqa: N801 - reads as a statement: with boundary(Boundary.REWARD, ...)
    """Context manager that gives whatever plain exception leaves it this boundary.

    `PalestraError` with a boundary, cancellation and exits pass through untouched.
    The new error's ``detail`` is the full traceback, its cause the original.
    """

    def __init__(self, name: Boundary, doing: str) -> None:
        self.name = name
        self.doing = doing

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if not isinstance(error, Exception):
            return False
        if isinstance(error, PalestraError) and error.boundary is not None:
            return False
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise _BY_BOUNDARY[self.name](
            f"{self.doing} raised {text}", where=_innermost(trace), detail=traceback_of(error)
        ) from error


def traceback_of(error: BaseException) -> str:
    """The error's traceback as text, causes included."""
    return "".join(traceback.format_exception(error))


_NOT_THE_USERS = tuple(
    f"{folder}/"
    for folder in (Path(__file__).parent, *(sysconfig.get_path(name) for name in ("stdlib", "purelib")))
)


def is_users(file: str) -> bool:
    """Whether code of that file is the user's: neither ours, nor Python's, nor an installed package's."""
    return not file.startswith(("<frozen", *_NOT_THE_USERS))


def users_line() -> str:
    """``file:line`` of the innermost call in the user's code, or '' where there is none."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # inspect would load much more
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""


def _innermost(trace: TracebackType | None) -> str:
    """The innermost line of the user's code, or of any code where the user's is not in it."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if is_users(frame.filename)] or frames
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""


def nearest(name: str, valid: Iterable[str]) -> str:
    """The valid spelling closest to ``name``, or '' where none is close."""
    found = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return found[0] if found else ""
