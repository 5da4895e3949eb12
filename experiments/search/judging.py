"""What a plan of the suite is worth: seconds of its step, or dollars a sample, by the exact sweep."""

from dataclasses import dataclass

from sim.predict import predict, step_s
from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.plan.plan import Plan
from workbench.search.drive import Objective
from workbench.timing.accept import accept
from workbench.trace import Trace
from workbench.units import S_PER_HOUR


@dataclass(frozen=True, slots=True)
class SweepJudge:
    """Holds plans of one job against the simulator."""

    job: Job
    cost: CostModel
    objective: Objective = Objective.ITERATION

    def value(self, plan: Plan) -> float:
        """Less is better; ValueError where the plan is unsound, can deadlock or does not fit."""
        lowered, _ = accept(plan)
        seconds = step_s(lowered, self.cost)
        if self.objective is Objective.ITERATION:
            return seconds
        per_hour = self.job.dollars_per_hour(plan.ranks)
        if per_hour is None:
            raise ValueError(f"job {self.job.name!r}: a rank has no price")
        return per_hour / S_PER_HOUR * seconds / len(plan.batch)

    def replay(self, plan: Plan) -> Trace:
        """By the engine; ValueError likewise."""
        return predict(*accept(plan), self.cost)
