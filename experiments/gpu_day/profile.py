"""Part: operators, attention, layers and the executor, and the profile that their rows make.

Run:     python -m experiments.gpu_day.profile DIR -o FILE: the profile of the rows in a folder.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from experiments.gpu_day.campaign import Cell, Extent, Measured, Session
from experiments.gpu_day.environment import facts
from experiments.gpu_day.jobs import judged, rehearsed
from experiments.gpu_day.store import rows_in
from experiments.harness.command import run_main
from runtime.measure.cells import CellSizes, cell_sizes, operator_cells
from runtime.measure.clock import Clock
from runtime.measure.plans import BenchSettings, distinct, executor_task, layer_tasks
from runtime.rank_job import TORCH_TYPE
from runtime.world.device import device_of
from workbench.calibrate.fit import fit
from workbench.calibrate.measurement import Header, Measurement, Row, row_of, row_values
from workbench.cost.profile import Profile, write_profile

PART = "profile"
HEADER = "header"  # the cell whose row says what measured all others
BUDGET_S = {Extent.FULL: 0.2, Extent.SMALL: 0.01}
SIZES = {Extent.FULL: 3, Extent.SMALL: 2}  # microbatches of each module that layers are measured on


def cells(session: Session) -> tuple[Cell, ...]:
    """The header, then every task of a calibration for all plans of the job."""
    return (Cell(HEADER), *(Cell(name, bound_s=300.0) for name in _tasks(session)))


def measure(session: Session, key: str) -> Measured:
    """The rows of one task."""
    if key == HEADER:
        return Measured(facts(session))
    rows = [row_values(row) for row in _tasks(session)[key]()]
    return Measured({"rows": rows}, f"{len(rows)} rows")


@cache
def _tasks(session: Session) -> dict[str, Callable[[], Sequence[Row]]]:
    """By name, in order: operators, the executor, layers."""
    device = device_of(session.device)
    plans = [named.plan for named in (*rehearsed(session), *judged(session))]
    dtype = TORCH_TYPE[plans[0].settings.precision]
    settings = BenchSettings(sizes=SIZES[session.extent], budget_s=BUDGET_S[session.extent], device=device)
    operators = operator_cells(device, dtype, _sizes(session, device))
    layers = distinct([executor_task(plans[0], None, settings), *layer_tasks(plans, None, settings)])
    return {cell.key: partial(cell.measure, Clock(device)) for cell in operators} | {
        task.what: task.measure for task in layers
    }


def _sizes(session: Session, device: torch.device) -> CellSizes:
    sizes = cell_sizes(device)
    if session.extent is Extent.FULL:
        return sizes
    return CellSizes(
        short=replace(
            sizes.short, products=((64, 64, 64), (64, 128, 64), (128, 128, 128)), moved_bytes=(2**14, 2**16)
        ),
        attention=replace(sizes.attention, lengths=(128,), heads=sizes.attention.heads[:1]),
        sustained=replace(
            sizes.sustained,
            products=((64, 128, 64),),
            lengths=(64,),
            tokens=64,
            cache_bytes=2**16,
            head_dims=(64,),
            loop_s=0.005,
        ),
    )


def measured_profile(values: Mapping[str, Mapping[str, Any]]) -> Profile:
    """The profile of this part's rows.

    Args:
        values: of the rows, by key.

    Raises:
        ValueError: no header, no rows, or damaged ones.
    """
    if HEADER not in values:
        raise ValueError(f"profile: want the row {HEADER!r}; run --only {PART}")
    said = dict(values[HEADER])
    said["versions"] = tuple((name, version) for name, version in said["versions"])
    header = Header(**{each.name: said[each.name] for each in fields(Header)})
    rows = tuple(
        row_of(row, f"{PART}: {key}")
        for key, found in values.items()
        if key != HEADER
        for row in found["rows"]
    )
    return fit(f"{header.device} {header.date}", [Measurement(header, rows)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the profile of the rows in a folder; 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu_day.profile", description=__doc__)
    parser.add_argument("folder", type=Path, help="of a GPU day")
    parser.add_argument("-o", "--output", type=Path, required=True, help="profile file to write")
    options = parser.parse_args(arguments)

    def write() -> int:
        rows = rows_in(options.folder, PART)
        values = {key: row.values for key, row in rows.items() if row.values is not None}
        write_profile(measured_profile(values), options.output)
        sys.stdout.write(f"written to {options.output}\n")
        return 0

    return run_main(write)


if __name__ == "__main__":
    sys.exit(main())
