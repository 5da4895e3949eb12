"""The plan of another batch with a plan's stages: which samples go together, who owns their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from workbench.cost.model import CostModel
from workbench.data.sample import Sample
from workbench.job.job import Job
from workbench.plan.following import next_plan
from workbench.plan.plan import Plan
from workbench.planner.groupings import grouped_again, way_of
from workbench.planner.plan_layouts import Placing, layouts_of
from workbench.planner.strategy_spec import Regroup
from workbench.schedule.choice import Schedule
from workbench.strategies import entrain
from workbench.strategies.registry import BY_NAME


def next_step(
    plan: Plan, batch: Sequence[Sample], job: Job, cost: CostModel, schedule: Schedule | None = None
) -> Plan:
    """The per-step part of a plan made anew for a batch; ranks, layers and settings stay.

    Strategies that decide by the samples' work which of them go together do it again. All others put
    the i-th sample where the i-th one stood, as the runtime does where it is not told the job. A plan of no
    strategy that is grouped by a named way, see `groupings`, is grouped by it again where the batch allows;
    one whose groups do not carry over is grouped by work as Entrain does it.

    Args:
        plan: of any batch of as many samples.
        job: that it was made of.
        schedule: of the plan; None: the job's where the strategy groups anew, else that of the plan's
            programs as far as it can be told from them.

    Raises:
        ValueError: the batch has no plan on these stages, as `next_plan` or the strategy says it.
    """
    spec = BY_NAME.get(plan.strategy)
    if spec is not None and spec.regroup is not None:
        return _regrouped(spec.regroup, plan, batch, job, cost, schedule)
    if spec is None and (found := _by_its_way(plan, batch, job, cost, schedule)) is not None:
        return found
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
    """`next_step` of one job at its machine's prices, for whoever plans while a step runs."""

    job: Job
    cost: CostModel

    def __call__(self, plan: Plan, batch: Sequence[Sample]) -> Plan:
        """As `next_step`."""
        return next_step(plan, batch, self.job, self.cost)


def _by_its_way(
    plan: Plan, batch: Sequence[Sample], job: Job, cost: CostModel, schedule: Schedule | None
) -> Plan | None:
    """None where the plan's own batch is not grouped by a named way, or this one cannot be."""
    was = job if job.batch is plan.batch else replace(job, batch=plan.batch)
    way = way_of(was, cost, plan.microbatches)
    if way is None:
        return None
    try:
        microbatches = grouped_again(replace(job, batch=tuple(batch)), cost, way, plan.microbatches)
        return next_plan(plan, batch, schedule=schedule, microbatches=microbatches)
    except ValueError:  # no such groups, or none that the plan's programs take
        return None


def _regrouped(
    regroup: Regroup,
    plan: Plan,
    batch: Sequence[Sample],
    job: Job,
    cost: CostModel,
    schedule: Schedule | None,
) -> Plan:
    llm = plan.model.llm.name
    replicas = len(plan.replicas(llm))
    pinned = replace(
        job,
        batch=tuple(batch),
        replicas=replicas,
        layouts=layouts_of(plan, replicas, Placing.LEFT),
        schedule=schedule or job.schedule,
        settings=plan.settings,
    )
    return regroup(plan, pinned, cost)
