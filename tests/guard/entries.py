"""The entries of the guard: every strategy under every schedule on every job, and what result files hold."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.guard import project

Facts = project.Facts
JOBS = Path(__file__).parent / "jobs.yaml"
RUN, PLAN, REFUSED = "run", "plan", "refused"
RESULTS = "results/"  # entries of files, by their names
HASH = re.compile(r"\b[0-9a-f]{64}\b")
MEASURED = "its plans hold links and layer times of the machine that ran it, and its profile was not kept"
SEARCHED = "its plans are what was found within a time, which depends on the machine"
NOT_MADE_AGAIN = {
    "fidelity.json": MEASURED,
    "entrain_executed.json": MEASURED,
    "entrain_executed_4.json": MEASURED,
    "entrain_executed_4_emulated.json": MEASURED,
    "search_executed.json": SEARCHED,
    "search_joint.json": SEARCHED,
}
KEPT_BY_HASH = {
    "mimo_parity_grid_outcomes.jsonl": project.grid_hashes,
    "mimo_loss_curves_curves.jsonl": project.loss_curve_hashes,
    "mimo_figure11_curves.jsonl": project.figure11_hashes,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One strategy under one schedule on one job."""

    job: str
    strategy: str
    schedule: str

    def __str__(self) -> str:
        return f"{self.job} {self.strategy} {self.schedule}"


def cases() -> tuple[Case, ...]:
    """All of them."""
    return tuple(
        Case(job, strategy, schedule)
        for job in jobs()
        for strategy in project.STRATEGIES
        for schedule in project.SCHEDULES
    )


def few_cases() -> tuple[Case, ...]:
    """On the first job every strategy under the first schedule, and the first strategy under every one."""
    job, strategy, schedule = next(iter(jobs())), project.STRATEGIES[0], project.SCHEDULES[0]
    under_first = [Case(job, each, schedule) for each in project.STRATEGIES]
    return tuple(dict.fromkeys([*under_first, *(Case(job, strategy, each) for each in project.SCHEDULES)]))


def jobs() -> Mapping[str, Mapping[str, Any]]:
    """Contents of job files by name."""
    found: Mapping[str, Mapping[str, Any]] = yaml.safe_load(JOBS.read_text())
    return found


class Maker:
    """Makes entries; plans that are equal are executed once, and simulated once for each name they have.

    Args:
        pool: workers that execute plans.
        run: cases whose plans are executed; None: all.
        version: of plan and trace files, whose names actions have.
    """

    def __init__(self, pool: Any, run: Collection[Case] | None = None, version: int = project.NEWEST) -> None:
        self._pool, self._cases, self._jobs, self._version = pool, run, jobs(), version
        self._known: dict[tuple[str, str], Facts] = {}
        self._runs: dict[str, Facts] = {}

    def entry(self, case: Case) -> Facts:
        """The plan's facts and those of its run, or why there is none."""
        try:
            found = project.accepted(self._jobs[case.job], case.strategy, case.schedule)
        except ValueError as error:
            return {REFUSED: _line(error)}
        key = (found.strategy, found.plan_hash)
        if key not in self._known:
            self._known[key] = {PLAN: project.plan_facts(found, self._version)}
        entry = self._known[key]
        if RUN not in entry and (self._cases is None or case in self._cases):
            entry[RUN] = self._run(found)
        return entry

    def _run(self, found: project.Accepted) -> Facts:
        if found.plan_hash not in self._runs:
            try:
                self._runs[found.plan_hash] = project.run_facts(found, self._pool)
            except ValueError as error:
                self._runs[found.plan_hash] = {REFUSED: _line(error)}
        return self._runs[found.plan_hash]


def result_entries(executor: Executor) -> Iterator[tuple[str, Facts]]:
    """Name and entry of every result file that holds plan hashes."""
    held = result_hashes()
    for name, entry in zip(held, executor.map(result_entry, held, held.values()), strict=True):
        yield f"{RESULTS}{name}", entry


def result_hashes() -> dict[str, set[str]]:
    """Plan hashes by the result file that holds them."""
    paths = [path for path in sorted(project.RESULT_FILES.iterdir()) if path.suffix in {".json", ".jsonl"}]
    return {path.name: hashes for path in paths if (hashes := set(HASH.findall(path.read_text())))}


def result_entry(name: str, held: set[str]) -> Facts:
    """Plan hashes made again by today's code, how many of the file's are among them, and whose others are."""
    if name in NOT_MADE_AGAIN:
        return {"in_file": len(held), "not_made_again": NOT_MADE_AGAIN[name]}
    if name in KEPT_BY_HASH:
        made, said, origin = KEPT_BY_HASH[name](), {}, "earlier runs, which the file keeps"
    else:
        record = json.loads((project.RESULT_FILES / name).read_text())
        made, said = project.table_facts(record["script"])
        origin = f"the code of {record['commit']}, which wrote the file and planned otherwise"
    again = len(held.intersection(made))
    facts: Facts = {"in_file": len(held), "made_again": again, "hashes": project.digest(made)}
    return facts | said | ({"others": f"{len(held) - again} of {origin}"} if again < len(held) else {})


def _line(error: ValueError) -> str:
    return " ".join(str(error).split())
