"""Compiler output for the attention kernels on Hopper (sm_90a), bfloat16, without a GPU.

Setup:   every kernel as its launcher launches it (tiles, warps, stages, aligned strides), head widths 64 and
         128, under causal masks: one segment, lengths that end within a block, several segments, and a
         window. Compiled by Triton 3.6.0, which pip installs into a separate folder on first use, and by the
         installed Triton; disassembled by the tool that each one ships.
Ours:    registers, spilled bytes, shared memory, and instructions of the loops over full and partial tiles,
         counted in the assembly: what a warp executes per tile of the kernel. Nothing is timed. Top-level
         figures are those of head width 128 and the first Triton named, to which the goals apply; spills and
         waits are the worst over the masks with lengths of whole blocks, the partial tile is that of one
         segment.
Run:     python -m experiments.bench.kernel_compile [--json] [--triton 3.6.0 installed] [--out PATH]
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.harness.command import Found, bench, reaches
from experiments.harness.foreign import answer, last_line
from experiments.harness.record import commit
from workbench.whole_file import check_writable

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = "installed"
REFERENCE = "3.6.0"
FOLDERS = Path.home() / ".cache" / "multimodal-workbench"
TIMEOUT_S = 900.0
COLUMNS = (
    "registers",
    "spilled_bytes",
    "shared_bytes",
    "instructions_full",
    "instructions_partial",
    "async_wait",
)
WIDTH = 128


GOALS = {  # (limit, whether it is the most)
    "forward_instructions_per_128_keys": (535, True),
    "forward_partial_instructions_per_64_keys": (650, True),
    "forward_async_wait": (1, False),
    "forward_spilled_bytes": (0, True),
    "backward_spilled_bytes": (92, True),
}


def triton_folder(version: str) -> Path:
    """Return a folder that holds only that Triton version; installed with pip if missing.

    Raises:
        ValueError: pip cannot get it.
    """
    folder = FOLDERS / f"triton-{version}"
    if folder.is_dir():
        return folder
    FOLDERS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDERS) as unfinished:
        unpacked = Path(unfinished, "triton")
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(unpacked)]
        done = subprocess.run(
            [*command, f"triton=={version}"], capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
        if done.returncode:
            raise ValueError(f"triton {version}: pip cannot install it: {last_line(done.stderr)}")
        shutil.move(unpacked, folder)
    return folder


def compile_with(version: str, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Run `experiments.bench.compiled_kernels` under that Triton; returns its record.

    Raises:
        ValueError: the compilation failed, or another Triton answered.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    if version != INSTALLED:
        environment["PYTHONPATH"] = str(triton_folder(version))
    record: dict[str, Any] = answer(
        [sys.executable, "-m", "experiments.bench.compiled_kernels", *arguments],
        failure=f"triton {version}: kernels do not compile",
        limit_s=TIMEOUT_S,
        environment=environment,
        cwd=ROOT,
    )
    if version not in (INSTALLED, record["versions"]["triton"]):
        raise ValueError(f"triton: want {version}, got {record['versions']['triton']}")
    return record


def figures(kernels: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the figures that the goals refer to."""
    plain = kernels[f"forward {WIDTH} plain"]
    forward, backward = (
        [
            kernel
            for name, kernel in kernels.items()
            if name.startswith(f"{which} {WIDTH} ") and "ragged" not in name
        ]
        for which in ("forward", "fused")
    )
    return {
        "forward_instructions_per_128_keys": plain["instructions_full"] * 128 / plain["tile_keys"],
        "forward_partial_instructions_per_64_keys": plain["instructions_partial"] * 64 / plain["tile_keys"],
        "forward_async_wait": min(kernel["async_wait"] for kernel in forward),
        "forward_spilled_bytes": max(kernel["spilled_bytes"] for kernel in forward),
        "backward_spilled_bytes": max(kernel["spilled_bytes"] for kernel in backward),
    }


def show(record: Mapping[str, Any]) -> None:
    """Print a row per kernel, then the goals."""
    for compiled in (record, *record["others"]):
        versions = compiled["versions"]
        print(f"triton {versions['triton']}, ptxas {versions['ptxas']}")
        print(" " * 26 + "".join(f"{column.replace('instructions', 'instr'):>15}" for column in COLUMNS))
        for name, kernel in compiled["kernels"].items():
            cells = ("-" if kernel[column] is None else kernel[column] for column in COLUMNS)
            print(f"{name:26}" + "".join(f"{cell:>15}" for cell in cells))
    for name, (must, at_most) in GOALS.items():
        sign = "<=" if at_most else ">="
        print(f"{name:42} {record[name]:6g} {sign} {must:g} {record['verdicts'][name]}")


@bench(triton=f"versions, or {INSTALLED!r}", out="JSON file to write")
def run(triton: tuple[str, ...] = (REFERENCE, INSTALLED), out: Path | None = None) -> Found:
    if out is not None:
        check_writable(out)
    reference, *others = [compile_with(version) for version in triton]
    reference_figures = figures(reference["kernels"])
    record = {
        "script": "bench/kernel_compile",
        "commit": commit(),
        "versions": reference["versions"],
        **reference_figures,
        "verdicts": {
            name: "ok" if reaches(reference_figures[name], must, at_most=at_most) else "OFF"
            for name, (must, at_most) in GOALS.items()
        },
        "kernels": reference["kernels"],
        "others": [{**figures(other["kernels"]), **other} for other in others],
    }
    show(record)
    holds = "OFF" not in record["verdicts"].values()
    return Found(record, holds=holds, out=out)
