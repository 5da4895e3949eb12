"""What a plan of the suite is worth, by the exact sweep; the best ones are replayed by the engine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sim.judge import executors_of
from sim.predict import candidate_s, predict
from workbench.cost.model import CostModel
from workbench.data.sample import Sample
from workbench.job.job import Job
from workbench.plan.plan import Plan
from workbench.search.joint.evaluate import Judge
from workbench.search.objectives.asked import Asked, judge_for
from workbench.search.objectives.objective import Objective
from workbench.timing.accept import accept
from workbench.trace import Trace


@dataclass(frozen=True, slots=True)
class StepJudge:
    """Holds plans by the seconds of their steps, each after every check there is.

    Args:
        cost: the machines that plans are priced on.
    """

    cost: CostModel

    def value(self, plan: Plan) -> float:
        """Less is better; ValueError where the plan is unsound, can deadlock or does not fit."""
        return candidate_s(plan, self.cost)

    def replay(self, plan: Plan) -> Trace:
        """The step by the engine; ValueError likewise."""
        return predict(*accept(plan), self.cost)


def judge_of(
    job: Job,
    cost: CostModel,
    objective: Objective,
    said: Asked,
    batches: Sequence[Sequence[Sample]],
    *,
    seed: int = 0,
) -> Judge:
    """The judge of an objective, for all who search the job.

    Planning of further batches is timed in CPU seconds, which other load does not lengthen.

    Raises:
        ValueError: as `judge_for`.
    """
    if objective is Objective.ITERATION and not batches:
        return StepJudge(cost)
    executors = replace(executors_of(cost), clock=time.process_time)
    return judge_for(objective, said, job, cost, batches=batches, seed=seed, executors=executors)
