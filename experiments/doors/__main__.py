"""The doors of the workbench, one part a module: models in, folders that launch, traces back.

Run: python -m experiments.doors [--json] [--part export]
"""

import argparse
import importlib
import json
import sys
from importlib.util import find_spec

PARTS = {"families": "families_measured", "export": "keys", "ingest": "keys"}
"""Module of this package -> its function that returns keys and values."""


def main() -> int:
    """Gather the parts that exist."""
    there = [name for name in PARTS if find_spec(f"experiments.doors.{name}") is not None]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--part", choices=there, action="append", help="only this one; repeatable")
    given = parser.parse_args()
    record: dict[str, object] = {}
    for name in given.part or there:
        record |= getattr(importlib.import_module(f"experiments.doors.{name}"), PARTS[name])()
    sys.stdout.write(json.dumps(record, sort_keys=True, indent=None if given.json else 2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
