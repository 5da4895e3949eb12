"""The doors of the workbench, one part a module: models in, folders that launch, traces back.

Run: python -m experiments.doors [--json] [--part export]
"""

import argparse
import importlib
import json
import sys
from importlib.util import find_spec

PARTS = ("families", "export", "ingest")  # modules of this package with `part()` and `is_met(record)`


def main() -> int:
    """Gather the parts that exist; 1 where one is not met."""
    there = [name for name in PARTS if find_spec(f"experiments.doors.{name}") is not None]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--part", choices=there, action="append", help="only this one; repeatable")
    given = parser.parse_args()
    record: dict[str, object] = {}
    failed = []
    for name in given.part or there:
        module = importlib.import_module(f"experiments.doors.{name}")
        found = module.part()
        record |= found
        if not module.is_met(found):
            failed.append(name)
    if given.json:
        sys.stdout.write(json.dumps(record, sort_keys=True) + "\n")
    else:
        sys.stdout.write(json.dumps(record, indent=2) + "\n")
    if failed:
        sys.stderr.write(f"not met: {', '.join(failed)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
