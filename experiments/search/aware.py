"""Cornstarch's planner beside its unaware baseline, both with the simulator as judge, as in `search`."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.search.best_single import OutOfTime, stopper
from experiments.search.compared import ROUNDING, prepared
from experiments.search.jobs import SuiteJob
from sim.predict import candidate_s
from workbench.planner.judged import judged
from workbench.strategies.registry import BY_NAME

AWARE, UNAWARE = "cornstarch", "cornstarch-frozen-unaware"


def aware_of(suite_job: SuiteJob, *, limit_s: float, progress: Callable[[str], None]) -> dict[str, Any]:
    """Seconds of a step of both strategies' plans, each by its own shortlist; None where it has no plan.

    Args:
        limit_s: CPU seconds of either; one that takes longer has no plan.
    """
    job, cost, _ = prepared(suite_job)
    record: dict[str, Any] = {}
    for name in (AWARE, UNAWARE):
        try:
            told = stopper(time.process_time() + limit_s, time.process_time)
            record[name] = candidate_s(judged(BY_NAME[name], candidate_s)(job, cost, told), cost)
        except ValueError as error:
            record |= {name: None, f"{name} refusal": str(error)}
        except OutOfTime:
            record |= {name: None, f"{name} refusal": f"out of time after {limit_s:g} CPU s"}
        progress(f"{suite_job.name}: {name} judged {record[name]}")
    return record


def is_never_slower(jobs: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the aware planner loses on no job."""
    return all(
        row[UNAWARE] is None or (row[AWARE] is not None and row[AWARE] <= row[UNAWARE] * ROUNDING)
        for row in jobs.values()
    )


def lines(jobs: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    """A line a job."""
    return [
        f"{name}: {AWARE} {row[AWARE]} s, {UNAWARE} {row[UNAWARE]} s, both judged by the simulator"
        for name, row in jobs.items()
    ]
