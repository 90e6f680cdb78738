"""A user's Python file, run as if ``python FILE`` had started it, with a command's layers over its jobs.

The module stays in ``sys.modules["__main__"]`` while anything it started lives, so
what it defines can be pickled by value. A failure of the file is shown with the
file's own frames only. What the file left behind is put back at the end.
"""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from palestra.cli.codes import USAGE
from palestra.cli.command import UsageError
from palestra.errors import PalestraError, nearest

if TYPE_CHECKING:
    from palestra.job import Job


class JobFileError(PalestraError):
    """The user's file raised; ``detail`` is its traceback."""


def require_file(path: Path, verb: str = "train") -> Path:
    """The file's absolute path; UsageError with the nearest name where there is none."""
    if path.is_file():
        return path.absolute()
    inside = path.is_dir()
    folder = path if inside else path.parent
    names = sorted(p.name for p in folder.glob("*.py")) if folder.is_dir() else []
    close = (names[0] if names else "") if inside else nearest(path.name, names)
    raise UsageError(
        f"{path} is a folder, not a file" if inside else f"there is no file {path}",
        expected="a Python file that builds a palestra.Job",
        nearest=str(folder / close) if close else "",
        next_command=f"palestra {verb} {folder / close if close else 'FILE.py'}",
    )


@contextmanager
def as_main(path: Path, arguments: Sequence[str]) -> Iterator[ModuleType]:
    """Run ``path`` as ``__main__`` and give its module; it is ``__main__`` until the block ends."""
    module = ModuleType("__main__")
    module.__dict__.update(__file__=str(path), __builtins__=__builtins__, __cached__=None, __spec__=None)
    kept = sys.modules.get("__main__"), sys.argv, list(sys.path)
    sys.modules["__main__"] = module
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    try:
        _run(path, module)
        yield module
    finally:
        main, sys.argv, sys.path[:] = kept
        if main is not None:
            sys.modules["__main__"] = main


def _run(path: Path, module: ModuleType) -> None:
    try:
        code = path.read_bytes()
        if b"\0" in code:  # compile's own error for it names neither file nor line
            line = code[: code.index(b"\0")].count(b"\n") + 1
            raise UsageError(
                f"{path.name} is not Python text: it holds NUL bytes",
                where=f"{path}:{line}",
                expected="a Python file that builds a palestra.Job",
            )
        exec(compile(code, str(path), "exec"), module.__dict__)
    except PalestraError:
        raise
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    except SyntaxError as error:
        raise _not_python(path, error) from error
    except Exception as error:  # a user's file may raise anything; this is its boundary
        linecache.checkcache(str(path))
        failed = JobFileError(
            f"{path.name} raised {type(error).__name__}: {error}",
            where=_innermost_line(error, path),
            detail=_own_frames(error, path),
            next_command=f"python {path.name} shows the same outside of palestra",
        )
        if not _has_trained():
            failed.exit_code = USAGE
        raise failed from error


def _has_trained() -> bool:
    """Whether the file came as far as a run: before that, what it raises is wrong usage of palestra."""
    from palestra.settings import active

    return active().began


def _not_python(path: Path, error: SyntaxError) -> PalestraError:
    what = f"{path.name} is not valid Python: {error.msg}"
    if error.filename != str(path):
        what = f"{path.name} imports {error.filename}, which is not valid Python: {error.msg}"
    place = f"{error.filename}:{error.lineno}" if error.filename else str(path)
    return UsageError(what, where=place, next_command="correct that line, then the same command")


def _innermost_line(error: BaseException, path: Path) -> str:
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)


def _own_frames(error: BaseException, path: Path) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(path):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))


def only_job(names: Mapping[str, object], path: Path) -> Job:
    """The one Job among the file's names; UsageError that says what was found otherwise."""
    from palestra.job import Job

    jobs = {name: value for name, value in names.items() if isinstance(value, Job)}
    distinct = {id(job): name for name, job in jobs.items()}
    if len(distinct) == 1:
        return next(iter(jobs.values()))
    if jobs:
        shown = ", ".join(distinct.values())
        raise UsageError(
            f"{path.name} defines {len(distinct)} jobs ({shown}) and trains none of them",
            expected="one job, or a call to .train() on the one that is meant",
            nearest=f"{next(iter(jobs))}.train()",
            next_command=f"write that line at the end of {path.name}, then the same command",
        )
    raise UsageError(
        f"{path.name} has no palestra.Job and never called Job.train()",
        expected="a line such as: job = pa.Job(model=..., environment=...)",
        next_command="palestra config schema",
    )
