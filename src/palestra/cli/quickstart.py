"""``palestra quickstart``: the ready-made run of `palestra.recipes.quickstart`."""

from __future__ import annotations

import argparse

from palestra.cli.command import Command


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--task", choices=("python", "expressions"),
        help="python: a small instruct model writes functions, run in a sandbox (the default); "
        "expressions: a character model from scratch, which runs no model-written code",
    )  # fmt: skip
    parser.add_argument("--new", action="store_true", help="start another run instead of continuing the last")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="sets", help="one setting"
    )
    parser.add_argument("--no-panel", action="store_true", help="no live panel")


def _quickstart(args: argparse.Namespace) -> int:
    from palestra.recipes.quickstart import main

    return main(task=args.task, new=args.new, sets=args.sets, panel=False if args.no_panel else None)


COMMANDS = {
    "quickstart": Command(
        "Post-train a small model on this machine's processor, with an evaluation before and after.",
        _arguments,
        _quickstart,
        json=False,
        examples=("palestra quickstart", "palestra quickstart --task expressions --set steps=30"),
    )
}
