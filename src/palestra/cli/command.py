"""What the verbs share: how arguments are read, how results and errors leave the process.

Importing this module costs nothing beyond argparse. Every usage error names the
nearest valid word; every known failure leaves as a message and an exit code.
Whatever came from a model, a file or a user's string is printed through
``safe``: a terminal never sees its control characters.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from palestra.cli.codes import EXIT_CODES, INTERRUPTED, USAGE
from palestra.errors import PalestraError, RunStopped, nearest


class UsageError(PalestraError):
    """A command line that means nothing; nothing was started."""

    exit_code = USAGE


@dataclass(frozen=True)
class Command:
    """One verb: which arguments it takes, and what it does with them (returns an exit code)."""

    about: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    takes_rest: bool = False
    """Whether words after ``--`` are passed on (to the user's file)."""
    json: bool = True
    """Whether it can answer in JSON."""
    examples: Sequence[str] = field(default_factory=tuple[str, ...])


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of printing and exiting."""

    def __init__(self, prog: str, about: str, examples: Sequence[str]) -> None:
        shown = "".join(f"\n  {line}" for line in examples)
        super().__init__(
            prog=prog,
            description=about,
            epilog=(f"examples:{shown}\n\n" if shown else "") + EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise self.wrong(message)

    def wrong(self, message: str, close: str = "") -> UsageError:
        """The error that says ``message`` about this verb."""
        verb = self.prog.removeprefix("palestra ")
        return UsageError(f"{verb}: {message}", nearest=close, next_command=f"{self.prog} --help")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """The arguments; UsageError with the nearest flag for one that does not exist."""
        args, extra = self.parse_known_args(words)
        if not extra:
            return args
        word = extra[0].partition("=")[0]
        flags = [flag for action in self._actions for flag in action.option_strings]
        if word.startswith("-"):
            raise self.wrong(f"there is no flag {word}", nearest(word, flags))
        raise self.wrong(f"one word too many: {word!r}", _joined(words, word))


def _joined(words: Sequence[str], extra: str) -> str:
    """``--set steps=5`` for ``--set steps 5``; '' where the word too many follows no ``--set``."""
    at = list(words).index(extra) if extra in words else 0
    key = words[at - 1] if at >= 2 and words[at - 2] == "--set" else ""
    return f"--set {key}={extra}" if key and "=" not in key else ""


def _add_common(parser: argparse.ArgumentParser, *, as_json: bool) -> None:
    if as_json:
        parser.add_argument(
            "--json", action="store_true", help="print one JSON object and nothing else to stdout"
        )
    parser.add_argument("--debug", action="store_true", help="show tracebacks (also PALESTRA_DEBUG=1)")


def execute(prog: str, command: Command, words: Sequence[str]) -> int:
    """Read ``words`` and run the command; every error leaves as a message and an exit code."""
    own, rest = _split(words)
    as_json, debug = "--json" in own, "--debug" in own or os.environ.get("PALESTRA_DEBUG") == "1"
    try:
        parser = Parser(prog, command.about, command.examples)
        if rest and not command.takes_rest:
            raise parser.wrong("takes no words after --")
        _add_common(parser, as_json=command.json)
        command.arguments(parser)
        args = parser.read(own)
        args.rest = rest
        return command.run(args)
    except PalestraError as error:
        return report(error, as_json=as_json, debug=debug)
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        print("palestra: interrupted", file=sys.stderr)
        return INTERRUPTED


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    if "--" not in words:
        return list(words), []
    at = list(words).index("--")
    return list(words[:at]), list(words[at + 1 :])


def report(error: PalestraError, *, as_json: bool, debug: bool) -> int:
    """Print the error where its reader looks, and give its exit code."""
    if as_json:
        print_json({"error": error_json(error)})
    elif debug:
        traceback.print_exception(error)
    else:
        # What stopped a run is said by its parts; the traceback behind it lies in its records.
        stopped = isinstance(error, RunStopped) and error.detail
        text = (
            f"{error.brief()}\n  traceback: with --debug, and in the run's records" if stopped else str(error)
        )
        print(f"palestra: {safe(text)}", file=sys.stderr)
    return error.exit_code


def error_json(error: PalestraError) -> dict[str, Any]:
    """The error's parts; empty ones are left out."""
    parts: dict[str, Any] = {
        "kind": type(error).__name__,
        "what": error.what,
        "where": error.where,
        "expected": error.expected,
        "nearest": error.nearest,
        "next": error.next_command,
        "detail": error.detail,
        "boundary": str(error.boundary) if error.boundary else "",
        "problems": list(getattr(error, "problems", ())),
        "exit_code": error.exit_code,
    }
    return {name: part for name, part in parts.items() if part or name == "exit_code"}


def print_json(value: Any) -> None:
    """One strict JSON document on stdout, in ASCII: whole whatever the terminal's encoding."""
    import json

    from palestra.records.schema import jsonable

    print(json.dumps(jsonable(value), indent=2, allow_nan=False))


def safe(text: str) -> str:
    """``text`` without control characters, so it cannot move the cursor or change colours; lines stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned with two spaces between; each cell is one harmless line."""
    from palestra.ui.text import safe_text

    cells = [[safe_text(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )
