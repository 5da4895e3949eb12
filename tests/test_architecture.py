"""The house rules that no linter knows."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import DEAREST
from tests.thorough import THOROUGH

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("workbench", "sim", "runtime", "experiments")
DRAWERS = {"utils", "util", "helpers", "helper", "common", "base", "core", "misc"}
MOST_LINES = 400
FACE = "workbench/__init__.py"  # the one package with names of its own, and
FACE_FUNCTIONS = "workbench/api.py"  # what it offers; both import late
HEAVY = ("torch", "triton", "simpy", "matplotlib", "transformers")


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def in_functions(module: ast.Module) -> Iterator[ast.stmt]:
    """Imports inside functions."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom))


def test_files_are_short():
    long = {
        name(p): n
        for p in modules(*PACKAGES, "tests")
        if (n := len(p.read_text().splitlines())) >= MOST_LINES
    }
    assert long == {}


def test_no_drawers():
    assert [name(p) for p in modules(*PACKAGES, "tests") if {p.stem, p.parent.name} & DRAWERS] == []


def test_every_module_says_what_it_is():
    assert [name(p) for p in modules(*PACKAGES, "tests") if not ast.get_docstring(tree(p))] == []


def test_packages_hold_a_docstring_and_nothing_else():
    inits = [path for path in modules(*PACKAGES) if path.name == "__init__.py" and name(path) != FACE]
    assert inits
    assert [name(p) for p in inits if len(tree(p).body) != 1 or not ast.get_docstring(tree(p))] == []


def test_every_folder_of_modules_is_a_package():
    folders = {path.parent for path in modules(*PACKAGES)}
    assert [name(f) for f in sorted(folders) if not (f / "__init__.py").is_file()] == []


def test_imports_stand_at_the_top_but_for_the_commands_and_the_face():
    """There, too, only what is slow to import, or not of this package, stands in a function."""
    slow = (
        "sim",
        "runtime",
        "experiments",
        "workbench.calibrate.derived",
        "workbench.cli.elastic_training",
        "workbench.report.html",
        "workbench.report.pareto_plot",
    )
    late = {
        name(path): {node.module for node in in_functions(tree(path)) if isinstance(node, ast.ImportFrom)}
        for path in modules("workbench", "sim", "runtime")
        if list(in_functions(tree(path)))
    }
    for path, imported in late.items():
        assert path.startswith("workbench/cli/") or path == FACE_FUNCTIONS
        assert [m for m in imported if m not in slow and m.split(".")[0] not in slow] == [], path


def test_commands_are_no_library():
    """Nobody imports them but the fuzzer, which takes what they take: flags and printing are all there is."""
    for path in modules(*PACKAGES):
        imported = {n.module or "" for n in ast.walk(tree(path)) if isinstance(n, ast.ImportFrom)}
        of_commands = path.parent.name == "cli" or path.name == "__main__.py" or "fuzz" in path.parts
        assert of_commands or not [m for m in imported if m.startswith("workbench.cli")], path


def test_simulator_and_runtime_never_meet():
    for package, other in (("sim", "runtime"), ("runtime", "sim"), ("workbench", "experiments")):
        for path in modules(package):
            if path.parent.name == "cli" or name(path) == FACE_FUNCTIONS:
                continue
            imported = {
                n.module or "" for n in ast.walk(tree(path)) if isinstance(n, ast.ImportFrom) and not n.level
            }
            assert not [m for m in imported if m.split(".")[0] == other], name(path)


@pytest.mark.parametrize("module", ["workbench.cli.app", "workbench.job.job", "workbench.calibrate.fit"])
def test_planner_stays_light(module: str):
    """Importing it, or asking for help, loads no framework, engine or plotting library."""
    script = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_every_test_file_tests():
    files = [path for path in modules("tests") if path.stem.startswith("test_")]
    without = [
        name(path)
        for path in files
        if not any(
            isinstance(n, ast.FunctionDef) and n.name.startswith("test_") for n in ast.walk(tree(path))
        )
    ]
    assert without == []
    assert set(DEAREST) <= {path.name for path in files}


def test_what_make_test_leaves_out_is_there():
    there = {
        name
        for path in modules("tests")
        for name in (
            path.name,
            *(f"{path.name}::{n.name}" for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef)),
        )
    }
    assert set(THOROUGH) <= there
