"""The joint search against the papers' own strategies: gains, regret, what each question gives, speed.

Setup:   the jobs of `experiments.search.jobs` with layouts left open. Every registered strategy searches the
         space of its own paper (`workbench.search.joint.own_spaces`), as long as the joint search, on the
         same devices; the same simulator evaluates all plans. Times of searches are CPU seconds of one
         process, which other load does not lengthen. Cornstarch's planner and its unaware baseline with the
         simulator as their judge, each as long as `longer`: `aware`.
         Spaces that are listed in full: `regret`. Questions one by one: `ablation`. Candidates a second:
         `speeds`. Winner and others executed: `executed`, apart.
Differs: jobs are smaller than the papers', each says how; corpora replace data sets.
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
SPEED_KEYS = ("candidates_per_s_24", "candidates_per_s_1296", "candidates_per_s_1296_long", "seconds_10000")
OVERALL = (
    "never worse: {never_worse}, geometric mean {geomean_gain:.3f} of at most {most_geomean_gain:.3f}; "
    "over the papers' strategies alone {geomean_gain_over_papers:.3f}"
)

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of the command.

    Args:
        names: of jobs.
        spaces: those that `regret` lists; empty: all.
        budget_s: CPU seconds of every search.
        seed: of all draws.
        processes: processes that take one job or space at a time; each counts its own CPU seconds.
    """

    names: Sequence[str]
    spaces: Sequence[str] = ()
    budget_s: float
    seed: int
    processes: int


def report(what: str) -> None:
    """Progress, a line each, beside the record on standard output; whole where several processes tell."""
    sys.stderr.write(f"{what}\n")


def compared_job(name: str, options: Options, progress: Report) -> dict[str, Any]:
    """Joint search and best single strategy."""
    return compared.compared(JOBS[name], budget_s=options.budget_s, seed=options.seed, progress=progress)


def longer_job(name: str, options: Options, progress: Report) -> dict[str, Any]:
    """The joint search with `LONGER` times the budget, the total time of the strategies' searches."""
    budget_s = LONGER * options.budget_s
    return compared.joint_alone(JOBS[name], budget_s=budget_s, seed=options.seed, progress=progress)


def aware_job(name: str, options: Options, progress: Report) -> dict[str, Any]:
    """Cornstarch's planner beside its unaware baseline, both judged by the simulator."""
    return compared.aware_of(JOBS[name], limit_s=LONGER * options.budget_s, progress=progress)


def ablated_job(name: str, options: Options, progress: Report) -> dict[str, Any]:
    """The gain of each question."""
    return compared.ablation_of(JOBS[name], budget_s=options.budget_s, progress=progress)


def regret_of_space(name: str, options: Options, progress: Report) -> dict[str, Any]:
    """Regret in an exhaustively listed space, with a budget of candidates."""
    space = next(space for space in spaces() if space.name == name)
    return regret.regret_of(
        space,
        candidates=regret.CANDIDATES,
        seed=options.seed,
        progress=lambda done: progress(f"{name}: {done} plans"),
    )


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the record: under a key, one row for each job or space.

    Args:
        key: of the record.
        row_of: one name's row.
    """

    key: str
    row_of: Callable[[str, Options, Report], dict[str, Any]]

    def __call__(self, options: Options, progress: Report) -> dict[str, Any]:
        """The rows of all named jobs or spaces, made by several processes."""
        if options.processes == 1:
            return {self.key: {name: self.row_of(name, options, progress) for name in options.names}}
        with ProcessPoolExecutor(options.processes, get_context("spawn"), max_tasks_per_child=1) as pool:
            waited = {name: pool.submit(self.row_of, name, options, report) for name in options.names}
            return {self.key: {name: future.result() for name, future in waited.items()}}


def of_speed(options: Options, progress: Report) -> dict[str, Any]:
    """The speeds, in candidates a second."""
    progress("speeds")
    return speeds.speeds(seed=options.seed)


WHOLE = "speed"  # the part that has no rows
PARTS: Mapping[str, Callable[[Options, Report], dict[str, Any]]] = {
    "jobs": Part("jobs", compared_job),
    "longer": Part("longer", longer_job),
    "aware": Part("aware", aware_job),
    "regret": Part("spaces", regret_of_space),
    "ablation": Part("ablation", ablated_job),
    WHOLE: of_speed,
}


def gathered(
    parts: Sequence[str], options: Options, before: Mapping[str, Any], progress: Report
) -> dict[str, Any]:
    """The record of some parts and jobs, merged with an earlier record of the same budget and seed.

    Raises:
        ValueError: the earlier record has another budget or seed.
    """
    settings = {"budget_s": options.budget_s, "seed": options.seed}
    if before and {key: before[key] for key in settings} != settings:
        raise ValueError(
            f"the record holds budget {before['budget_s']:g} s and seed {before['seed']}, want "
            f"{options.budget_s:g} s and {options.seed}; nearest: another --out"
        )
    record: dict[str, Any] = {
        **before,
        "command": f"python -m experiments.search.joint --budget {options.budget_s:g} --seed {options.seed}",
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        **settings,
    }
    for part in parts:
        provenance = {"commit": commit(), "date": datetime.now(UTC).isoformat(timespec="minutes")}
        part_rows = PARTS[part](options, progress)
        for key, value in part_rows.items():
            record[key] = record.get(key, {}) | value if isinstance(value, dict) else value
        names = (part,) if part == WHOLE else options.names
        record["made"] = record.get("made", {}) | {
            part: record.get("made", {}).get(part, {}) | dict.fromkeys(names, provenance)
        }
    return current(record)


def current(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record without spaces that are no longer listed, with its summary."""
    names = {space.name for space in spaces()}
    listed = {name: row for name, row in record.get("spaces", {}).items() if name in names}
    summarised = {**record, "spaces": listed} if listed else dict(record)
    return summarised | summed(summarised)


def rows(part: str, options: Options, record: Mapping[str, Any]) -> Iterator[Options]:
    """Yield the rows of a part that are run together: as many as processes, without those in the record.

    A row counts as present if the same commit made it, without uncommitted changes.
    """
    listed = options.spaces or [space.name for space in spaces()]
    names = listed if part == "regret" else options.names
    if part == WHOLE:
        names = [WHOLE]
    here, computed_by = commit(), record.get("made", {}).get(part, {})
    if here is not None and not here.endswith("-dirty"):
        names = [name for name in names if computed_by.get(name, {}).get("commit") != here]
    for first in range(0, len(names), options.processes):
        yield replace(options, names=names[first : first + options.processes])


def summed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The summary over all jobs and spaces in the record."""
    summary: dict[str, Any] = {}
    if jobs := record.get("jobs"):
        summary |= compared.overall(jobs)
        both = jobs.keys() & record.get("longer", {}).keys()
        longer = {name: jobs[name] | record["longer"][name] for name in both}
        summary |= {"longer_overall": compared.overall(longer)} if longer else {}
    if jobs := record.get("aware"):
        summary["cornstarch_never_slower_than_unaware"] = compared.is_never_slower(jobs)
    if spaces_ := record.get("spaces"):
        summary["regret_vs_exhaustive"] = max(row["regret"] for row in spaces_.values())
    return summary


def lines(record: Mapping[str, Any]) -> Sequence[str]:
    """The tables that the command prints."""
    tables: list[str] = []
    if "jobs" in record:
        tables += compared.lines(record["jobs"])
        tables.append(OVERALL.format(**record))
        tables += compared.causes_lines(record["jobs"])
    if "longer" in record:
        tables += compared.longer_lines(record["longer"], record.get("jobs", {}))
    if "longer_overall" in record:
        tables.append(OVERALL.format(**record["longer_overall"]))
    if "aware" in record:
        tables += compared.aware_lines(record["aware"])
    for name, space in record.get("spaces", {}).items():
        tables.append(f"{name}: {space['plans']} plans, regret {space['regret']:.3%}")
    if "ablation" in record:
        tables += compared.ablation_lines(record["ablation"])
    tables += [f"{key}: {record[key]:.3g}" for key in SPEED_KEYS if key in record]
    return tables


def holds(record: Mapping[str, Any]) -> bool:
    """Whether the results meet their goals."""
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
    parser.add_argument("--space", choices=listed, action="append", help="of regret, as --job")
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
        help="JSON file to write, row by row; rows of this commit are not computed again; default: "
        "one of this budget and seed in out/search",
    )
    arguments = parser.parse_args()
    if not 0 < arguments.budget < float("inf"):
        parser.error(f"--budget: want > 0 s, got {arguments.budget}; nearest: 1")
    if arguments.processes < 1:
        parser.error(f"--processes: want >= 1, got {arguments.processes}; nearest: 1")
    out: Path = arguments.out or OUT / f"joint-{arguments.budget:g}s-seed-{arguments.seed}.json"
    check_writable(out)

    options = Options(
        names=arguments.job or tuple(JOBS),
        spaces=arguments.space or (),
        budget_s=arguments.budget,
        seed=arguments.seed,
        processes=arguments.processes,
    )
    before = json.loads(out.read_text()) if out.exists() else {}
    try:
        record = gathered((), options, before, report)
        for part in arguments.part or PARTS:
            for some in rows(part, options, record):
                record = gathered((part,), some, record, report)
                write_text(json.dumps(record, indent=1) + "\n", out)
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(lines(record)))
    report(f"kept in {out}")
    return finish(record, as_json=arguments.json, holds=holds(record))


if __name__ == "__main__":
    sys.exit(main())
