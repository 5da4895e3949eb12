"""Approximate a plan by what a target can express: a sequence of changes, each priced."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from workbench.cost.model import CostModel
from workbench.data.sample import Sample, Segment
from workbench.export.module_layouts import (
    Placed,
    RankSharing,
    placed_modules,
    rank_sharing_of,
    schedule_like,
)
from workbench.job import other_layouts
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.model.model_graph import TEXT, ModelGraph
from workbench.plan.plan import ModuleSettings, Plan, Sharding
from workbench.planner.budget import UNLIMITED, Budget
from workbench.planner.plan_layouts import joint_replicas_of, microbatch_samples
from workbench.planner.stage_counts import PlannerStopped
from workbench.schedule.choice import Schedule
from workbench.strategies import fsdp, megatron_heterogeneous
from workbench.strategies.registry import BY_NAME


class Prices(Protocol):
    """Prices of plans, given from outside because the planner does not import the simulator."""

    cost: CostModel

    def step_s(self, plan: Plan) -> float:
        """Seconds of a step; ValueError for a plan that is invalid or does not fit."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A part of a plan that a target does differently.

    Args:
        has: what the plan has.
        gets: what the target does instead.
        make: applies the change to the job; None: it does not affect the prediction.
    """

    has: str
    gets: str
    make: Callable[[Job], Job] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A change with its predicted cost.

    Args:
        seconds: change of the step; None: it does not affect the prediction.
    """

    has: str
    gets: str
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Approximation:
    """A plan as a target runs it.

    Args:
        plan: as given.
        step_s: of that plan.
        becomes: what the target runs, as a plan; the given one if nothing differs.
        becomes_s: its step.
        differences: between them, in the order of the changes.
    """

    plan: Plan
    step_s: float
    becomes: Plan
    becomes_s: float
    differences: tuple[Difference, ...]


def job_of(plan: Plan) -> Job:
    """The job whose layouts describe the plan's stages, with modules placed one after the other.

    Raises:
        ValueError: no layouts describe them; the message is that part alone.
    """
    placed = placed_modules(plan)
    shared = rank_sharing_of(plan) is RankSharing.SHARED
    job = replace(
        open_job(plan),
        replicas=placed[plan.model.llm.name].dp,
        schedule=schedule_like(plan),
        settings=plan.settings,
    )
    layouts = (
        replace(each.layout, rank_offset=0 if shared else None, stage_layers=_given_cuts(plan, each))
        for each in placed.values()
    )
    return other_layouts.with_layouts(job, tuple(layouts))


def _given_cuts(plan: Plan, placed: Placed) -> tuple[int, ...]:
    is_sharded = plan.settings.of(placed.layout.module).sharding is Sharding.PARAMETERS
    return () if is_sharded else placed.layout.stage_layers


def planned(job: Job, cost: CostModel) -> Plan:
    """Plan a job with complete layouts; ValueError if that is impossible."""
    settings = {job.settings.of(module.name).sharding for module in job.model.modules}
    if settings == {Sharding.PARAMETERS} and all((each.pp or 1) == 1 for each in job.layouts):
        instances = job.settings.of(job.model.modules[0].name).instances
        return fsdp.sharded_plan(job, cost, instances)
    return megatron_heterogeneous.plan(job, cost)


def approximated(plan: Plan, changes: Sequence[Change], prices: Prices) -> Approximation:
    """Apply a target's changes to the plan one after the other, and price each.

    Differences in the arrangement of samples, tokens, ranks and passes come first, as one change.

    Raises:
        ValueError: the plan itself cannot be simulated, no layouts describe it, or a changed plan is
            impossible or does not fit; then the message is that part, and why.
    """
    step_s = prices.step_s(plan)
    job = job_of(plan)
    differences: list[Difference] = []
    current, current_s = plan, step_s
    for change in (*_arrangement(plan, job, prices.cost), *_rows(plan), *changes):
        if change.make is None:
            differences.append(Difference(has=change.has, gets=change.gets, seconds=None))
            continue
        try:
            job = change.make(job)
            changed = planned(job, prices.cost)
            changed_s = prices.step_s(changed)
        except ValueError as error:
            raise ValueError(f"{change.has}; with {change.gets} instead: {error}") from None
        differences.append(Difference(has=change.has, gets=change.gets, seconds=changed_s - current_s))
        current, current_s = changed, changed_s
    return Approximation(
        plan=plan, step_s=step_s, becomes=current, becomes_s=current_s, differences=tuple(differences)
    )


def _arrangement(plan: Plan, job: Job, cost: CostModel) -> tuple[Change, ...]:
    """Arrangement of the plan that no layouts describe; empty if planning the layouts reproduces it."""
    try:
        standard = planned(job, cost)
    except ValueError as error:
        raise ValueError(f"the ranks and degrees of strategy {plan.strategy}: {error}") from None
    same = {
        "samples": _grouped(standard) == _grouped(plan),
        "tokens": standard.token_shards == plan.token_shards,
        "ranks": [stage.ranks for stage in standard.stages] == [stage.ranks for stage in plan.stages],
        "order of passes": [p.actions for p in standard.programs] == [p.actions for p in plan.programs],
    }
    parts = [part for part, is_same in same.items() if not is_same]
    if not parts:
        return ()
    return (
        Change(
            has=f"{', '.join(parts)} as {plan.made_by} arranges them",
            gets="samples in the batch's order, ranks and passes in the system's own order",
            make=lambda before: before,
        ),
    )


def _rows(plan: Plan) -> tuple[Change, ...]:
    """Which rows of a microbatch a joint replica has; Megatron's samplers give each consecutive samples."""
    num_joint = joint_replicas_of(plan)
    if num_joint == 1 or microbatch_samples(plan) == 1:
        return ()
    return (
        Change(
            has=f"samples of a microbatch in turn on {num_joint} replicas that share experts",
            gets="consecutive samples on each replica",
        ),
    )


def _grouped(plan: Plan) -> list[tuple[str, int, int, frozenset[object]]]:
    return [(m.module, m.replica, m.index, frozenset(m.items)) for m in plan.microbatches]


def with_layouts(job: Job, change: Callable[[ModuleLayout], ModuleLayout]) -> Job:
    """Apply a change to every layout of a job."""
    return replace(job, layouts=tuple(change(layout) for layout in job.layouts))


def with_settings(job: Job, change: Callable[[ModuleSettings], ModuleSettings]) -> Job:
    """Apply a change to every module's settings."""
    modules = tuple(change(job.settings.of(module.name)) for module in job.model.modules)
    return replace(job, settings=replace(job.settings, modules=modules))


def in_settings(has: str, gets: str, change: Callable[[ModuleSettings], ModuleSettings]) -> tuple[Change]:
    """A single change, of every module's settings."""
    return (Change(has=has, gets=gets, make=lambda job: with_settings(job, change)),)


def with_schedule(job: Job, schedule: Schedule) -> Job:
    """The job under another schedule; if its stages differ, they are balanced anew."""
    if schedule.virtual_stages == job.schedule.virtual_stages:
        return replace(job, schedule=schedule)
    freed = with_layouts(job, lambda layout: replace(layout, stage_layers=()))
    return replace(freed, schedule=schedule)


def longest_tokens(plan: Plan) -> int:
    """Tokens of the longest sample, in the language model."""
    return max(sample.num_tokens for sample in plan.batch)


def padded(job: Job, multiple: int = 1) -> Job:
    """Pad every sample to the longest, or from there to a multiple of tokens, with text tokens."""
    longest = -(-max(sample.num_tokens for sample in job.batch) // multiple) * multiple
    return replace(job, batch=tuple(_lengthened(sample, longest) for sample in job.batch))


def _lengthened(sample: Sample, tokens: int) -> Sample:
    more = tokens - sample.num_tokens
    last = sample.of(TEXT)[-1] if sample.of(TEXT) else None
    if more == 0 or last is None:
        return sample
    longer = replace(last, tokens_in=last.tokens_in + more, tokens_out=last.tokens_out + more)
    return replace(sample, segments=tuple(longer if each is last else each for each in sample.segments))


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A way to derive a plan that a target can express.

    Args:
        words: what is done.
        job: from the plan's job, without layouts, to the one that is planned.
        strategy: plans it; None: its layouts are complete, and planned as they are.
    """

    words: str
    strategy: str | None = None
    job: Callable[[Job], Job] = lambda job: job


def open_job(plan: Plan) -> Job:
    """The job of a plan without layouts; every strategy can plan it."""
    return Job(
        name=plan.model.name,
        model=plan.model,
        cluster=plan.cluster,
        batch=plan.batch,
        microbatch_samples=microbatch_samples(plan),
        replicas=1,
        settings=replace(plan.settings, modules=()),
    )


def llm_only(job: Job) -> Job:
    """The language model without its other modules, whose tokens become text."""
    llm = job.model.llm
    return replace(
        job,
        model=ModelGraph(name=job.model.name, modules=(llm,)),
        batch=tuple(_as_text(sample) for sample in job.batch),
    )


def _as_text(sample: Sample) -> Sample:
    return Sample(sample.id, (Segment(TEXT, 0, sample.num_tokens, sample.num_tokens),), sample.mask)


def nearest(
    plan: Plan,
    alternatives: Sequence[Alternative],
    refuses: Callable[[Plan], str | None],
    prices: Prices,
    budget: Budget = UNLIMITED,
) -> tuple[str, float] | None:
    """The fastest plan that a target can express, in words, and its seconds; None if no alternative works.

    Args:
        budget: of planning; each alternative has an equal share of what is left.
    """
    candidates: list[tuple[float, str]] = []
    for done, alternative in enumerate(alternatives):
        share = budget.part(1 / (len(alternatives) - done))
        try:
            candidate = _planned_by(alternative, plan, prices.cost, share)
            if refuses(candidate) is None:
                candidates.append((prices.step_s(candidate), alternative.words))
        except (ValueError, PlannerStopped):
            continue
    return (min(candidates)[1], min(candidates)[0]) if candidates else None


def _planned_by(alternative: Alternative, plan: Plan, cost: CostModel, budget: Budget) -> Plan:
    job = alternative.job(open_job(plan))
    if alternative.strategy is None:
        return planned(job, cost)
    return BY_NAME[alternative.strategy].planner(job, cost, budget.watch())


def all_sharded(job: Job) -> Job:
    """Every module on every rank, its weights sharded over all of them."""
    dp = max(
        n for n in range(1, job.cluster.num_ranks + 1) if len(job.batch) % (n * job.microbatch_samples) == 0
    )
    spread = replace(
        job, layouts=tuple(ModuleLayout(module=module.name, pp=1, dp=dp) for module in job.model.modules)
    )
    return with_settings(spread, lambda settings: replace(settings, sharding=Sharding.PARAMETERS))


LLM_ONLY = (
    Alternative(
        words="the language model alone, by strategy megatron-colocated",
        strategy="megatron-colocated",
        job=llm_only,
    ),
    Alternative(
        words="the language model alone, its weights sharded over all ranks",
        job=lambda job: all_sharded(llm_only(job)),
    ),
)
"""For systems with a single language model."""
