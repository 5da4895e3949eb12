"""What a plan of the suite is worth, by the exact sweep; the best ones are replayed by the engine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sim.failures.goodput import useful_samples_per_s
from sim.predict import candidate_s, predict, step_s
from workbench.cost.model import CostModel
from workbench.data.sample import Sample
from workbench.job.job import Job
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan
from workbench.search.objectives.asked import Asked, Executors, judge_for
from workbench.search.objectives.objective import Objective
from workbench.search.objectives.plan_judge import PlanJudge
from workbench.timing.accept import accept
from workbench.trace import Trace


@dataclass(frozen=True, slots=True)
class SuiteJudge:
    """Holds plans of one job against the simulator.

    Args:
        cost: the job's machines.
        judge: of an objective beyond the step on the job's own batch; None: seconds of that.
    """

    cost: CostModel
    judge: PlanJudge | None = None

    def value(self, plan: Plan) -> float:
        """Less is better; ValueError where the plan is unsound, can deadlock or does not fit."""
        return candidate_s(plan, self.cost) if self.judge is None else self.judge.value(plan)

    def replay(self, plan: Plan) -> Trace:
        """The step on the plan's own batch, by the engine; ValueError likewise."""
        return predict(*accept(plan), self.cost)


def judge_of(
    job: Job,
    cost: CostModel,
    objective: Objective,
    said: Asked,
    batches: Sequence[Sequence[Sample]],
    *,
    seed: int = 0,
) -> SuiteJudge:
    """The judge of an objective, for all who search the job.

    Raises:
        ValueError: as `judge_for`.
    """
    if objective is Objective.ITERATION and not batches:
        return SuiteJudge(cost)

    def seconds(lowered: Lowered) -> float:
        return step_s(lowered, cost)

    executors = Executors(seconds=seconds, failures=useful_samples_per_s, clock=time.perf_counter)
    return SuiteJudge(
        cost, judge_for(objective, said, job, cost, batches=batches, seed=seed, executors=executors)
    )
