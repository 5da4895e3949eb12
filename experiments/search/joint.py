"""The joint search against the papers' own strategies: gains, regret, what each question gives, speed.

Setup:   the jobs of `experiments.search.jobs` with layouts left open. Every registered strategy searches
         what its own paper searches (`workbench.search.joint.own_spaces`), as long as the joint search, on
         the same devices; all plans are judged by the same simulator. Times of searches are CPU seconds of
         one process, which other load does not lengthen. Cornstarch's planner and its unaware baseline with
         the simulator as their judge, each as long as `longer`: `aware`.
         Spaces that are listed whole: `regret`. Questions one by one: `ablation`. Candidates a second:
         `speeds`. Winner and others executed: `executed`, apart.
Differs: jobs are smaller than the papers', each says how; corpora stand for data sets.
Run:     python -m experiments.search.joint [--job NAME] [--space NAME] [--part PART] [--budget SECONDS]
         [--seed N] [--processes N] [--json] [--out PATH]
"""

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from experiments.harness.command import command_line, finish
from experiments.harness.record import commit
from experiments.search import compared, regret, speeds
from experiments.search.jobs import JOBS
from experiments.search.spaces import spaces
from workbench.whole_file import check_writable, write_text

OUT = Path("out/search")
BUDGET_S = 60.0
LONGER = 6  # times the budget: a third of what 19 strategies' searches take together
GOAL_GAIN, GOAL_REGRET = 1.15, 0.01
OVERALL = "never worse: {never_worse}, geometric mean {geomean_gain:.3f} of at most {most_geomean_gain:.3f}"

Told = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command was asked for.

    Args:
        names: of jobs.
        spaces: that `regret` lists; none: all.
        budget_s: CPU seconds of every search.
        seed: of all draws.
        processes: that take one job or space at a time; each counts its own CPU seconds.
    """

    names: Sequence[str]
    spaces: Sequence[str] = ()
    budget_s: float
    seed: int
    processes: int


def told(what: str) -> None:
    """Progress, a line each, beside the record on standard output; whole where several processes tell."""
    sys.stderr.write(f"{what}\n")


def compared_job(name: str, asked: Asked, progress: Told) -> dict[str, Any]:
    """Joint search and best single strategy."""
    return compared.compared(JOBS[name], budget_s=asked.budget_s, seed=asked.seed, progress=progress)


def longer_job(name: str, asked: Asked, progress: Told) -> dict[str, Any]:
    """The joint search with `LONGER` times the budget, for all who wait as long as for the strategies."""
    budget_s = LONGER * asked.budget_s
    return compared.joint_alone(JOBS[name], budget_s=budget_s, seed=asked.seed, progress=progress)


def aware_job(name: str, asked: Asked, progress: Told) -> dict[str, Any]:
    """Cornstarch's planner beside its unaware baseline, both held against the simulator."""
    return compared.aware_of(JOBS[name], limit_s=LONGER * asked.budget_s, progress=progress)


def ablated_job(name: str, asked: Asked, progress: Told) -> dict[str, Any]:
    """What each question gives."""
    return compared.ablation_of(JOBS[name], budget_s=asked.budget_s, progress=progress)


def regret_of_space(name: str, asked: Asked, progress: Told) -> dict[str, Any]:
    """Regret in a space that is listed whole; its budget is of candidates."""
    space = next(space for space in spaces() if space.name == name)
    return regret.regret_of(
        space,
        candidates=regret.CANDIDATES,
        seed=asked.seed,
        progress=lambda done: progress(f"{name}: {done} plans"),
    )


@dataclass(frozen=True, slots=True)
class Part:
    """What a part leaves in the record: under a key, a row for each job or space.

    Args:
        key: of the record.
        row_of: one name's row.
    """

    key: str
    row_of: Callable[[str, Asked, Told], dict[str, Any]]

    def __call__(self, asked: Asked, progress: Told) -> dict[str, Any]:
        """The rows of all that are named, made by so many processes."""
        if asked.processes == 1:
            return {self.key: {name: self.row_of(name, asked, progress) for name in asked.names}}
        with ProcessPoolExecutor(asked.processes, get_context("spawn"), max_tasks_per_child=1) as pool:
            waited = {name: pool.submit(self.row_of, name, asked, told) for name in asked.names}
            return {self.key: {name: future.result() for name, future in waited.items()}}


def of_speed(asked: Asked, progress: Told) -> dict[str, Any]:
    """Candidates a second."""
    progress("speeds")
    return speeds.speeds(seed=asked.seed)


WHOLE = "speed"  # the part that has no rows
PARTS: Mapping[str, Callable[[Asked, Told], dict[str, Any]]] = {
    "jobs": Part("jobs", compared_job),
    "longer": Part("longer", longer_job),
    "aware": Part("aware", aware_job),
    "regret": Part("spaces", regret_of_space),
    "ablation": Part("ablation", ablated_job),
    WHOLE: of_speed,
}


def gathered(parts: Sequence[str], asked: Asked, before: Mapping[str, Any], progress: Told) -> dict[str, Any]:
    """The record of some parts and jobs, beside those of a record with the same budget and seed.

    Raises:
        ValueError: that one has another.
    """
    said = {"budget_s": asked.budget_s, "seed": asked.seed}
    if before and {key: before[key] for key in said} != said:
        raise ValueError(
            f"the record holds budget {before['budget_s']:g} s and seed {before['seed']}, asked for are "
            f"{asked.budget_s:g} s and {asked.seed}; nearest: another --out"
        )
    record: dict[str, Any] = {
        **before,
        "command": f"python -m experiments.search.joint --budget {asked.budget_s:g} --seed {asked.seed}",
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        **said,
    }
    for part in parts:
        made = {"commit": commit(), "date": datetime.now(UTC).isoformat(timespec="minutes")}
        found = PARTS[part](asked, progress)
        for key, value in found.items():
            record[key] = record.get(key, {}) | value if isinstance(value, dict) else value
        of = (part,) if part == WHOLE else asked.names
        record["made"] = record.get("made", {}) | {
            part: record.get("made", {}).get(part, {}) | dict.fromkeys(of, made)
        }
    return current(record)


def current(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record without spaces that are no longer listed, and what it comes to."""
    names = {space.name for space in spaces()}
    listed = {name: row for name, row in record.get("spaces", {}).items() if name in names}
    found = {**record, "spaces": listed} if listed else dict(record)
    return found | summed(found)


def rows(part: str, asked: Asked, record: Mapping[str, Any]) -> Iterator[Asked]:
    """What is run of a part at a time: as many rows as processes, less those that the record has.

    A row is had that the same commit made, without changes of its own.
    """
    listed = asked.spaces or [space.name for space in spaces()]
    names = listed if part == "regret" else asked.names
    if part == WHOLE:
        names = [WHOLE]
    here, made = commit(), record.get("made", {}).get(part, {})
    if here is not None and not here.endswith("-dirty"):
        names = [name for name in names if made.get(name, {}).get("commit") != here]
    for first in range(0, len(names), asked.processes):
        yield replace(asked, names=names[first : first + asked.processes])


def summed(record: Mapping[str, Any]) -> dict[str, Any]:
    """What all jobs and spaces of the record come to, as far as it has them."""
    found: dict[str, Any] = {}
    if jobs := record.get("jobs"):
        found |= compared.overall(jobs)
        both = jobs.keys() & record.get("longer", {}).keys()
        longer = {name: jobs[name] | record["longer"][name] for name in both}
        found |= {"longer_overall": compared.overall(longer)} if longer else {}
    if jobs := record.get("aware"):
        found["cornstarch_never_slower_than_unaware"] = compared.is_never_slower(jobs)
    if spaces_ := record.get("spaces"):
        found["regret_vs_exhaustive"] = max(each["regret"] for each in spaces_.values())
    return found


def lines(record: Mapping[str, Any]) -> Sequence[str]:
    """The tables that the command prints."""
    found: list[str] = []
    if "jobs" in record:
        found += compared.lines(record["jobs"])
        found.append(OVERALL.format(**record))
        found += compared.causes_lines(record["jobs"])
    if "longer" in record:
        found += compared.longer_lines(record["longer"], record.get("jobs", {}))
    if "longer_overall" in record:
        found.append(OVERALL.format(**record["longer_overall"]))
    if "aware" in record:
        found += compared.aware_lines(record["aware"])
    for name, space in record.get("spaces", {}).items():
        found.append(f"{name}: {space['plans']} plans, regret {space['regret']:.3%}")
    if "ablation" in record:
        found += compared.ablation_lines(record["ablation"])
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
    listed = [space.name for space in spaces()]
    parser.add_argument("--space", choices=listed, action="append", help="of regret, likewise")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one; repeatable")
    parser.add_argument(
        "--budget",
        type=float,
        default=BUDGET_S,
        help="CPU seconds of the joint search, and of every strategy's",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="that take one job or space at a time")
    parser.add_argument(
        "--out",
        type=Path,
        help="JSON file to write; it is kept row by row, and rows of this commit are not made anew; default: "
        "one of this budget and seed in out/search",
    )
    given = parser.parse_args()
    if not 0 < given.budget < float("inf"):
        parser.error(f"--budget: want > 0 s, got {given.budget}; nearest: 1")
    if given.processes < 1:
        parser.error(f"--processes: want >= 1, got {given.processes}; nearest: 1")
    out: Path = given.out or OUT / f"joint-{given.budget:g}s-seed-{given.seed}.json"
    check_writable(out)

    asked = Asked(
        names=given.job or tuple(JOBS),
        spaces=given.space or (),
        budget_s=given.budget,
        seed=given.seed,
        processes=given.processes,
    )
    before = json.loads(out.read_text()) if out.exists() else {}
    try:
        record = gathered((), asked, before, told)
        for part in given.part or PARTS:
            for some in rows(part, asked, record):
                record = gathered((part,), some, record, told)
                write_text(json.dumps(record, indent=1) + "\n", out)
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(lines(record)))
    told(f"kept in {out}")
    return finish(record, as_json=given.json, holds=holds(record))


if __name__ == "__main__":
    sys.exit(main())
