"""The joint search against the papers' own strategies: gains, regret, what each question gives, speed.

Setup:   the jobs of `experiments.search.jobs` with layouts left open. Every registered strategy searches
         what its own paper searches (`own_spaces`), as long as the joint search, on the same devices; all
         plans are judged by the same simulator. Spaces that are listed whole: `regret`. Questions one by
         one: `ablation`. Candidates a second: `speeds`. Winner and others executed: `executed`, apart.
Differs: jobs are smaller than the papers', each says how; corpora stand for data sets.
Run:     python -m experiments.search.joint [--job NAME] [--part PART] [--budget SECONDS] [--seed N] [--json]
         [--out PATH]
"""

import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.harness.command import command_line
from experiments.harness.record import commit
from experiments.search import ablation, compared, regret, speeds
from experiments.search.jobs import JOBS
from experiments.search.spaces import spaces
from workbench.whole_file import check_writable, write_text

BUDGET_S = 60.0
GOAL_GAIN, GOAL_REGRET = 1.15, 0.01

Told = Callable[[str], None]
Part = Callable[[Sequence[str], float, int, Told], dict[str, Any]]


def of_jobs(names: Sequence[str], budget_s: float, seed: int, told: Told) -> dict[str, Any]:
    """Joint search and best single strategy of every job."""
    jobs = {
        name: compared.compared(JOBS[name], budget_s=budget_s, seed=seed, progress=told) for name in names
    }
    return {"jobs": jobs, **compared.overall(jobs)}


def of_questions(names: Sequence[str], budget_s: float, seed: int, told: Told) -> dict[str, Any]:
    """The ablation of every job."""
    del seed
    return {
        "ablation": {
            name: ablation.ablation_of(JOBS[name], budget_s=budget_s, progress=told) for name in names
        }
    }


def of_spaces(names: Sequence[str], budget_s: float, seed: int, told: Told) -> dict[str, Any]:
    """Regret in all spaces; the budget is of candidates there, and jobs are its own."""
    del names, budget_s
    found = list(regret.regrets(spaces(), candidates=regret.CANDIDATES, seed=seed, progress=told))
    return {
        "spaces": {each["space"]: each for each in found},
        "regret_vs_exhaustive": max(each["regret"] for each in found),
    }


def of_speed(names: Sequence[str], budget_s: float, seed: int, told: Told) -> dict[str, Any]:
    """Candidates a second."""
    del names
    told("speeds")
    return speeds.speeds(seed=seed, limit_s=budget_s)


PARTS: Mapping[str, Part] = {
    "jobs": of_jobs,
    "regret": of_spaces,
    "ablation": of_questions,
    "speed": of_speed,
}


def gathered(
    parts: Sequence[str], names: Sequence[str], budget_s: float, seed: int, told: Told
) -> dict[str, Any]:
    """The record of some parts."""
    record: dict[str, Any] = {
        "script": "search/joint",
        "command": f"python -m experiments.search.joint --budget {budget_s:g} --seed {seed}",
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "budget_s": budget_s,
        "seed": seed,
    }
    for part in parts:
        record |= PARTS[part](names, budget_s, seed, told)
    return record


def lines(record: Mapping[str, Any]) -> Sequence[str]:
    """The tables that the command prints."""
    found: list[str] = []
    if "jobs" in record:
        found += compared.lines(record["jobs"])
        found.append(f"never worse: {record['never_worse']}, geometric mean {record['geomean_gain']:.3f}")
    for name, space in record.get("spaces", {}).items():
        found.append(f"{name}: {space['plans']} plans, regret {space['regret']:.3%}")
    if "ablation" in record:
        found += ablation.lines(record["ablation"])
    found += [
        f"{key}: {record[key]:.3g}"
        for key in ("candidates_per_s_24", "candidates_per_s_1296", "seconds_10000")
        if key in record
    ]
    return found


def holds(record: Mapping[str, Any]) -> bool:
    """Whether what was run meets its goals."""
    return (
        record.get("never_worse", True)
        and record.get("geomean_gain", GOAL_GAIN) >= GOAL_GAIN
        and record.get("regret_vs_exhaustive", 0.0) <= GOAL_REGRET
        and record.get("cornstarch_never_slower_than_unaware", True)
    )


def main() -> int:
    """0 when the goals are met, 1 when one is missed, 2 for bad input."""
    parser = command_line(__doc__)
    parser.add_argument("--job", choices=JOBS, action="append", help="only this one; repeatable")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one; repeatable")
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, help="seconds of the joint search, and of every strategy's"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    given = parser.parse_args()
    if not 0 < given.budget < float("inf"):
        parser.error(f"--budget: want > 0 s, got {given.budget}; nearest: 1")
    if given.out is not None:
        check_writable(given.out)

    def told(what: str) -> None:
        print(what, file=sys.stderr, flush=True)

    record = gathered(given.part or tuple(PARTS), given.job or tuple(JOBS), given.budget, given.seed, told)
    print("\n".join(lines(record)))
    if given.out is not None:
        write_text(json.dumps(record, indent=1) + "\n", given.out)
    if given.json:
        print(json.dumps(record))
    return 0 if holds(record) else 1


if __name__ == "__main__":
    sys.exit(main())
