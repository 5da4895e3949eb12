"""Interfaces of the workbench, a module for each part: models in, folders that launch, traces back.

Run: python -m experiments.doors [--json] [--part export] [--out PATH]
"""

import importlib
import json
import sys
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from experiments.harness.command import command_line
from experiments.harness.record import commit
from workbench.whole_file import check_writable, write_text

PARTS = {"families": "families_measured", "export": "keys", "ingest": "keys", "tour": "keys"}
"""Module of this package -> its function that returns keys and values."""


def main() -> int:
    """Collect the results of the existing parts."""
    existing = [name for name in PARTS if find_spec(f"experiments.doors.{name}") is not None]
    parser = command_line(__doc__)
    parser.add_argument("--part", choices=existing, action="append", help="only this one; repeatable")
    parser.add_argument("--out", type=Path, help="JSON file to write; its other parts stay")
    arguments = parser.parse_args()
    if arguments.out is not None:
        check_writable(arguments.out)
    record: dict[str, object] = {}
    provenance: dict[str, dict[str, str | None]] = {}
    for name in arguments.part or existing:
        record |= getattr(importlib.import_module(f"experiments.doors.{name}"), PARTS[name])()
        provenance[name] = {"commit": commit(), "date": datetime.now(UTC).date().isoformat()}
    if arguments.out is not None:
        before = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
        whole = {**before, **record, "script": "doors", "made": before.get("made", {}) | provenance}
        write_text(json.dumps(whole, sort_keys=True, indent=1) + "\n", arguments.out)
    sys.stdout.write(json.dumps(record, sort_keys=True, indent=None if arguments.json else 2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
