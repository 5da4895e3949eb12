"""The house rules that no linter knows."""

import ast
import re
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
DOCSTRING = re.compile(r'r?"""\S')
FUNCTION = re.compile(r"^ *def (\w+)\(", re.MULTILINE)
LATE = re.compile(r"^ +(from|import) ", re.MULTILINE)
HEAVY = ("torch", "triton", "simpy", "matplotlib", "transformers")


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tree(path: Path) -> ast.Module:
    """Takes a hundred times as long as the text, so who asks for it has found something there."""
    return ast.parse(text(path))


def imported(path: Path, package: str) -> list[str]:
    """Modules of a package, or of its subpackage, that a module imports from."""
    if package not in text(path):
        return []
    modules = {n.module or "" for n in ast.walk(tree(path)) if isinstance(n, ast.ImportFrom) and not n.level}
    return [each for each in modules if each == package or each.startswith(f"{package}.")]


def in_functions(path: Path) -> Iterator[str]:
    """Modules that are imported from inside functions; empty: as a whole."""
    if LATE.search(text(path)):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                late = (n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom))
                yield from (getattr(each, "module", None) or "" for each in late)


def test_files_are_short():
    lengths = {name(path): text(path).count("\n") for path in modules(*PACKAGES, "tests")}
    assert {path: length for path, length in lengths.items() if length >= MOST_LINES} == {}


def test_no_drawers():
    assert [name(p) for p in modules(*PACKAGES, "tests") if {p.stem, p.parent.name} & DRAWERS] == []


def test_every_module_says_what_it_is():
    assert [name(p) for p in modules(*PACKAGES, "tests") if not DOCSTRING.match(text(p))] == []


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
    late = {name(path): set(in_functions(path)) for path in modules("workbench", "sim", "runtime")}
    assert late[FACE_FUNCTIONS]
    for path, found in late.items():
        assert not found or path.startswith("workbench/cli/") or path == FACE_FUNCTIONS, path
        assert [m for m in found if m and m not in slow and m.split(".")[0] not in slow] == [], path


def test_commands_are_no_library():
    """Nobody imports them but the fuzzer, which takes what they take: flags and printing are all there is."""
    for path in modules(*PACKAGES):
        of_commands = path.parent.name == "cli" or path.name == "__main__.py" or "fuzz" in path.parts
        assert of_commands or not imported(path, "workbench.cli"), path


def test_simulator_and_runtime_never_meet():
    for package, other in (("sim", "runtime"), ("runtime", "sim"), ("workbench", "experiments")):
        for path in modules(package):
            if path.parent.name != "cli" and name(path) != FACE_FUNCTIONS:
                assert not imported(path, other), name(path)


@pytest.mark.parametrize("module", ["workbench.cli.app", "workbench.job.job", "workbench.calibrate.fit"])
def test_planner_stays_light(module: str):
    """Importing it, or asking for help, loads no framework, engine or plotting library."""
    script = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_every_test_file_tests():
    tests = {path: FUNCTION.findall(text(path)) for path in modules("tests") if path.stem.startswith("test_")}
    assert [
        name(path) for path, names in tests.items() if not any(n.startswith("test_") for n in names)
    ] == []
    assert set(DEAREST) <= {path.name for path in tests}


def test_what_make_test_leaves_out_is_there():
    there = {f"{path.name}::{each}" for path in modules("tests") for each in FUNCTION.findall(text(path))}
    assert set(THOROUGH) <= there | {path.name for path in modules("tests")}
