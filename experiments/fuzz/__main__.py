"""`python -m experiments.fuzz`: every input and message mutated, and what does not end in one line.

Every input follows from the seed, the name of its target and its number: `--only TARGET --first N --count 1`
makes it again.
"""

import json
import sys
import time
from argparse import Namespace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.fuzz.run import Fuzzing, fuzzed
from experiments.fuzz.tally import KEYS, lines
from experiments.fuzz.targets.registry import TARGETS
from experiments.harness.command import command_line
from experiments.harness.record import commit
from workbench.whole_file import write_text


def main() -> int:
    """The exit status is 1 where anything was found."""
    said = _said()
    settings = Fuzzing(
        count=said.count, seed=said.seed, first=said.first, num_workers=said.workers, keep=said.keep
    )
    chosen = {name: TARGETS[name] for name in said.only or TARGETS}
    print(f"seed {said.seed}, {len(chosen)} targets", file=sys.stderr)
    start_s = time.monotonic()
    tally = fuzzed(chosen, settings, show=_show)
    record = {"seed": said.seed, "commit": commit(), "seconds": round(time.monotonic() - start_s, 1)}
    record |= tally.record(chosen)
    print("\n\n".join(lines(record["findings"])) or "nothing found")
    if said.out is not None:
        write_text(json.dumps(beside(record, said.out), indent=1) + "\n", said.out)
    if said.json:
        print(json.dumps(record))
    return int(bool(record["findings"]))


def beside(record: dict[str, Any], out: Path) -> dict[str, Any]:
    """A record beside what a file has of other targets; each keeps the commit that it was made by.

    Raises:
        ValueError: that one has another seed.
    """
    made = {"commit": record["commit"], "date": datetime.now(UTC).date().isoformat()}
    own = record["targets"]
    before = {"seed": record["seed"], "seconds": 0.0, "targets": {}, "findings": []}
    if out.exists():
        before = json.loads(out.read_text(encoding="utf-8"))
    if before["seed"] != record["seed"]:
        raise ValueError(f"{out}: its seed is {before['seed']}, want {record['seed']}")
    targets = before["targets"] | {name: row | made for name, row in own.items()}
    sums = {key: sum(row.get(key, 0) for row in targets.values()) for key in ("inputs", *KEYS.values())}
    findings = [each for each in before["findings"] if each["target"] not in own] + record["findings"]
    seconds = round(before["seconds"] + record["seconds"], 1)
    return {"seed": record["seed"], "seconds": seconds, **sums, "targets": targets, "findings": findings}


def _show(done: int, total: int, found: int) -> None:
    print(f"{done} of {total}, {found} kinds of findings", file=sys.stderr)


def _said() -> Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="inputs in all, shared among the targets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=sorted(TARGETS), metavar="TARGET", help="these targets")
    parser.add_argument("--first", type=int, default=0, help="number of each target's first input")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file to write; what it has of other targets stays")
    parser.add_argument("--keep", type=Path, help="folder for one input of each kind of finding")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
