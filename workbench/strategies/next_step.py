"""Plan another batch on a plan's stages: which samples are batched together, and who owns their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from workbench.cost.model import CostModel
from workbench.data.sample import Sample
from workbench.job.job import Job
from workbench.job.other_layouts import apart
from workbench.plan.following import next_plan
from workbench.plan.plan import Plan
from workbench.planner.groupings import grouped_again, way_of
from workbench.planner.plan_layouts import Placing, fields_of
from workbench.planner.strategy_spec import Regroup
from workbench.schedule.choice import Schedule
from workbench.strategies import entrain
from workbench.strategies.registry import BY_NAME


def next_step(
    plan: Plan, batch: Sequence[Sample], job: Job, cost: CostModel, schedule: Schedule | None = None
) -> Plan:
    """Plan a batch anew on a plan's stages: the per-step part; ranks, layers and settings stay.

    Strategies that group samples by work do it again. All others put the i-th sample where the i-th one
    was, as the runtime does if it does not know the job. A plan of no strategy that is grouped by a named
    rule, see `groupings`, is grouped by it again if the batch allows; one whose groups do not carry over is
    grouped by work as in Entrain.

    Args:
        plan: of any batch with as many samples.
        job: that it was made for.
        schedule: of the plan; None: the job's if the strategy groups anew, else what can be inferred from
            the plan's programs.

    Raises:
        ValueError: the batch has no plan on these stages, as `next_plan` or the strategy reports.
    """
    spec = BY_NAME.get(plan.strategy)
    if spec is not None and spec.regroup is not None:
        return _regrouped(spec.regroup, plan, batch, job, cost, schedule)
    if spec is None and (regrouped := _by_its_rule(plan, batch, job, cost, schedule)) is not None:
        return regrouped
    try:
        return next_plan(plan, batch, schedule=schedule)
    except ValueError as error:
        if spec is not None or len(batch) != len(plan.batch):
            raise
        refusal = error
    try:
        return _regrouped(entrain.regroup, plan, batch, job, cost, schedule)
    except ValueError:
        raise refusal from None


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStep:
    """`next_step` with a job and cost model, for planning while a step runs."""

    job: Job
    cost: CostModel

    def __call__(self, plan: Plan, batch: Sequence[Sample]) -> Plan:
        """As `next_step`."""
        return next_step(plan, batch, self.job, self.cost)


def _by_its_rule(
    plan: Plan, batch: Sequence[Sample], job: Job, cost: CostModel, schedule: Schedule | None
) -> Plan | None:
    """None if the plan's own batch is not grouped by a named rule, or the new one cannot be."""
    planned_job = job if job.batch is plan.batch else replace(job, batch=plan.batch)
    rule = way_of(planned_job, cost, plan.microbatches)
    if rule is None:
        return None
    try:
        microbatches = grouped_again(replace(job, batch=tuple(batch)), cost, rule, plan.microbatches)
        return next_plan(plan, batch, schedule=schedule, microbatches=microbatches)
    except ValueError:  # the batch cannot be grouped so, or the plan's programs do not fit
        return None


def _regrouped(
    regroup: Regroup,
    plan: Plan,
    batch: Sequence[Sample],
    job: Job,
    cost: CostModel,
    schedule: Schedule | None,
) -> Plan:
    fixed_job = replace(
        job,
        batch=tuple(batch),
        schedule=schedule or job.schedule,
        settings=plan.settings,
        **fields_of(plan, apart(job).microbatch_samples, Placing.LEFT)._asdict(),
    )
    return regroup(plan, fixed_job, cost)
