"""Rounds of chaos: a random component, fault and instant, then a check that nobody hurt had a part in.

Setup:   `run`, torchrun, `elastic`, saves, runs that go on from a save, the preprocessing service and
         `search`, small and in float64: a user's commands, forked from a process that has imported torch.
Ours:    losses against those of one undisturbed process, saves byte by byte against their SHA-256,
         processes by a mark in their environment, files by the round's own folders.
Run:     python -m experiments.chaos [--rounds N] [--seed S] [--round K] [--component NAME] [--fault NAME]
         [--go-on] [--json]
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
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
    """All rounds, or one of them again; 1 where one was not as it should be."""
    said = _parse(arguments)
    asked = {
        "commit": commit(),
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "seed": said.seed,
        "components": sorted(said.component or COMPONENTS),
        "faults": sorted(said.fault or Fault),
    }
    played = kept_rounds(said.out, asked) if said.go_on else []
    import_all()
    numbers = range(said.rounds) if said.round is None else (said.round,)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        rounds = Rounds(Path(folder), said.seed, said.component or COMPONENTS, said.fault or tuple(Fault))
        print(f"seed {said.seed}, {len(numbers)} rounds, {len(played)} of them kept", flush=True)
        for number in sorted({*numbers} - {each.number for each in played}):
            played.append(rounds.play(number))
            print(played[-1].line, flush=True)
            write_record(said.out, asked, played)
    record = write_record(said.out, asked, played)
    print(json.dumps(record) if said.json else json.dumps(record, indent=1))
    return 0 if all(each.found.is_clean for each in played) else 1


def write_record(out: Path, asked: Mapping[str, Any], played: Sequence[Played]) -> dict[str, Any]:
    """The record so far; the file has every round, too."""
    record = {
        "command": "python -m experiments.chaos",
        "date": datetime.now(UTC).date().isoformat(),
        "asked": asked,
        **summary(played),
    }
    write_text(json.dumps(record | {"all": [each.record for each in played]}, indent=1) + "\n", out)
    return record


def kept_rounds(out: Path, asked: Mapping[str, Any]) -> list[Played]:
    """Rounds that a file has of the same code, machine and draws; none where there is no file.

    Raises:
        ValueError: they are of others.
    """
    if not out.exists():
        return []
    record = json.loads(out.read_text(encoding="utf-8"))
    if record["asked"] != asked:
        differs = next(key for key in asked if record["asked"].get(key) != asked[key])
        raise ValueError(
            f"{out}: its {differs} is {record['asked'].get(differs)}, want {asked[differs]} to go on"
        )
    return [played_from(each) for each in record["all"]]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of components, faults and instants")
    parser.add_argument("--round", type=int, help="this one of the seed's rounds alone")
    parser.add_argument("--component", action="append", choices=COMPONENTS, help="these alone; repeatable")
    parser.add_argument("--fault", action="append", type=Fault, choices=list(Fault), help="likewise")
    parser.add_argument("--go-on", action="store_true", help="take over the rounds that --out has already")
    parser.add_argument("--out", type=Path, default=OUT / "chaos.json", help="file for all rounds")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    with_room_for_a_mark(sys.argv[1:])
    sys.exit(main())
