"""The shape of the code, held: arrows go one way, files and functions stay small, the core stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "palestra"
FILES = sorted(SOURCE.rglob("*.py"))

LAYERS = {
    "types": 0, "errors": 0, "batches": 0,
    "algorithms": 1, "models": 1, "records": 1,
    "trainer": 2, "rollouts": 2, "sandboxes": 2, "environments": 2, "weights": 2,
    "fields": 3, "presets": 3, "settings": 3, "job": 3,
    "loop": 4,
    "ui": 4,
    "assembly": 5, "run": 5, "recipes": 6, "cli": 7, "__main__": 8,
}  # fmt: skip
"""Higher may import lower. docs/decisions/0001 says why job lies where it does."""

SIBLINGS_BY_PORT = {"trainer", "rollouts", "sandboxes", "environments", "weights"}
"""Rooms of one layer meet through ``base`` only."""

EXCEPTIONS = {("palestra.job", "palestra.run")}
"""Job.train starts a run: the one upward arrow, imported when it is called."""


def room(module: str) -> str:
    return module.split(".")[1] if module.count(".") else ""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("palestra"):
            found.append(node.module)
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("palestra")]
    return found


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_downward_and_siblings_meet_through_ports(path: Path) -> None:
    importer = module_name(path)
    if importer == "palestra":
        return
    for imported in imports(path):
        if not room(imported) or room(imported) == room(importer) or (importer, imported) in EXCEPTIONS:
            continue
        above, below = LAYERS[room(importer)], LAYERS[room(imported)]
        assert above >= below, f"{importer} imports {imported}, which lies above it"
        if above == below and room(importer) in SIBLINGS_BY_PORT:
            assert imported.endswith(".base"), f"{importer} imports the insides of a sibling: {imported}"


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {module_name(p): set(top_level_imports(p)) for p in FILES}
    state: dict[str, int] = {}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert state.get(name) != 1, f"import cycle: {' -> '.join([*trail, name])}"
        if state.get(name) == 2:
            return
        state[name] = 1
        for imported in graph.get(name, set()):
            visit(imported, (*trail, name))
        state[name] = 2

    for name in graph:
        visit(name, ())


def top_level_imports(path: Path) -> list[str]:
    """Imports that run when the module is imported: not those inside functions or TYPE_CHECKING."""
    tree = ast.parse(path.read_text())
    return [
        n.module
        for n in tree.body
        if isinstance(n, ast.ImportFrom) and n.module and n.module.startswith("palestra")
    ]


@pytest.mark.parametrize("path", [p for p in ROOT.rglob("*.py") if ".venv" not in p.parts], ids=str)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 600, f"{path} has {text.count(chr(10))} lines (limit 600)"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            assert size <= 100, f"{path}:{node.lineno} {node.name} has {size} lines (limit 100)"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_every_module_opens_with_its_invariant_and_returns_are_typed(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if path.read_text().count("\n") > 30:
        assert ast.get_docstring(tree), f"{path} opens without its invariant"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.returns is not None, f"{path}:{node.lineno} {node.name} has no return type"


OUTSIDE = {"ui", "cli", "recipes", "planner", "frameworks", "__main__"}
"""Views, verbs and recipes: everything else is core, what a run is made of (docs/decisions/0006)."""
ADAPTERS = ("palestra.rollouts.served", "palestra.rollouts.server")
"""Programs of others that we speak to, and those that speak to us: a run needs neither (0006 too)."""


def is_core(module: str) -> bool:
    return room(module) not in OUTSIDE and not module.startswith(ADAPTERS)


def statements(path: Path) -> int:
    """Lines that hold code: no blank line, no comment, no docstring."""
    text = path.read_text()
    held: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_text = (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        if is_text and node.end_lineno is not None:
            held |= set(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and n not in held for n, line in lines)


def test_the_core_stays_under_its_budget_and_tests_match_the_code() -> None:
    core = sum(statements(p) for p in FILES if is_core(module_name(p)))
    code = sum(p.read_text().count("\n") for p in FILES)
    tests = sum(p.read_text().count("\n") for p in (ROOT / "tests").rglob("*.py"))
    assert core < 15_000
    assert tests >= code, f"{tests} lines of tests for {code} lines of code"


@pytest.mark.parametrize(
    "module",
    ["palestra", "palestra.types", "palestra.batches", "palestra.job", "palestra.settings",
     "palestra.records.reader", "palestra.ui.panel", "palestra.ui.summary",
     "palestra.environments.base", "palestra.cli.main",
     "palestra.run"],
)  # fmt: skip
def test_the_core_imports_without_torch_numpy_or_transformers(module: str) -> None:
    heavy = "{'torch', 'numpy', 'transformers', 'safetensors', 'tokenizers', 'jinja2', 'ray'}"
    script = (
        f"import sys, {module}; found = {heavy} & set(sys.modules); sys.exit(repr(found) if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
