"""A strategy's planner that keeps its plans and refusals in a folder, for searches of equal jobs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.plan.codec import dumps, loads
from workbench.plan.plan import Plan
from workbench.planner.stage_counts import Progress, StopWatch
from workbench.planner.strategy_spec import Planner
from workbench.search.kept_results import Kept, KeptResults, result_key

_REFUSAL = "refusal"


@dataclass(frozen=True, slots=True)
class KeptPlanner:
    """A planner whose plan of a job is read from a folder if it is there, and kept there if not.

    Not kept is what a planner had when it was stopped. One that is limited to a number of reports always
    plans: it is for one of many candidates, and that number may decide its plan.

    Args:
        name: of the planner, part of the key.
        planner: with the same arguments, result and errors.
        results: the folder.
    """

    name: str
    planner: Planner
    results: KeptResults

    def __call__(self, job: Job, cost: CostModel, progress: Progress) -> Plan:
        watch = progress if isinstance(progress, StopWatch) else StopWatch(progress=progress)
        if watch.counts_reports:
            return self.planner(job, cost, watch)
        key = result_key(job, cost, (self.name,), "plan")
        kept = self.results.get(key)
        if kept is not None:
            return _again(kept, job)
        try:
            plan = self.planner(job, cost, watch)
        except ValueError as error:
            if type(error) is ValueError and watch.stopped_at is None:
                self.results.put(key, Kept(record={_REFUSAL: str(error)}, best_plan=""))
            raise
        if watch.stopped_at is None:
            self.results.put(key, Kept(record={}, best_plan=dumps(plan)))
        return plan


def with_kept_plans(planners: Mapping[str, Planner], suffix: str, results: KeptResults) -> dict[str, Planner]:
    """Let the planners keep their plans, under their names with a suffix."""
    return {name: KeptPlanner(f"{name} {suffix}", planner, results) for name, planner in planners.items()}


def _again(kept: Kept, job: Job) -> Plan:
    """The kept plan; ValueError for a refusal. It shares the job's model, by which searches cache."""
    if _REFUSAL in kept.record:
        raise ValueError(kept.record[_REFUSAL])
    plan = loads(kept.best_plan)
    return replace(plan, model=job.model) if plan.model == job.model else plan
