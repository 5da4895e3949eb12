"""What a step costs beside its passes, in this process's own seconds: planning it, and making its data."""

import pickle
import statistics
import time
from dataclasses import dataclass

import torch

from runtime.data.batches import microbatch_data
from runtime.elastic.job import ElasticJob, plan_step
from workbench.elastic.layout import NodeLayout
from workbench.plan.plan import Plan
from workbench.timing.accept import accept

TIMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Medians over a few times.

    Args:
        plan: of the step.
        planning_s: to plan, check and pickle it; the supervisor's part.
        feeding_s: until the rank with the most data has the plan and its data; the ranks' part.
        feeding_core_s: the same of all ranks together.
    """

    plan: Plan
    planning_s: float
    feeding_s: float
    feeding_core_s: float


def rehearse(job: ElasticJob, layout: NodeLayout, step: int) -> Rehearsal:
    """Do it in this process, before any other is forked from it.

    Raises:
        ValueError: the plan was refused.
    """
    torch.set_num_threads(1)  # as in the ranks; and whoever is forked must not miss a pool of threads
    planning_s, feeding_s, feeding_core_s = [], [], []
    for _ in range(TIMES):
        start_s = time.process_time()
        plan = plan_step(job, layout, job.batch(step))
        pickled = pickle.dumps(accept(plan)[0])
        planned_s = time.process_time()
        pickle.loads(pickled)
        reading_s = time.process_time() - planned_s
        planning_s.append(planned_s - start_s)
        by_rank_s = [reading_s + _data_s(job, plan, rank) for rank in plan.ranks]
        feeding_s.append(max(by_rank_s))
        feeding_core_s.append(sum(by_rank_s))
    return Rehearsal(
        plan=plan,
        planning_s=statistics.median(planning_s),
        feeding_s=statistics.median(feeding_s),
        feeding_core_s=statistics.median(feeding_core_s),
    )


def _data_s(job: ElasticJob, plan: Plan, rank: int) -> float:
    start_s = time.process_time()
    for stage in plan.stages_on[rank]:
        for microbatch in plan.microbatches_of.get((stage.module, stage.replica), ()):
            microbatch_data(plan, stage, microbatch, job.source, dtype=job.dtype)
    return time.process_time() - start_s
