"""The tour from a configuration to a folder that launches, timed: init, search, explain, export.

Setup:   LLaVA-1.5-7B's own configuration on 16 H100, each command a process of its own as a user starts it.
Ours:    wall seconds, and CPU seconds of the processes on one CPU.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from workbench.float_sum import float_sum

CONFIG = Path(__file__).parents[2] / "examples" / "llava-1.5-7b" / "config.json"
LINES = (
    ("init", str(CONFIG), "--gpus", "16xH100", "-o", "llava.yaml"),
    ("search", "llava.yaml", "-o", "llava.json"),
    ("explain", "llava.json", "--job", "llava.yaml"),
    ("export", "llava.json", "--to", "fsdp2", "-o", "llava"),
)
MOST_S = 120.0
LONGEST_S = 600.0


def keys() -> dict[str, object]:
    """`tour`: seconds by command, of all, and whether they are under two minutes.

    Raises:
        subprocess.CalledProcessError: a command failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        seconds = {line[0]: _timed(line, Path(folder)) for line in LINES}
    wall_s, cpu_s = (
        float_sum(index_seconds[index] for index_seconds in seconds.values()) for index in (0, 1)
    )
    return {
        "tour": {
            "seconds": {command: wall for command, (wall, _) in seconds.items()},
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "within": wall_s < MOST_S,
        }
    }


def _timed(words: tuple[str, ...], folder: Path) -> tuple[float, float]:
    """Seconds on the clock, and of CPU, of one command in a folder."""
    before, began_s = os.times(), perf_counter()
    subprocess.run(
        [sys.executable, "-m", "workbench", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(CONFIG.parents[2])},
        check=True,
        capture_output=True,
        timeout=LONGEST_S,
    )
    wall_s, after = perf_counter() - began_s, os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return wall_s, cpu_s
