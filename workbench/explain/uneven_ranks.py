"""A hint about ranks that wait for ranks with more work, where other groups of samples would be more even."""

import math
from collections.abc import Mapping, Sequence

from workbench.cost.model import CostModel
from workbench.explain.idle import IdleCause, IdleSeconds, idle_by_cause, idle_time
from workbench.float_sum import float_sum
from workbench.job.job import Job
from workbench.plan.lower import lower
from workbench.plan.plan import Plan
from workbench.planner.groupings import Group, Grouping, differ, grouped, groups_of
from workbench.planner.plan_layouts import joint_replicas_of
from workbench.planner.sample_work import sample_work
from workbench.trace import Trace

LEAST = 0.1  # of the step, and of the busiest ranks' work, for a hint to be worth a line: chosen


def uneven_ranks(
    plan: Plan,
    trace: Trace,
    job: Job,
    cost: CostModel,
    *,
    best_s: float = math.inf,
    idle: Sequence[IdleSeconds] | None = None,
) -> str | None:
    """Say that `search --joint` groups samples more evenly; None where it would help little.

    Only of plans whose ranks all do whole microbatches with sharded weights, and wait for each other in every
    collective: there the step is the work of the rank with most of it, microbatch by microbatch.

    Args:
        trace: of the plan's simulated step.
        best_s: the best plan's step; nothing is said of a plan that even groups would hardly make as fast.
        idle: of the trace, by cause; None: it is computed where it matters.

    Complexity: that of `idle_time` and `grouped`, where the batch's samples differ.
    """
    is_sharded = all(plan.settings.of(module.name).shards_parameters for module in plan.model.modules)
    if not is_sharded or joint_replicas_of(plan) > 1 or not differ(plan.batch):
        return None
    saved = _saved_by_even_groups(plan, job, cost)
    is_worth_it = saved >= LEAST and (1.0 - saved) * trace.iteration_s <= best_s
    waits = _share_of_waits(plan, trace, idle) if is_worth_it else 0.0
    if waits < LEAST:
        return None
    return (
        f"{plan.strategy}: as samples are unequal, ranks wait {waits:.0%} of the step for busier ranks; "
        f"`workbench search JOB --joint` groups samples evenly, which takes {saved:.0%} off the busiest "
        "ranks' work"
    )


def _share_of_waits(plan: Plan, trace: Trace, idle: Sequence[IdleSeconds] | None) -> float:
    """The share of the ranks' time in which they wait for ranks with more work."""
    causes = idle_by_cause(plan, idle_time(lower(plan), trace)) if idle is None else idle
    waited_s = plan.cluster.num_ranks * sum(each.seconds for each in causes if each.cause is IdleCause.RANKS)
    return waited_s / (len(plan.ranks) * trace.iteration_s)


def _saved_by_even_groups(plan: Plan, job: Job, cost: CostModel) -> float:
    """The share of the busiest ranks' work that as many even microbatches save; 0 where there are none."""
    work = sample_work(job, cost)
    seconds = (encoder_s + llm_s for encoder_s, llm_s in zip(*work, strict=True))
    work_s = dict(zip([sample.id for sample in job.batch], seconds, strict=True))
    groups, replicas = groups_of(job, plan.microbatches), len(plan.replicas(job.model.llm.name))
    try:
        even = grouped(job, cost, Grouping.EVEN_MODULES, len(groups), replicas)
    except ValueError:  # a batch that has no such groups
        return 0.0
    return 1.0 - _busiest_s(even, replicas, work_s) / _busiest_s(groups, replicas, work_s)


def _busiest_s(groups: Sequence[Group], replicas: int, work_s: Mapping[int, float]) -> float:
    """The work of the replica with most of it in every round of microbatches, summed over rounds."""
    group_s = [float_sum(work_s[sample] for sample in group) for group in groups]
    return float_sum(max(group_s[first : first + replicas]) for first in range(0, len(group_s), replicas))
