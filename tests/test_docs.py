"""The pages say what is there (links, commands, paths, names, programs); no file says where it was made."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import palestra
from helpers.character import warmed_up_stand_in
from palestra.cli.main import VERBS
from palestra.job import Job

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "palestra"
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "AGENTS.md"]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
WITHOUT_JOB = {"serve_and_chat.py"}
"""Examples that train nothing."""
COMPLETE = "# a complete program"
"""The first line of a block that a reader can run as it stands."""


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=page_id)


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str
    line: int


FENCE = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(m["language"], m["text"], text.count("\n", 0, m.start("text")) + 1)
        for m in FENCE.finditer(text)
    ]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def code_lines(page: Path) -> list[str]:
    """What a page sets in code: inline spans, and the lines of blocks that are not Python."""
    spans = re.findall(r"`([^`\n]+)`", prose(page))
    fenced = [
        line for block in blocks(page) if block.language != "python" for line in block.text.splitlines()
    ]
    return spans + fenced


# -- links


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_every_relative_link_resolves(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{page_id(page)} links to {target}, which does not exist"
        assert not anchor or anchor in anchors(linked), f"{page_id(page)} links to {target}: no such heading"


# -- programs

PROGRAMS = [
    pytest.param(page, block, id=f"{page_id(page)}:{block.line}")
    for page in PAGES
    for block in blocks(page)
    if block.language == "python"
]


@pytest.mark.parametrize(("page", "block"), PROGRAMS)
def test_python_blocks_compile_and_complete_programs_run(page: Path, block: Block, tmp_path: Path) -> None:
    compile(block.text, f"{page_id(page)}:{block.line}", "exec")
    if not block.text.startswith(COMPLETE):
        return
    if "BubblewrapHost" in block.text:
        from helpers.sandbox_modes import here_or_skip

        here_or_skip()
    done = subprocess.run(
        [sys.executable, "-c", block.text], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# -- commands


def verb_of(words: list[str]) -> str:
    return next((verb for verb in VERBS if verb.split() == words[: len(verb.split())]), "")


def flags_of(verb: str) -> set[str]:
    """Every flag that a verb takes, the common ones included."""
    from palestra.cli.command import Command, Parser, _add_common

    room, _, name = verb.partition(" ")
    command: Command = importlib.import_module(f"palestra.cli.{room}").COMMANDS[name or room]
    parser: argparse.ArgumentParser = Parser(f"palestra {verb}", "", ())
    _add_common(parser, as_json=command.json)
    command.arguments(parser)
    return {flag for action in parser._actions for flag in action.option_strings}


def commands(page: Path) -> Iterator[list[str]]:
    """The words after ``palestra`` of every command line that a page shows."""
    for line in code_lines(page):
        found = re.search(r"(?:^|[\s/])palestra ([a-z-].*)", line)
        if found:
            yield shlex.split(found[1], comments=True)


@every_page
def test_every_command_line_is_one_that_the_command_takes(page: Path) -> None:
    for words in commands(page):
        if words[0].startswith("-"):
            assert words[0] in ("--help", "--version"), f"{page_id(page)}: palestra {' '.join(words)}"
            continue
        verb = verb_of(words)
        assert verb, f"{page_id(page)}: there is no command 'palestra {' '.join(words)}'"
        given = words[: words.index("--")] if "--" in words else words
        flags = {word.partition("=")[0] for word in given if word.startswith("-")}
        assert flags <= flags_of(verb), f"{page_id(page)}: palestra {' '.join(words)}"


@every_page
def test_every_make_target_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in code_lines(page):
        found = re.match(r"\$? ?make ([a-z-]+)", line)
        assert not found or found[1] in targets, f"{page_id(page)}: make {found and found[1]}"


# -- paths and names in the code


def is_file_of_ours(name: str, page: Path) -> bool:
    """Whether ``name`` is a path from the root, the package, or the room that the page is about."""
    room = SOURCE / page.stem
    places = [ROOT, SOURCE, room, *(folder for folder in room.glob("*") if folder.is_dir())]
    return any((place / name).exists() for place in places)


@every_page
def test_every_path_of_the_repository_exists(page: Path) -> None:
    for line in code_lines(page):
        for name in re.findall(r"(?<![\w./<-])[\w-][\w./-]*\.py\b", line):
            if name != name.upper().replace(".PY", ".py"):  # FILE.py stands for the reader's own
                assert is_file_of_ours(name, page), f"{page_id(page)} names {name}"
        for name in re.findall(r"(?<![\w./<-])(?:src|docs|tests|examples|benchmarks)/[\w./-]*", line):
            assert (ROOT / name.rstrip(".")).exists(), f"{page_id(page)} names {name}"


def defined_in(module: Path) -> set[str]:
    """The names at the top level of a module."""
    names: set[str] = set()
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def is_name_of_ours(dotted: str) -> bool:
    """Whether ``palestra.a.b`` is a module, or a public name, or a name at the top of a module."""
    *folders, last = dotted.split(".")[1:]
    place = SOURCE.joinpath(*folders)
    if (place / last).is_dir() or (place / f"{last}.py").is_file():
        return True
    if not folders:
        return last in palestra.__all__
    return place.with_suffix(".py").is_file() and last in defined_in(place.with_suffix(".py"))


@every_page
def test_every_dotted_name_of_the_package_exists(page: Path) -> None:
    code = [*code_lines(page), *(block.text for block in blocks(page) if block.language == "python")]
    for text in code:
        for dotted in re.findall(r"\bpalestra(?:\.[A-Za-z_]+)+", text):
            if not dotted.endswith(".toml"):
                assert is_name_of_ours(dotted), f"{page_id(page)} names {dotted}"
        for imported, names in re.findall(r"^from (palestra(?:\.\w+)*) import (.+)$", text, re.MULTILINE):
            for name in names.split(","):
                assert is_name_of_ours(f"{imported}.{name.strip()}"), f"{page_id(page)}: {imported} {name}"


# -- metric names

METRIC = re.compile(r"(?:reward|groups|tokens|completion|correction|time|engine|train|sync|eval)/[a-z_]+")


def recorded_metrics() -> set[str]:
    """Every metric name that the loop or an algorithm writes as a plain string."""
    strings = {
        node.value
        for module in (*(SOURCE / "loop").glob("*.py"), SOURCE / "algorithms" / "recipe.py")
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return {text for text in strings if METRIC.fullmatch(text)}


def documented_metrics() -> set[str]:
    section = (ROOT / "docs" / "records.md").read_text().partition("## Metric names")[2].partition("\n## ")[0]
    return {span for span in re.findall(r"`([^`]+)`", section) if METRIC.fullmatch(span)}


def test_every_metric_that_is_recorded_is_documented_and_no_other() -> None:
    recorded = recorded_metrics()
    assert len(recorded) > 30
    by_name = {"eval/sampled", "eval/greedy"}  # their names are put together from the kind of evaluation
    assert documented_metrics() - by_name == recorded


@every_page
def test_a_metric_that_a_page_names_is_in_the_table(page: Path) -> None:
    named = {span for span in re.findall(r"`([^`\n]+)`", prose(page)) if METRIC.fullmatch(span)}
    assert named <= documented_metrics()


# -- examples


def user_lines(path: Path) -> int:
    """Lines of code: no blank line, no comment, no docstring."""
    text = path.read_text()
    silent: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        bare = node.value if isinstance(node, ast.Expr) else None
        if isinstance(bare, ast.Constant) and isinstance(bare.value, str):
            silent |= set(range(bare.lineno, (bare.end_lineno or bare.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and n not in silent for n, line in lines
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=page_id)
def test_an_example_compiles_and_is_at_most_60_lines_of_a_users_code(path: Path) -> None:
    compile(path.read_text(), str(path), "exec")
    assert 0 < user_lines(path) <= 60


@pytest.mark.parametrize("path", [p for p in EXAMPLES if p.name not in WITHOUT_JOB], ids=page_id)
def test_an_example_builds_its_job_when_imported_and_trains_nothing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path))
    warmed_up_stand_in(tmp_path)
    found = runpy.run_path(str(path), run_name="imported")
    assert isinstance(found["job"], Job)
    assert len(found["job"].environment.tasks()) > 1


# -- what no file may hold

# Put together here, so that this file does not hold them either.
FORBIDDEN = [
    "/" + "work/",
    "/tmp/" + "palestra" + "(?!-inside)",  # what a test asks a sandbox to write
    "farm" + "-",
    r"\." + "library/",
    r"pypi\." + "org",
    r"files\." + "pythonhosted",
    r"deb\." + r"debian\." + "org",
    r"registry\." + "npmjs",
]


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("this is no git checkout")
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_tracked_file_names_a_machine_a_session_or_a_registry() -> None:
    pattern = re.compile("|".join(FORBIDDEN).encode())
    found = {page_id(path): hit[0] for path in tracked() if (hit := pattern.search(path.read_bytes()))}
    assert not found
