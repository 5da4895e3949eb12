"""What each question gives: the joint search with one question open, then with all."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.search.compared import prepared
from experiments.search.jobs import SuiteJob
from workbench.search.joint.ablation import ablated
from workbench.search.joint.drive import searched_starts
from workbench.search.joint.question import Question
from workbench.search.joint.terms import Stop

ALL = "all"


def ablation_of(suite_job: SuiteJob, *, budget_s: float, progress: Callable[[str], None]) -> dict[str, Any]:
    """Gains over the best start that the joint search has in that time.

    One question is searched and the others stay as that start answers them; then all are. A question
    that has nothing to change on a job shows 1.
    """
    job, cost, judge = prepared(suite_job)
    stop = Stop(seconds=budget_s, clock=time.process_time)
    starts = searched_starts(job, cost, judge, stop=stop)
    value, name = min((start.value, start.name) for start in starts if start.value is not None)
    progress(f"{suite_job.name}: from {name}, {value:.6g}")
    gains: dict[str, float] = {}
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
