"""What each question gives: the joint search with one question open, then with all."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.search.compared import planners_of, prepared
from experiments.search.jobs import SuiteJob
from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.planner.stage_counts import silent
from workbench.planner.strategy_spec import Planner
from workbench.search.joint.ablation import ablated
from workbench.search.joint.drive import searched_starts
from workbench.search.joint.evaluate import Judge
from workbench.search.joint.question import Question
from workbench.search.joint.terms import Stop

ALL = "all"


def ablation_of(suite_job: SuiteJob, *, budget_s: float, progress: Callable[[str], None]) -> dict[str, Any]:
    """Gains over the best plan that any strategy has of the job as it is.

    One question is searched and the others stay as that strategy answers them; then all are. A question
    that has nothing to change on a job shows 1.
    """
    job, cost, judge = prepared(suite_job)
    name, value = _best_start(job, cost, judge, planners_of(job))
    progress(f"{suite_job.name}: from {name}, {value:.6g}")
    gains: dict[str, float] = {}
    stop = Stop(seconds=budget_s, clock=time.process_time)
    starts = searched_starts(job, cost, judge, stop=stop)
    for gain in ablated(job, cost, judge, name, starts=starts, stop=stop):
        what = gain.open[0].value if len(gain.open) == 1 else ALL
        gains[what] = gain.factor
        progress(f"{suite_job.name}: {what} {gain.factor:.4f}")
    return {"start": name, "start_value": value, "gains": gains}


def lines(jobs: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    """The table that the command prints."""
    heads = [*(question.value for question in Question), ALL]
    found = ["gain by one question alone".ljust(28) + "".join(f"{head:>10}" for head in heads)]
    for name, row in jobs.items():
        found.append(f"{name:28}" + "".join(f"{row['gains'][head]:10.3f}" for head in heads))
    return found


def _best_start(
    job: Job, cost: CostModel, judge: Judge, planners: Mapping[str, Planner]
) -> tuple[str, float]:
    best: tuple[float, str] | None = None
    refusal = ""
    for name, planner in planners.items():
        try:
            value = judge.value(planner(job, cost, silent))
        except ValueError as error:
            refusal = refusal or str(error)
            continue
        if best is None or value < best[0]:
            best = value, name
    if best is None:
        raise ValueError(f"job {job.name!r}: no strategy has a plan; the first: {refusal}")
    return best[1], best[0]
