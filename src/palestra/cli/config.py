"""``palestra config``: what is set and why (``show``), and what could be set (``schema``).

``show`` prints valid TOML: its output, saved as ``palestra.toml``, gives the same
values again. With a file, the file runs up to its ``Job.train()``, and nothing is
trained.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.cli.codes import OK
from palestra.cli.command import Command, print_json, safe, table
from palestra.cli.job_file import as_main, only_job, require_file
from palestra.cli.train import layer_arguments, sets_of

if TYPE_CHECKING:
    from palestra.settings import Origin, Values


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        type=Path,
        nargs="?",
        metavar="FILE.py",
        help="a job file; without one: files, environment and --set",
    )
    parser.add_argument("--origin", action="store_true", help="say beside each value where it comes from")
    layer_arguments(parser)
    parser.set_defaults(steps=None, name=None, runs_dir=None)


def _show(args: argparse.Namespace) -> int:
    values = _values(args)
    if args.json:
        print_json({"values": values.to_json(), "provenance": values.provenance_json()})
    else:
        print("\n".join(toml_lines(values, origins=args.origin)))
    return OK


def _values(args: argparse.Namespace) -> Values:
    from palestra.settings import JobSeenError, Overlay, overlay, resolve, resolve_values

    files, sets = args.config or None, sets_of(args)
    if args.file is None:
        return resolve_values(files=files, sets=sets)
    path = require_file(args.file, "config show")
    try:
        with ExitStack() as stack:
            stack.enter_context(redirect_stdout(sys.stderr))  # what the file prints is not ours
            stack.enter_context(overlay(Overlay(files, sets, path, look_only=True)))
            module = stack.enter_context(as_main(path, args.rest))
            return resolve(only_job(vars(module), path), files=files, sets=sets, job_file=path)
    except JobSeenError as seen:
        return seen.resolved


def toml_lines(values: Values, *, origins: bool) -> Iterator[str]:
    """The values as a TOML file, sections after the top level."""
    from palestra.fields import leaves, toml_text
    from palestra.job import Job

    section = ""
    for key, leaf in leaves(Job).items():
        group, _, name = key.rpartition(".")
        if group != section:
            section = group
            yield f"\n[{group}]"
        if not leaf.settable or key not in values.values:
            given = type(values.values[key]).__name__ if key in values.values else "not set"
            yield f"# {name}: {safe(given)}"
            continue
        line = f"{name} = {toml_text(values.values[key])}"
        yield f"{line}  # {_because(values.provenance[key])}" if origins else line


def _because(origin: Origin) -> str:
    from palestra.fields import toml_text

    lower = ", ".join(f"{toml_text(low.value)} from {low}" for low in origin.overridden)
    return safe(f"{origin}, over {lower}" if lower else str(origin)).replace("\n", " ")


def _schema_arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def _schema(args: argparse.Namespace) -> int:
    from palestra.fields import toml_text

    rows = schema_rows()
    if args.json:
        print_json({"fields": rows})
        return OK
    shown = [
        [
            row["key"],
            row["type"],
            toml_text(row["default"]) if "default" in row else "required",
            row["about"],
        ]
        for row in rows
    ]
    print(table(("setting", "type", "default", "what it is [unit]"), shown))
    print("\nlayers, the lowest first: defaults, Job(...) in Python, palestra.toml or --config FILE,")
    print("PALESTRA_SECTION__SETTING=value in the environment, --set section.setting=value")
    return OK


def schema_rows() -> list[Mapping[str, Any]]:
    """One object for each setting: key, type in words, default (absent where required), unit, description."""
    from palestra.fields import leaves
    from palestra.job import Job
    from palestra.settings import plain

    rows: list[Mapping[str, Any]] = []
    for key, leaf in leaves(Job).items():
        row: dict[str, Any] = {
            "key": key,
            "type": leaf.expected,
            "unit": leaf.unit,
            "about": leaf.description,
        }
        if not leaf.info.is_required():
            row["default"] = plain(leaf.default)
        if leaf.choices:
            row["choices"] = list(leaf.choices)
        rows.append(row)
    return rows


COMMANDS = {
    "show": Command(
        "Every setting's value, as TOML.",
        _show_arguments,
        _show,
        takes_rest=True,
        examples=("palestra config show job.py --origin", "palestra config show --set steps=5"),
    ),
    "schema": Command("Every setting there is.", _schema_arguments, _schema),
}
