"""How long the program takes to start, over what the interpreter alone takes.

Setup:   `workbench --help`, `workbench plan examples/tiny.yaml` and `python -c pass`, one after the other and
         over again, each a process of its own on the same machine; medians.
Ours:    seconds, and how many times those of `python -c pass` in the same run.
Run:     python -m experiments.bench.startup [--json] [--repeats N]
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.harness.command import command_line

ROOT = Path(__file__).parents[2]
REPEATS = 7
GOALS_S = {"help": 0.4, "plan": 1.5}  # on a quiet machine
BARE = "bare"  # the interpreter alone


def commands(folder: Path) -> Mapping[str, tuple[str, ...]]:
    """What is started, by name."""
    program = "from workbench.cli.app import main; main()"
    plan = ("plan", "examples/tiny.yaml", "--profile", "A40", "-o", str(folder / "plan.json"))
    return {
        BARE: ("pass",),
        "import": ("import workbench",),
        "help": (program, "--help"),
        "plan": (program, *plan),
    }


def seconds_of(script: Sequence[str]) -> float:
    """Of one process from start to end; CalledProcessError where it fails."""
    start_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", *script], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start_s


def measure(repeats: int) -> dict[str, float]:
    """Medians by name, and their ratios to the interpreter's."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = commands(Path(folder))
        times_s: dict[str, list[float]] = {name: [] for name in wanted}
        for script in wanted.values():
            seconds_of(script)  # files are read into memory, bytecode is written
        for _ in range(repeats):
            for name, script in wanted.items():
                times_s[name].append(seconds_of(script))
    medians = {name: statistics.median(found) for name, found in times_s.items()}
    return {f"{name}_s": found for name, found in medians.items()} | {
        f"{name}_over_bare": found / medians[BARE] for name, found in medians.items() if name != BARE
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table or one JSON object."""
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of every command")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats must be 1 or more, got {options.repeats}")
    found = measure(options.repeats)
    load = os.getloadavg()[0]
    if options.json:
        sys.stdout.write(json.dumps(found | {"load": load, "repeats": options.repeats}) + "\n")
        return 0
    for name in commands(Path()):
        ratio = f"{found[f'{name}_over_bare']:6.1f} x" if name != BARE else ""
        goal = f"  (goal on a quiet machine: {GOALS_S[name]} s)" if name in GOALS_S else ""
        sys.stdout.write(f"{name:8}{found[f'{name}_s']:8.3f} s {ratio}{goal}\n")
    sys.stdout.write(f"load of the machine: {load:.1f}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
