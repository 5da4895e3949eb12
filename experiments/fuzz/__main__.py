"""`python -m experiments.fuzz`: every input and message mutated; reported is what does not end in one line.

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
from experiments.harness.command import command_line, run_main
from experiments.harness.record import commit
from workbench.whole_file import check_writable, write_text


def main() -> int:
    """Run the fuzzer; exit code 1 where anything was found."""
    options = _options()
    before = None if options.out is None else previous_run(options.out, options.seed)
    settings = Fuzzing(
        count=options.count,
        seed=options.seed,
        first=options.first,
        num_workers=options.workers,
        keep=options.keep,
    )
    targets = {name: TARGETS[name] for name in options.only or TARGETS}
    print(f"seed {options.seed}, {len(targets)} targets", file=sys.stderr)
    start_s = time.monotonic()
    tally = fuzzed(targets, settings, show=_show)
    record = {"seed": options.seed, "commit": commit(), "seconds": round(time.monotonic() - start_s, 1)}
    record |= tally.record(targets)
    print("\n\n".join(lines(record["findings"])) or "nothing found")
    if before is not None:
        write_text(json.dumps(beside(record, before), indent=1) + "\n", options.out)
    if options.json:
        print(json.dumps(record))
    return int(bool(record["findings"]))


def previous_run(out: Path, seed: int) -> dict[str, Any]:
    """The record in a file, checked before any input is tried.

    Raises:
        ValueError: it is invalid, has another seed, or cannot be written.
    """
    check_writable(out)
    if not out.exists():
        return {"seed": seed, "seconds": 0.0, "targets": {}, "findings": []}
    try:
        before: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        has = before["seed"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{out}: want a record of `python -m experiments.fuzz`") from None
    if has != seed:
        raise ValueError(f"{out}: its seed is {has}, got --seed {seed}; nearest: {has}, or another --out")
    return before


def beside(record: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """A record merged with an earlier one of other targets; each target keeps its commit."""
    provenance = {"commit": record["commit"], "date": datetime.now(UTC).date().isoformat()}
    own_targets = record["targets"]
    targets = before["targets"] | {name: row | provenance for name, row in own_targets.items()}
    sums = {key: sum(row.get(key, 0) for row in targets.values()) for key in ("inputs", *KEYS.values())}
    findings = [finding for finding in before["findings"] if finding["target"] not in own_targets] + record[
        "findings"
    ]
    seconds = round(before["seconds"] + record["seconds"], 1)
    return {"seed": record["seed"], "seconds": seconds, **sums, "targets": targets, "findings": findings}


def _show(done: int, total: int, num_findings: int) -> None:
    print(f"{done} of {total}, {num_findings} kinds of findings", file=sys.stderr)


def _options() -> Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="inputs in all, shared among the targets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=sorted(TARGETS), metavar="TARGET", help="these targets")
    parser.add_argument("--first", type=int, default=0, help="number of each target's first input")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file to write; its other targets stay")
    parser.add_argument("--keep", type=Path, help="folder for one input of each kind of finding")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(run_main(main))
