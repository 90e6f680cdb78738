"""The ``palestra`` command: finds the verb, loads only its module, and lets it run.

Starting is cheap: no verb's module is imported before it was asked for, and
no help text, list or wrong word loads torch, pydantic or rich.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from palestra import __version__
from palestra.cli.codes import EXIT_CODES, USAGE

if TYPE_CHECKING:
    from palestra.cli.command import Command

VERBS = {
    "quickstart": "a model that visibly learns on this machine, in minutes",
    "train": "train the job of a Python file, or continue its run",
    "serve": "a model, a run or a checkpoint behind OpenAI's API",
    "chat": "talk to what is served",
    "runs list": "the runs in the runs folder",
    "runs show": "one run: how it stands, its curve, evaluations and checkpoints",
    "runs rm": "remove one run: its records and checkpoints",
    "config show": "every setting's value, and where it comes from",
    "config schema": "every setting there is: type, default, unit",
    "doctor": "what this machine has, what is missing, and what to do about it",
}
"""Verb -> its line of help. The first word is the module in ``palestra.cli``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    return code


def _dispatch(words: list[str]) -> int:
    if words and words[0] in ("--version", "-V"):
        print(f"palestra {__version__}")
        return 0
    if words and words[0] in ("--help", "-h", "help"):
        print(usage())
        return 0
    verb = _verb_of(words)
    if verb is None:
        return _no_verb(words)
    from palestra.cli.command import execute

    room, _, name = verb.partition(" ")
    module = importlib.import_module(f"palestra.cli.{room}")
    command: Command = module.COMMANDS[name or room]
    return execute(f"palestra {verb}", command, words[len(verb.split()) :])


def _verb_of(words: Sequence[str]) -> str | None:
    return next((verb for verb in VERBS if verb.split() == list(words[: len(verb.split())])), None)


def _no_verb(words: Sequence[str]) -> int:
    """Say what was meant: a missing word, or the nearest verb."""
    if not words:
        print(usage(), file=sys.stderr)
        return USAGE
    first = words[0]
    inside = [verb for verb in VERBS if verb.startswith(f"{first} ")]
    second = words[1] if len(words) > 1 else ""
    if inside and second in ("", "--help", "-h"):
        print("\n".join(f"palestra {verb}  {VERBS[verb]}" for verb in inside))
        return 0 if second else USAGE
    from palestra.cli.command import UsageError, report
    from palestra.errors import nearest

    asked = f"{first} {second}" if inside else first
    firsts = {verb.split()[0]: verb for verb in VERBS} | {flag: flag for flag in ("--version", "--help")}
    close = nearest(asked, inside) if inside else firsts.get(nearest(first, firsts), "")
    error = UsageError(
        f"there is no command 'palestra {asked}'",
        expected=", ".join(inside or VERBS),
        nearest=f"palestra {close}" if close else "",
        next_command="palestra --help",
    )
    return report(error, as_json="--json" in words, debug=False)


def usage() -> str:
    """The top-level help."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb.ljust(width)}  {about}" for verb, about in VERBS.items())
    return (
        f"palestra {__version__}: reinforcement-learning post-training of language models\n\n"
        f"usage: palestra COMMAND ...      palestra COMMAND --help      palestra --version\n\n"
        f"commands:\n{verbs}\n\n{EXIT_CODES}\n\nstart here: palestra quickstart"
    )


if __name__ == "__main__":
    sys.exit(main())
