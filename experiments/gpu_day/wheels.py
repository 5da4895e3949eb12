"""Fetches the packages that a GPU machine without a network lacks, as wheels to carry there.

Run:     python -m experiments.gpu_day.wheels DIR [--python 3.12]
         It prints the line that installs them there.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from workbench.units import MIB

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
LACKING = ("pydantic", "pydantic_core", "annotated-types", "typing-inspection", "simpy", "pyzmq")
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)  # pip takes no older ones
MOST_BYTES = 64 * MIB  # of what is carried
PYTHON = "3.12"
WAIT_S = 300.0
BAD_INPUT = 2  # exit code


def pins(constraints: str, names: Sequence[str] = LACKING) -> tuple[str, ...]:
    """`name==version` of each name, out of the text of constraints.

    Raises:
        ValueError: one has no pin there.
    """
    versions = {}
    for line in constraints.splitlines():
        name, separator, version = line.partition("#")[0].strip().partition("==")
        if separator:
            versions[_canonical(name)] = version
    without = [name for name in names if _canonical(name) not in versions]
    if without:
        raise ValueError(f"constraints: want a pin of {without[0]}, there is none")
    return tuple(f"{name}=={versions[_canonical(name)]}" for name in names)


def download_command(pinned: Sequence[str], folder: Path, python: str = PYTHON) -> list[str]:
    """What pip is asked: wheels alone, for that Python on x86-64 Linux, each of them named."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", python]
    command += [f"--platform={platform}" for platform in PLATFORMS]
    return [*command, "--dest", str(folder), *pinned]


def install_command(folder: Path, site: Path) -> str:
    """The line that installs them without a network, beside what is there."""
    return (
        "python3 -m pip install -q --no-index --no-deps --no-compile --upgrade "
        f"--target {site} {folder}/*.whl && export PYTHONPATH={site}"
    )


def carried_bytes(folder: Path) -> int:
    """Bytes of the wheels in a folder.

    Raises:
        ValueError: there is none, or they are more than can be carried.
    """
    sizes = [path.stat().st_size for path in folder.glob("*.whl")]
    if not sizes:
        raise ValueError(f"{folder}: no wheels")
    if sum(sizes) > MOST_BYTES:
        raise ValueError(
            f"{folder}: {sum(sizes) / MIB:.1f} MiB of wheels, want at most {MOST_BYTES / MIB:.0f}"
        )
    return sum(sizes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 2 for bad input, or where pip does not find them."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu_day.wheels", description=__doc__)
    parser.add_argument("folder", type=Path, help="for the wheels")
    parser.add_argument("--python", default=PYTHON, help=f"version they are for; default {PYTHON}")
    options = parser.parse_args(arguments)
    try:
        pinned = pins(CONSTRAINTS.read_text(encoding="utf-8"))
        options.folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            download_command(pinned, options.folder, options.python),
            check=False,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        if done.returncode:
            raise ValueError(f"pip: {done.stderr.strip().splitlines()[-1]}")
        num_bytes = carried_bytes(options.folder)
    except (ValueError, OSError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return BAD_INPUT
    sys.stdout.write(f"{', '.join(pinned)}: {num_bytes / MIB:.1f} MiB\n")
    sys.stdout.write(f"{install_command(options.folder, Path('/tmp/site'))}\n")
    return 0


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-")


if __name__ == "__main__":
    sys.exit(main())
