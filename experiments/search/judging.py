"""The value of a plan of the suite, by the exact sweep; the best ones are replayed by the engine."""

import time
from collections.abc import Sequence
from dataclasses import replace

from sim.judge import executors_of
from sim.predict import IterationJudge
from workbench.cost.model import CostModel
from workbench.data.sample import Sample
from workbench.job.job import Job
from workbench.search.joint.evaluate import Judge
from workbench.search.objectives.objective import Objective
from workbench.search.objectives.options import ObjectiveOptions, judge_for


def judge_of(
    job: Job,
    cost: CostModel,
    objective: Objective,
    options: ObjectiveOptions,
    batches: Sequence[Sequence[Sample]],
    *,
    seed: int = 0,
) -> Judge:
    """The judge of an objective, for all searches of a job.

    Planning of further batches is timed in CPU seconds, which other load does not affect.

    Raises:
        ValueError: as `judge_for`.
    """
    if objective is Objective.ITERATION and not batches:
        return IterationJudge(cost)
    executors = replace(executors_of(cost), clock=time.process_time)
    return judge_for(objective, options, job, cost, batches=batches, seed=seed, executors=executors)
