"""``palestra train FILE.py``: the user's file with this command's layers over its jobs.

The file may call ``Job.train()`` itself; if it does not and defines one Job, that
one is trained. The same command again continues the run. With ``--json`` nothing
but one JSON object reaches stdout: whatever the file prints goes to stderr.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

from palestra.cli.codes import FAILED, OK, STOPPED
from palestra.cli.command import Command, print_json
from palestra.cli.job_file import as_main, only_job, require_file

_EXIT_BY_STATUS = {"finished": OK, "stopped": STOPPED}


def layer_arguments(parser: argparse.ArgumentParser) -> None:
    """``--set`` and ``--config``: the layers that a command can lay."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="sets",
        help="one setting, for example optimizer.learning_rate=3e-5; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE", type=Path,
        help="a TOML file of settings instead of ./palestra.toml; may be repeated, later ones win",
    )  # fmt: skip


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE.py", help="the Python file that builds the Job")
    layer_arguments(parser)
    parser.add_argument("--steps", metavar="N", help="short for --set steps=N")
    parser.add_argument("--name", metavar="NAME", help="short for --set name=NAME")
    parser.add_argument("--runs-dir", metavar="DIR", help="short for --set runs_dir=DIR")
    parser.add_argument("--no-panel", action="store_true", help="no live panel")


def sets_of(args: argparse.Namespace) -> list[str]:
    """``--set`` and the flags that are short for one, as texts that name what was typed."""
    flags = (("--steps", args.steps), ("--name", args.name), ("--runs-dir", args.runs_dir))
    return [*args.sets, *(f"{flag}={value}" for flag, value in flags if value is not None)]


def _train(args: argparse.Namespace) -> int:
    from palestra.settings import Overlay, overlay

    path = require_file(args.file)
    quiet = args.json or args.no_panel
    layers = Overlay(args.config or None, sets_of(args), path, panel=False if quiet else None)
    with ExitStack() as stack:
        if args.json:
            stack.enter_context(redirect_stdout(sys.stderr))
        stack.enter_context(overlay(layers))
        module = stack.enter_context(as_main(path, args.rest))
        if not layers.runs:
            only_job(vars(module), path).train()
        for run in layers.runs:
            run.wait()
    states = [run.status for run in layers.runs]
    if args.json:
        print_json({"runs": [_run_json(run) for run in layers.runs]})
    return max((_EXIT_BY_STATUS.get(state, FAILED) for state in states), key=_badness)


def _badness(code: int) -> int:
    return (OK, STOPPED, FAILED).index(code)


def _run_json(run: Any) -> dict[str, Any]:
    state, reason = run.records.state()
    return {
        "id": run.id,
        "path": str(run.path),
        "state": str(state),
        "reason": reason,
        "checkpoints": [str(path) for path in run.checkpoints()],
    }


COMMANDS = {
    "train": Command(
        "Train the job of a Python file; the same command again continues its run.",
        _arguments,
        _train,
        takes_rest=True,
        examples=(
            "palestra train job.py",
            "palestra train job.py --steps 50 --set optimizer.learning_rate=3e-5",
            "palestra train job.py -- words for the file's own sys.argv",
        ),
    )
}
