"""What is not imported: importing the package or asking for help is quick because little is."""

import subprocess
import sys
from pathlib import Path

import pytest

from workbench.cli.app import COMMANDS

ROOT = Path(__file__).parents[1]
NEVER_YET = (
    *("torch", "triton", "transformers", "simpy", "matplotlib"),
    *("pandas", "pyarrow", "scipy", "networkx", "numba"),
)
NOR = ("numpy", "pydantic", "yaml")
MAIN = (
    "from workbench.cli.app import main\ntry:\n    main()\nexcept SystemExit as end:\n    assert not end.code"
)


def imported(script: str, *arguments: str, of: tuple[str, ...]) -> list[str]:
    """Those of the modules that are there after the script, with what it printed out of the way."""
    ask = f"{script}\nimport sys\nsys.stderr.write(' '.join(name for name in {of!r} if name in sys.modules))"
    command = [sys.executable, "-c", ask, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr.split()


@pytest.mark.parametrize(
    ("script", "arguments"),
    [("import workbench", ()), (MAIN, ("--help",))],
    ids=["import", "help"],
)
def test_the_package_and_its_help_load_hardly_anything(script: str, arguments: tuple[str, ...]):
    assert imported(script, *arguments, of=NEVER_YET + NOR) == []


def test_help_of_every_command_loads_no_framework():
    every = "from workbench.cli.app import COMMANDS\nfor name in COMMANDS: COMMANDS[name].load(name)"
    assert not {*imported(every, of=NEVER_YET)} & {"torch", "triton", "transformers", "simpy", "matplotlib"}


@pytest.mark.parametrize(
    ("profile", "judge", "loaded"),
    [
        ("A40", "planner", []),
        ("A40", "simulator", ["simpy"]),
        ("examples/elastic-cpu.json", "simulator", ["simpy"]),
    ],
)
def test_a_plan_is_made_without_compiler_or_framework(
    tmp_path: Path, profile: str, judge: str, loaded: list[str]
):
    out = tmp_path / "plan.json"
    plan = ("plan", "examples/tiny.yaml", "--profile", profile, "--judge", judge, "-o", str(out), "--json")
    assert imported(MAIN, *plan, of=(*NEVER_YET, "workbench.search")) == loaded
    assert out.is_file()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_listed_by_the_first_lines_of_its_help(name: str):
    command = COMMANDS[name].load(name)
    assert " ".join(command.help.partition("\n\n")[0].split()) == COMMANDS[name].summary
