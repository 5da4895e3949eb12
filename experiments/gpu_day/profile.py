"""A device's profile from the rows of a campaign: from layers alone for plans, from all for a file.

Run:     python -m experiments.gpu_day.profile DIR -o FILE: the profile of the rows in a folder.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from experiments.gpu_day.store import rows_in
from experiments.harness.command import run_main
from workbench.calibrate.fit import fit
from workbench.calibrate.measurement import Header, Measurement, row_of
from workbench.cost.profile import Profile, write_profile

LAYERS, OPERATORS = "layers", "operators"  # parts
HEADER = "header"  # the cell of each whose row says what measured all others

Values = Mapping[str, Mapping[str, Any]]  # of rows, by key


def values_in(folder: Path, part: str) -> dict[str, dict[str, Any]]:
    """What a part's rows hold, by key; those of cells that failed are left out."""
    return {key: row.values for key, row in rows_in(folder, part).items() if row.values is not None}


def measured_profile(parts: Mapping[str, Values]) -> Profile:
    """The profile of these parts' rows.

    Args:
        parts: by name; one without rows is left out.

    Raises:
        ValueError: no header, no rows, or damaged ones; rows of other devices or software beside each other.
    """
    present = {part: values for part, values in parts.items() if values}
    if not present:
        raise ValueError(f"profile: want rows of {' or '.join(parts)}; run --only {next(iter(parts))}")
    measurements = [_measurement(part, values) for part, values in present.items()]
    header = measurements[0].header
    return fit(f"{header.device} {header.date}", measurements)


def _measurement(part: str, values: Values) -> Measurement:
    if HEADER not in values:
        raise ValueError(f"profile: want the row {HEADER!r} of {part}; run --only {part}")
    values_of_header = dict(values[HEADER])
    values_of_header["versions"] = tuple((name, version) for name, version in values_of_header["versions"])
    header = Header(**{each.name: values_of_header[each.name] for each in fields(Header)})
    rows = tuple(
        row_of(row, f"{part}: {key}")
        for key, measured in values.items()
        if key != HEADER
        for row in measured["rows"]
    )
    return Measurement(header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the profile of the rows in a folder; 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu_day.profile", description=__doc__)
    parser.add_argument("folder", type=Path, help="of a GPU day")
    parser.add_argument("-o", "--output", type=Path, required=True, help="profile file to write")
    options = parser.parse_args(arguments)

    def write() -> int:
        parts = {part: values_in(options.folder, part) for part in (LAYERS, OPERATORS)}
        write_profile(measured_profile(parts), options.output)
        sys.stdout.write(f"written to {options.output}\n")
        return 0

    return run_main(write)


if __name__ == "__main__":
    sys.exit(main())
