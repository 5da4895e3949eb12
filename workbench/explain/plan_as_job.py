"""The job that a plan answers: its layouts, its schedule, and the samples per microbatch."""

from dataclasses import replace
from typing import NamedTuple

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.job.other_layouts import apart
from workbench.plan.codec import plan_hash
from workbench.plan.plan import Plan
from workbench.plan.plan_schedule import likely_schedules, schedule_of
from workbench.planner.assembly import scheduled
from workbench.planner.budget import UNLIMITED, Budget
from workbench.planner.plan_layouts import Placing, fields_of, microbatch_samples
from workbench.planner.stage_counts import OUT_OF_TIME, PlannerStopped
from workbench.planner.strategy_spec import Planner
from workbench.schedule.choice import Schedule
from workbench.strategies import fsdp, megatron_heterogeneous
from workbench.strategies.registry import BY_NAME


class Origin(NamedTuple):
    """What a plan was made from, as far as can be inferred.

    Args:
        job: to plan.
        strategy: that planned it.
        is_exact: whether the strategy makes the same plan from the job.
    """

    job: Job
    strategy: str
    is_exact: bool


def replanned_by(plan: Plan) -> str:
    """The strategy that plans the plan's neighbours: its own, or one that accepts any layouts.

    Plans of a joint search and of other programs name no strategy.
    """
    if plan.strategy in BY_NAME:
        return plan.strategy
    all_sharded = all(plan.settings.of(module.name).shards_parameters for module in plan.model.modules)
    return (fsdp.SPEC if all_sharded else megatron_heterogeneous.SPEC).name


def origin_of(
    plan: Plan, cost: CostModel, planner: Planner, job: Job | None = None, budget: Budget = UNLIMITED
) -> Origin:
    """A job from which the plan's strategy makes the plan, or the nearest that layouts can describe.

    Its layouts are the plan's. Positions of modules are stated if the strategy needs them to make the plan.

    Args:
        plan: any plan.
        cost: model of the machine.
        planner: of the strategy `replanned_by`.
        job: that the plan was made from; None: unknown, and inferred from the plan.
        budget: of planning it again.

    Raises:
        ValueError: the strategy refuses every such job; the reason is that of the first.

    Complexity: at most two plans.
    """
    refusal: ValueError | None = None
    nearest: Job | None = None
    for placing in Placing:
        candidate = job_of(plan, cost, placing, job)
        try:
            replanned = planner(candidate, cost, budget.watch())
        except ValueError as error:
            refusal = refusal or error
            continue
        except PlannerStopped:
            refusal = refusal or ValueError(OUT_OF_TIME)
            continue
        if plan_hash(replanned) == plan_hash(plan):
            return Origin(candidate, replanned_by(plan), is_exact=True)
        nearest = nearest or candidate
    if nearest is None:
        assert refusal is not None, "there are placings"
        raise refusal
    return Origin(nearest, replanned_by(plan), is_exact=False)


def job_of(plan: Plan, cost: CostModel, placing: Placing, job: Job | None = None) -> Job:
    """The job with the plan's layouts; None: one whose other parts are inferred from the plan, too."""
    if job is not None:
        return replace(job, **fields_of(plan, apart(job).microbatch_samples, placing)._asdict())
    return Job(
        name=plan.model.name,
        model=plan.model,
        cluster=plan.cluster,
        batch=plan.batch,
        schedule=_schedule(plan, cost),
        settings=plan.settings,
        **fields_of(plan, microbatch_samples(plan), placing)._asdict(),
    )


def _schedule(plan: Plan, cost: CostModel) -> Schedule:
    """The plan's schedule; if it has an order of its own, the first that its stages could have."""
    plan_schedule = schedule_of(plan, lambda bare, schedule: scheduled(bare, schedule, cost))
    return plan_schedule or next(likely_schedules(plan), Schedule())
