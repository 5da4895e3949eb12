"""Rounds of chaos: a random component, fault and instant, then a check independent of the faulted programs.

Setup:   `run`, torchrun, `elastic`, saves, runs that resume from a save, the preprocessing service and
         `search`, small and in float64: a user's commands, forked from a process that has imported torch.
Ours:    losses against those of one undisturbed process, saves byte by byte against their SHA-256,
         processes by a mark in their environment, files by the round's own folders.
Run:     python -m experiments.chaos [--rounds N] [--seed S] [--round K] [--component NAME] [--fault NAME]
         [--go-on] [--anew NAME] [--json]
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.chaos.fault import Fault
from experiments.chaos.forked import import_all, with_room_for_a_mark
from experiments.chaos.rounds import COMPONENTS, Played, Rounds, played_from, summary
from experiments.harness.command import command_line
from experiments.harness.record import commit
from workbench.whole_file import write_text

OUT = Path("out/chaos")
ROUNDS = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Play all rounds, or repeat some; exit code 1 where one was not clean."""
    options = _parse(arguments)
    settings = {
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "seed": options.seed,
        "components": sorted(options.component or COMPONENTS),
        "faults": sorted(options.fault or Fault),
    }
    played = kept_rounds(options.out, settings, options.anew) if options.go_on else []
    code = commit()
    import_all()
    numbers = range(options.rounds) if options.round is None else (options.round,)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        rounds = Rounds(
            Path(folder), options.seed, options.component or COMPONENTS, options.fault or tuple(Fault)
        )
        print(f"seed {options.seed}, {len(numbers)} rounds, {len(played)} of them kept", flush=True)
        for number in sorted({*numbers} - {one_round.number for one_round in played}):
            played.append(replace(rounds.play(number), commit=code))
            print(played[-1].line, flush=True)
            write_record(options.out, settings, played)
    record = write_record(options.out, settings, played)
    print(json.dumps(record) if options.json else json.dumps(record, indent=1))
    return 0 if all(one_round.findings.is_clean for one_round in played) else 1


def write_record(out: Path, settings: Mapping[str, Any], played: Sequence[Played]) -> dict[str, Any]:
    """Write and return the record so far; the file also has every round."""
    record = {
        "command": "python -m experiments.chaos",
        "date": datetime.now(UTC).date().isoformat(),
        "asked": settings,
        "commits": sorted({str(one_round.commit) for one_round in played}),
        **summary(played),
    }
    rounds = [one_round.record for one_round in sorted(played, key=lambda one_round: one_round.number)]
    write_text(json.dumps(record | {"all": rounds}, indent=1) + "\n", out)
    return record


def kept_rounds(out: Path, settings: Mapping[str, Any], anew: Sequence[str] = ()) -> list[Played]:
    """Rounds in a file, of the same machine and draws; empty without a file.

    Args:
        anew: components whose rounds are dropped, since their code has changed.

    Raises:
        ValueError: they are of another machine or other draws.
    """
    if not out.exists():
        return []
    record = json.loads(out.read_text(encoding="utf-8"))
    if record["asked"] != settings:
        differs = next(key for key in settings if record["asked"].get(key) != settings[key])
        raise ValueError(
            f"{out}: its {differs} is {record['asked'].get(differs)}, want {settings[differs]} to resume"
        )
    return [played_from(row) for row in record["all"] if row["component"] not in anew]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of components, faults and instants")
    parser.add_argument("--round", type=int, help="this one of the seed's rounds alone")
    parser.add_argument("--component", action="append", choices=COMPONENTS, help="these alone; repeatable")
    parser.add_argument(
        "--fault", action="append", type=Fault, choices=list(Fault), help="these alone; repeatable"
    )
    parser.add_argument("--go-on", action="store_true", help="keep the rounds that --out has already")
    parser.add_argument(
        "--anew",
        action="append",
        default=[],
        choices=COMPONENTS,
        help="except those of these components; repeatable",
    )
    parser.add_argument("--out", type=Path, default=OUT / "chaos.json", help="file for all rounds")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    with_room_for_a_mark(sys.argv[1:])
    sys.exit(main())
