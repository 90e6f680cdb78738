"""``palestra runs``: what lies in the runs folder. Imports nothing heavy.

Listing and showing read records only. Removing takes the run's lock first: what a
process still writes is never removed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import shutil
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.cli.codes import OK
from palestra.cli.command import Command, UsageError, print_json, safe, table
from palestra.errors import nearest

if TYPE_CHECKING:
    from palestra.records.listing import RunSummary
    from palestra.records.reader import RunReader

_CURVE_COLUMNS = 40
_CONTINUABLE = ("lost", "stopped", "failed")


def default_runs_dir() -> Path:
    """Where runs are kept when no flag says: PALESTRA_RUNS_DIR, palestra.toml, else ``runs``.

    Read here without `palestra.settings`, which takes pydantic to load; a file that
    is wrong is refused where a job is built, and listing runs does not wait for that.
    """
    named = os.environ.get("PALESTRA_RUNS_DIR")
    if not named:
        try:
            named = tomllib.loads(Path("palestra.toml").read_text(encoding="utf-8-sig")).get("runs_dir")
        except (OSError, ValueError):
            named = None
    return Path(named if isinstance(named, str) and named else "runs").expanduser()


def _runs_dir_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runs-dir", type=Path, metavar="DIR", help="where runs are kept (default: as a job would)"
    )


def _list(args: argparse.Namespace) -> int:
    from palestra.records.listing import list_runs

    folder = args.runs_dir or default_runs_dir()
    runs = list_runs(folder)
    if args.json:
        print_json({"runs_dir": str(folder), "runs": [_summary_json(run) for run in runs]})
    elif not runs:
        print(f"no runs in {safe(str(folder))}; palestra quickstart makes the first one")
    else:
        print(table(("name", "state", "step", "reward", "model", "created"), [_row(run) for run in runs]))
    return OK


def _row(run: RunSummary) -> list[str]:
    created = datetime.datetime.fromtimestamp(run.created) if run.created else None
    return [
        run.name,
        run.state,
        f"{run.step}/{'?' if run.steps is None else run.steps}",
        "-" if run.reward is None else f"{run.reward:.3f}",
        run.model or run.reason or "-",
        f"{created:%Y-%m-%d %H:%M}" if created else "-",
    ]


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="NAME|PATH", help="a run's name, or its folder")
    _runs_dir_argument(parser)


def _show(args: argparse.Namespace) -> int:
    from palestra.records.reader import RunReader

    path = find_run(args.run, args.runs_dir or default_runs_dir())
    reader = RunReader(path)
    if args.json:
        print_json(describe(reader, path))
    else:
        print("\n".join(show_lines(reader, path)))
    return OK


def find_run(named: str, folder: Path) -> Path:
    """The run's folder; UsageError with the nearest name where there is none."""
    for path in (folder / named, Path(named)):
        if (path / "run.json").is_file():
            return path
    names = sorted(p.parent.name for p in folder.glob("*/run.json"))
    raise UsageError(
        f"there is no run {named!r} in {folder}",
        expected="one of " + ", ".join(names[:20]) if names else "a folder with a run.json",
        nearest=nearest(named, names),
        next_command="palestra runs list",
    )


def describe(reader: RunReader, path: Path) -> dict[str, Any]:
    """All that ``runs show`` knows, as plain objects."""
    state, reason = reader.state()
    info = reader.info()
    return {
        "name": path.name,
        "path": str(path),
        "state": str(state),
        "reason": reason,
        "info": dict(info),
        "attempts": len(reader.attempts()),
        "reward": [[step, value] for step, value in reader.series("reward/mean")],
        "evaluations": list(reader.evals()),
        "checkpoints": [
            {"step": step, "path": str(folder), "complete": complete}
            for step, folder, complete in reader.checkpoints()
        ],
    }


def show_lines(reader: RunReader, path: Path) -> list[str]:
    """The run's summary, and what a person asks next: where it lies, its curve, what it can resume from."""
    from palestra.ui.sparkline import sparkline
    from palestra.ui.summary import summary_of

    reward = [value for _, value in reader.series("reward/mean")]
    lines = [
        *summary_of(reader).split("\n"),
        f"  folder    {path}",
        f"  base      {reader.info().get('model', 'unknown')}",
        f"  attempts  {len(reader.attempts())}",
    ]
    if reward:
        lines.append(f"  curve     {sparkline(reward, _CURVE_COLUMNS)}")
    for step, _, complete in reader.checkpoints():
        lines.append(f"  saved     step {step}" + ("" if complete else "  (incomplete)"))
    if reader.state().state in _CONTINUABLE:
        lines.append(f"  next      the same command continues it: {_command_of(reader)}")
    return [safe(line) for line in lines]


def _command_of(reader: RunReader) -> str:
    """The command of the last attempt, as it was typed."""
    attempts = reader.attempts()
    argv = attempts[-1]["launch"].get("argv") if attempts else None
    words = (
        [str(word) for word in argv] if isinstance(argv, list) and argv else ["palestra", "train", "FILE.py"]
    )
    name = Path(words[0]).name
    module = name == "__main__.py" or name == "palestra"
    return shlex.join(["palestra", *words[1:]] if module else ["python", *words])


def _remove_arguments(parser: argparse.ArgumentParser) -> None:
    _show_arguments(parser)
    parser.add_argument("--yes", action="store_true", help="remove without asking")


def _remove(args: argparse.Namespace) -> int:
    from palestra.records.files import disk_error
    from palestra.records.folder import RunFolder

    path = find_run(args.run, args.runs_dir or default_runs_dir())
    if path.is_symlink():
        raise UsageError(
            f"{path} is a link, and only a run's own folder is removed", nearest=str(path.resolve())
        )
    size = sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())
    if not args.yes and not _agreed(f"remove {path} ({size / 1e6:.0f} MB, its checkpoints too)?", path):
        print(f"kept {safe(str(path))}", file=sys.stderr)
        return OK
    folder = RunFolder.open(path, create=False)
    folder.lock()  # refused where a process still runs it
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise disk_error("removing the run", path, error, started=False) from error
    finally:
        folder.unlock()
    if args.json:
        print_json({"removed": str(path), "bytes": size})
    else:
        print(f"removed {safe(str(path))} ({size / 1e6:.0f} MB)")
    return OK


def _agreed(question: str, path: Path) -> bool:
    print(f"{safe(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer:
        print(file=sys.stderr)
        raise UsageError(
            "nobody answered whether to remove the run",
            expected="y, or the flag that answers before",
            next_command=f"palestra runs rm {path.name} --yes",
        )
    return answer.strip().lower() in ("y", "yes")


def _summary_json(run: RunSummary) -> dict[str, Any]:
    return asdict(run) | {"path": str(run.path)}


COMMANDS = {
    "list": Command("The runs in the runs folder.", _runs_dir_argument, _list),
    "show": Command("One run.", _show_arguments, _show, examples=("palestra runs show quickstart",)),
    "rm": Command(
        "Remove one run's folder: records and checkpoints. A run that is going on is refused.",
        _remove_arguments,
        _remove,
        examples=("palestra runs rm quickstart", "palestra runs rm quickstart --yes"),
    ),
}
