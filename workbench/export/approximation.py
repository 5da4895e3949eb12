"""What a target does in place of a plan: steps from the plan as it is to what the target can express."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from workbench.cost.model import CostModel
from workbench.data.sample import Sample, Segment
from workbench.export.module_layouts import Placed, Placing, llm_of, placed_modules, placing_of, schedule_like
from workbench.job.job import Job, ModuleLayout
from workbench.model.model_graph import TEXT, ModelGraph
from workbench.plan.plan import ModuleSettings, Plan, Sharding
from workbench.planner.stage_counts import silent
from workbench.schedule.choice import Schedule
from workbench.strategies import fsdp, megatron_heterogeneous
from workbench.strategies.registry import BY_NAME


class Prices(Protocol):
    """What plans cost: given from outside, since the simulator is not the planner's to import."""

    cost: CostModel

    def step_s(self, plan: Plan) -> float:
        """Seconds of a step; ValueError for a plan that is unsound or does not fit."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something of a plan that a target has otherwise.

    Args:
        has: what the plan has.
        gets: what the target does instead.
        make: from the job before to the job behind the change; None: nothing that a prediction is of.
    """

    has: str
    gets: str
    make: Callable[[Job], Job] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A change with its predicted cost.

    Args:
        seconds: a step more than before the change; None: nothing that a prediction is of.
    """

    has: str
    gets: str
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Approximation:
    """What a target makes of a plan.

    Args:
        plan: as it was given.
        step_s: of that plan.
        becomes: what the target does, as a plan; the given one where nothing differs.
        becomes_s: of that.
        differences: between them, in the order in which they were made.
    """

    plan: Plan
    step_s: float
    becomes: Plan
    becomes_s: float
    differences: tuple[Difference, ...]


def job_of(plan: Plan) -> Job:
    """The job whose layouts say what the plan's stages do, in places that modules take one after the other.

    Raises:
        ValueError: no layout says it; the message is the part alone.
    """
    placed = placed_modules(plan)
    shared = placing_of(plan) is Placing.SHARED
    return replace(
        open_job(plan),
        replicas=placed[llm_of(plan).name].dp,
        layouts=tuple(
            replace(each.layout, rank_offset=0 if shared else None, stage_layers=_given_cuts(plan, each))
            for each in placed.values()
        ),
        schedule=schedule_like(plan),
        settings=plan.settings,
    )


def _given_cuts(plan: Plan, placed: Placed) -> tuple[int, ...]:
    is_sharded = plan.settings.of(placed.layout.module).sharding is Sharding.PARAMETERS
    return () if is_sharded else placed.layout.stage_layers


def microbatch_samples(plan: Plan) -> int:
    """Samples of a microbatch of the language model, the nearest number that divides a replica's batch."""
    llm = llm_of(plan).name
    counts = [len(each.items) for each in plan.microbatches if each.module == llm]
    share = max(1, len(plan.batch) // len(plan.replicas(llm)))
    mean = sum(counts) / len(counts)
    return min((n for n in range(1, share + 1) if share % n == 0), key=lambda n: (abs(n - mean), n))


def planned(job: Job, cost: CostModel) -> Plan:
    """The plan of a job whose layouts are complete; ValueError where there is none."""
    settings = {job.settings.of(module.name).sharding for module in job.model.modules}
    if settings == {Sharding.PARAMETERS} and all((each.pp or 1) == 1 for each in job.layouts):
        instances = job.settings.of(job.model.modules[0].name).instances
        return fsdp.sharded_plan(job, cost, instances)
    return megatron_heterogeneous.plan(job, cost)


def approximated(plan: Plan, changes: Sequence[Change], prices: Prices) -> Approximation:
    """The plan as a target says it, each change priced against what was before it.

    Samples, tokens, ranks and passes that the plan arranges otherwise than a target would stand first, as one
    change.

    Raises:
        ValueError: the plan itself cannot be simulated, no layout says it, or what the target does instead
            cannot be planned or does not fit; then the message is that part, and why.
    """
    step_s = prices.step_s(plan)
    job = job_of(plan)
    found: list[Difference] = []
    before, before_s = plan, step_s
    for change in (*_arrangement(plan, job, prices.cost), *changes):
        if change.make is None:
            found.append(Difference(has=change.has, gets=change.gets, seconds=None))
            continue
        try:
            job = change.make(job)
            behind = planned(job, prices.cost)
            behind_s = prices.step_s(behind)
        except ValueError as error:
            raise ValueError(f"{change.has}; with {change.gets} instead: {error}") from None
        found.append(Difference(has=change.has, gets=change.gets, seconds=behind_s - before_s))
        before, before_s = behind, behind_s
    return Approximation(
        plan=plan, step_s=step_s, becomes=before, becomes_s=before_s, differences=tuple(found)
    )


def _arrangement(plan: Plan, job: Job, cost: CostModel) -> tuple[Change, ...]:
    """What the plan arranges in a way that no layout says; none where planning the layouts gives it."""
    try:
        usual = planned(job, cost)
    except ValueError as error:
        raise ValueError(f"the places and degrees of strategy {plan.strategy}: {error}") from None
    same = {
        "samples": _grouped(usual) == _grouped(plan),
        "tokens": usual.token_shards == plan.token_shards,
        "ranks": [stage.ranks for stage in usual.stages] == [stage.ranks for stage in plan.stages],
        "order of passes": [p.actions for p in usual.programs] == [p.actions for p in plan.programs],
    }
    parts = [part for part, is_same in same.items() if not is_same]
    if not parts:
        return ()
    return (
        Change(
            has=f"{', '.join(parts)} as strategy {plan.strategy} arranges them",
            gets="samples in the order in which they come, ranks and passes in the system's own order",
            make=lambda before: before,
        ),
    )


def _grouped(plan: Plan) -> list[tuple[str, int, int, frozenset[object]]]:
    return [(m.module, m.replica, m.index, frozenset(m.items)) for m in plan.microbatches]


def with_layouts(job: Job, change: Callable[[ModuleLayout], ModuleLayout]) -> Job:
    """The job with every layout changed."""
    return replace(job, layouts=tuple(change(layout) for layout in job.layouts))


def with_settings(job: Job, change: Callable[[ModuleSettings], ModuleSettings]) -> Job:
    """The job with every module's settings changed."""
    modules = tuple(change(job.settings.of(module.name)) for module in job.model.modules)
    return replace(job, settings=replace(job.settings, modules=modules))


def in_settings(has: str, gets: str, change: Callable[[ModuleSettings], ModuleSettings]) -> tuple[Change]:
    """One change, of every module's settings."""
    return (Change(has=has, gets=gets, make=lambda job: with_settings(job, change)),)


def with_schedule(job: Job, schedule: Schedule) -> Job:
    """The job under another schedule; where it has other stages, they are balanced anew."""
    if schedule.virtual_stages == job.schedule.virtual_stages:
        return replace(job, schedule=schedule)
    freed = with_layouts(job, lambda layout: replace(layout, stage_layers=()))
    return replace(freed, schedule=schedule)


def longest_tokens(plan: Plan) -> int:
    """Of all samples, in the language model."""
    return max(sample.num_tokens for sample in plan.batch)


def padded(job: Job) -> Job:
    """Every sample as long as the longest, by tokens of text."""
    longest = max(sample.num_tokens for sample in job.batch)
    return replace(job, batch=tuple(_lengthened(sample, longest) for sample in job.batch))


def _lengthened(sample: Sample, tokens: int) -> Sample:
    more = tokens - sample.num_tokens
    last = sample.of(TEXT)[-1] if sample.of(TEXT) else None
    if more == 0 or last is None:
        return sample
    longer = replace(last, tokens_in=last.tokens_in + more, tokens_out=last.tokens_out + more)
    return replace(sample, segments=tuple(longer if each is last else each for each in sample.segments))


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to a plan that a target can say.

    Args:
        words: what is done.
        job: from the plan's job, without layouts, to the one that is planned.
        strategy: that plans it; None: its layouts are complete, and planned as they are.
    """

    words: str
    strategy: str | None = None
    job: Callable[[Job], Job] = lambda job: job


def open_job(plan: Plan) -> Job:
    """The job of a plan with nothing said of its layouts; every strategy can plan it."""
    return Job(
        name=plan.model.name,
        model=plan.model,
        cluster=plan.cluster,
        batch=plan.batch,
        microbatch_samples=microbatch_samples(plan),
        replicas=1,
        settings=replace(plan.settings, modules=()),
    )


def llm_alone(job: Job) -> Job:
    """The language model without its other modules; their tokens become text."""
    llm = job.model.llm
    return replace(
        job,
        model=ModelGraph(name=job.model.name, modules=(llm,)),
        batch=tuple(_as_text(sample) for sample in job.batch),
    )


def _as_text(sample: Sample) -> Sample:
    return Sample(sample.id, (Segment(TEXT, 0, sample.num_tokens, sample.num_tokens),), sample.mask)


def nearest(
    plan: Plan, ways: Sequence[Way], refuses: Callable[[Plan], str | None], prices: Prices
) -> tuple[str, float] | None:
    """The fastest plan that a target can say, in words, and its seconds; None where no way leads to one."""
    found: list[tuple[float, str]] = []
    for way in ways:
        try:
            other = _planned_by(way, plan, prices.cost)
            if refuses(other) is None:
                found.append((prices.step_s(other), way.words))
        except ValueError:
            continue
    return (min(found)[1], min(found)[0]) if found else None


def _planned_by(way: Way, plan: Plan, cost: CostModel) -> Plan:
    job = way.job(open_job(plan))
    if way.strategy is None:
        return planned(job, cost)
    return BY_NAME[way.strategy].planner(job, cost, silent)


def all_sharded(job: Job) -> Job:
    """Every module whole on every rank, its weights sharded over all of them."""
    dp = max(
        n for n in range(1, job.cluster.num_ranks + 1) if len(job.batch) % (n * job.microbatch_samples) == 0
    )
    spread = replace(
        job, layouts=tuple(ModuleLayout(module=module.name, pp=1, dp=dp) for module in job.model.modules)
    )
    return with_settings(spread, lambda settings: replace(settings, sharding=Sharding.PARAMETERS))


LLM_ALONE = (
    Way(
        words="the language model alone, by strategy megatron-colocated",
        strategy="megatron-colocated",
        job=llm_alone,
    ),
    Way(
        words="the language model alone, its weights sharded over all ranks",
        job=lambda job: all_sharded(llm_alone(job)),
    ),
)
"""How systems of one language model can do what they can of a plan."""
