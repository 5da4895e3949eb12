"""Recompute stale results, one script after the other.

A result is stale if its modules or data differ from those that it was computed from, or if a checkout with
changes wrote it. A script that reads results of others comes after them. Each runs in a process of its own
and writes its result as it ends, so that an interrupted run resumes where it stopped.
Run:     python -m experiments.renew [NAME...] [--list] [--limit SECONDS] [--json]
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

from experiments.harness.command import command_line
from experiments.harness.reads import ROOT, changed_since
from experiments.harness.record import RESULTS, stored_records, uncommitted
from experiments.harness.script import chosen, scripts

Record = Mapping[str, Any]

LONGEST_S = 7200.0


def stale(names: Sequence[str] = ()) -> list[str]:
    """Scripts of these names or papers that have no current result, in the order to run them.

    Raises:
        ValueError: no script has that name.
    """
    records = {record["script"]: record for record in stored_records()}
    selected = chosen(names, tuple(sorted({*scripts(), *records})))
    return in_order([name for name in selected if is_stale(records.get(name))], records)


def is_stale(record: Record | None) -> bool:
    """Whether there is none, or it does not come from this code and data at a commit."""
    return record is None or bool(changed_since(record)) or str(record["commit"]).endswith("-dirty")


def in_order(names: Sequence[str], records: Mapping[str, Record]) -> list[str]:
    """Those first whose results others of them read, as far as their last run says.

    Complexity: O(names^2).
    """
    left, ordered = list(names), []
    while left:
        free = [
            name for name in left if not _reads(records.get(name)) & {_file(o) for o in left if o != name}
        ]
        chosen_now = free or left[:1]
        ordered += chosen_now
        left = [name for name in left if name not in chosen_now]
    return ordered


def _reads(record: Record | None) -> set[str]:
    reads = record.get("reads") if record else None
    return set(reads["files"]) if reads else set()


def _file(name: str) -> str:
    return str((RESULTS / f"{name.replace('/', '_')}.json").relative_to(ROOT))


def renew(name: str, limit_s: float) -> str:
    """Run a script; why its result is still stale, empty if it is not."""
    command = [sys.executable, "-m", f"experiments.{name.replace('/', '.')}"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"not done after {limit_s:.0f} s"
    if not is_stale(next((each for each in stored_records() if each["script"] == name), None)):
        return ""
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}, and a result that is stale"]
    return lines[-1]


def main() -> int:
    """The command; the exit status is 1 where a result is still stale, 2 on bad input."""
    parser = command_line(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="PAPER or PAPER/SCRIPT; all by default")
    parser.add_argument("--list", action="store_true", help="list stale results and run nothing")
    parser.add_argument("--limit", type=float, default=LONGEST_S, metavar="SECONDS", help="for each script")
    arguments = parser.parse_args()
    try:
        names = stale(arguments.names)
        changed = [] if arguments.list else uncommitted()
        if changed:
            raise ValueError(f"results come from commits, and {changed[0]} differs from its: commit first")
    except ValueError as error:
        parser.error(str(error))
    failed = {}
    for index, name in enumerate(names, start=1):
        began_s = perf_counter()
        why = "" if arguments.list else renew(name, arguments.limit)
        if why:
            failed[name] = why
        state = "stale" if arguments.list else f"{perf_counter() - began_s:.0f} s {why}".rstrip()
        print(f"{index}/{len(names)} {name}: {state}", flush=True)
    if arguments.json:
        print(json.dumps({"stale": names, "failed": failed}))
    return 1 if failed or (arguments.list and names) else 0


if __name__ == "__main__":
    raise SystemExit(main())
