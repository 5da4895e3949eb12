"""Start-up time of the program, relative to the interpreter's alone.

Setup:   `workbench --help`, `workbench plan examples/tiny.yaml` and `python -c pass`, in turns and
         repeatedly, each in a process of its own on the same machine; medians. Each has started once before
         and has left its bytecode in this benchmark's folder, whatever the environment sets for bytecode.
Ours:    wall seconds and core seconds, and both over those of `python -c pass` in the same run.
Run:     python -m experiments.bench.startup [--json] [--repeats N]
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.harness.command import Found, bench, want_at_least
from workbench.float_sum import float_sum

ROOT = Path(__file__).parents[2]
REPEATS = 7
GOALS_S = {"help": 0.4, "plan": 1.5}  # on a quiet machine
PROFILE = "examples/elastic-cpu.json"  # of layers measured whole, whose reading takes longer than a sheet's
BARE = "bare"  # the interpreter alone


def commands(folder: Path) -> Mapping[str, tuple[str, ...]]:
    """The started commands by name."""
    program = "from workbench.cli.app import main; main()"
    plan = ("plan", "examples/tiny.yaml", "--profile", PROFILE, "-o", str(folder / "plan.json"))
    return {
        BARE: ("pass",),
        "import": ("import workbench",),
        "help": (program, "--help"),
        "plan": (program, *plan),
    }


def seconds_of(script: Sequence[str], bytecode: Path) -> tuple[float, float]:
    """Return (wall seconds, core seconds) of one process; CalledProcessError where it fails."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(bytecode)}
    command = [sys.executable, "-c", *script]
    start_s, used_s = time.perf_counter(), _used_s()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - start_s, _used_s() - used_s


def _used_s() -> float:
    """Core seconds of all reaped child processes."""
    return float_sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def measure(repeats: int) -> dict[str, float]:
    """Medians by name and their ratios to the bare interpreter's, of wall and of core seconds."""
    with tempfile.TemporaryDirectory() as folder:
        scripts = commands(Path(folder))
        times_s: dict[str, list[tuple[float, float]]] = {name: [] for name in scripts}
        for script in scripts.values():
            seconds_of(script, Path(folder))  # files are read into memory, bytecode is written
        for _ in range(repeats):
            for name, script in scripts.items():
                times_s[name].append(seconds_of(script, Path(folder)))
    figures: dict[str, float] = {}
    for kind, column in (("", 0), ("_core", 1)):
        medians = {name: statistics.median(times[column] for times in times_s[name]) for name in scripts}
        for name, median_s in medians.items():
            figures[f"{name}{kind}_s"] = median_s
            figures[f"{name}{kind}_over_bare"] = median_s / medians[BARE]
    return figures


@bench(repeats="of every command")
def run(repeats: int = REPEATS) -> Found:
    """Measure, and print a table."""
    want_at_least(1, repeats=repeats)
    figures = measure(repeats)
    load = os.getloadavg()[0]
    for name in commands(Path()):
        clock = f"{figures[f'{name}_s']:7.3f} s {figures[f'{name}_over_bare']:6.1f} x"
        core = f"{figures[f'{name}_core_s']:7.3f} s {figures[f'{name}_core_over_bare']:6.1f} x of a core"
        goal = f"; goal on a quiet machine: {GOALS_S[name]} s" if name in GOALS_S else ""
        sys.stdout.write(f"{name:7}{clock}, {core}{goal}\n")
    sys.stdout.write(f"load of the machine: {load:.1f}\n")
    return Found(figures | {"load": load, "repeats": repeats})
