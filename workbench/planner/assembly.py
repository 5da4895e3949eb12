"""Builds a plan from stage boundaries: numbers stages, assigns ranks and batches samples."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise

from workbench.balance.stages.partition import partition
from workbench.cost.model import CostModel
from workbench.float_sum import float_sum
from workbench.job.device_pools import check_taken
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.memory.account import check_memory, memory_table
from workbench.model.model_graph import TEXT
from workbench.plan.build import with_programs
from workbench.plan.check import check_draft
from workbench.plan.key_exchange import check_key_exchange
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.plan.microbatches import batched_microbatches, shared_microbatches
from workbench.plan.parameter_shards import in_units
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage
from workbench.planner.block_cuts import Cuts, even_blocks
from workbench.schedule.choice import Schedule, ScheduleKind, rank_block, usual_in_phases
from workbench.timing.price import pass_prices

SHARING = "; or a strategy whose modules share ranks: megatron-colocated, encoders-colocated"


def layout_of(job: Job, module: str) -> ModuleLayout:
    """The job's layout of a module; tp = cp = ep = 1 and a searched stage count by default."""
    for layout in job.layouts:
        if layout.module == module:
            return layout
    return ModuleLayout(module=module, joint_replicas=job.joint_replicas)


def dp_of(job: Job, module: str) -> int:
    """The number of replicas of a module: its layout's, or the job's."""
    return layout_of(job, module).dp or job.replicas


def check_apart(job: Job, where: str) -> None:
    """Raise ValueError for joint replicas of the job where layouts are searched or have none."""
    if job.joint_replicas > 1:
        raise ValueError(
            f"{where}: layouts are searched, and a given one of {job.model.llm.name!r} must have ep within "
            f"tp x cp, got {job.joint_replicas} joint replicas; nearest: none given, or strategy "
            "megatron-heterogeneous or megatron-homogeneous"
        )


def draft_plan(job: Job, strategy: str) -> Plan:
    """A plan without stages or programs; its microbatches are the same samples in every module.

    Raises:
        ValueError: a batch that does not divide, or a layout with its own replicas or rank offset.
    """
    for layout in job.layouts:
        if layout.rank_offset is not None or dp_of(job, layout.module) != job.replicas:
            value = f"dp {layout.dp}" if layout.rank_offset is None else f"rank_offset {layout.rank_offset}"
            raise ValueError(
                f"{strategy}: all modules have {job.replicas} replicas, placed in order, but the layout of "
                f"{layout.module!r} has {value}; strategy megatron-heterogeneous takes it"
            )
    empty = empty_draft(job, strategy)
    microbatches = batched_microbatches(
        empty, samples_per_microbatch=job.microbatch_samples, replicas=range(job.replicas)
    )
    return replace(empty, microbatches=microbatches)


def shared_draft(job: Job, strategy: str) -> Plan:
    """A plan without stages or programs; every module splits the batch among its own replicas.

    A window of the schedule, where it has windows, is one microbatch of each encoder replica.

    Raises:
        ValueError: as `shared_microbatches`.
    """
    empty = empty_draft(job, strategy)
    microbatches = shared_microbatches(
        empty,
        samples_per_microbatch=job.microbatch_samples,
        dp={module.name: dp_of(job, module.name) for module in job.model.modules},
        rounds=job.schedule.window if job.schedule.spec.takes("window") else 1,
    )
    return replace(empty, microbatches=microbatches)


def empty_draft(job: Job, strategy: str) -> Plan:
    """The job as a plan without stages, microbatches or programs."""
    return Plan(
        strategy=strategy,
        model=job.model,
        cluster=job.cluster,
        batch=job.batch,
        stages=(),
        microbatches=(),
        programs=(),
        settings=job.settings,
    )


def in_phases(job: Job, strategy: str) -> Job:
    """The job with a phased schedule, for modules that share ranks but have grids of their own.

    The default schedule, 1F1B, is replaced by the first phased one.

    Raises:
        ValueError: the job asks for another schedule that is not phased.
    """
    if job.schedule.spec.shares_ranks_in_part:
        return job
    nearest = usual_in_phases()
    if job.schedule.kind is not Schedule().kind:
        raise ValueError(
            f"{strategy}: modules run in phases, with 1F1B in the second, got schedule {job.schedule.kind}; "
            f"nearest: {nearest.kind}"
        )
    return replace(job, schedule=nearest)


def num_microbatches(draft: Plan, module: str) -> int:
    """Microbatches of the module's replica that has the most."""
    return max((len(m) for (name, _), m in draft.microbatches_of.items() if name == module), default=0)


@cache
def _partition(cost_s: tuple[float, ...], num_stages: int) -> Cuts:
    return partition(cost_s, num_stages)


def cut(cost_s: tuple[float, ...], num_stages: int, module: str) -> Cuts:
    """Balanced stages of one module; ValueError, which names the module, for an impossible count."""
    try:
        return _partition(cost_s, num_stages)
    except ValueError as error:
        raise ValueError(f"module {module!r}: {error}") from None


def blocks_cut(job: Job, cost_s: tuple[float, ...], num_blocks: int, module: str) -> Cuts:
    """Balanced stages of one module on `num_blocks` blocks of ranks.

    Where a block holds several stages, their sums are balanced. No stage begins with a layer that reads keys
    that an earlier one chose.
    """
    virtual = virtual_stages(job, module)
    if given := layout_of(job, module).stage_layers:
        return tuple(pairwise(accumulate(given, initial=0)))
    bounds = (*job.model.module(module).stage_starts, len(cost_s))
    group_s = tuple([float_sum(cost_s[first:last]) for first, last in pairwise(bounds)])
    cuts = cut(group_s, num_blocks * virtual, module)
    if virtual > 1:
        cuts = even_blocks(group_s, cuts, lambda index: rank_block(job.schedule, index, len(cuts)))
    return tuple([(bounds[first], bounds[last]) for first, last in cuts])


def bottleneck_s(cost_s: Sequence[float], cuts: Cuts, schedule: Schedule, virtual: int) -> float:
    """Seconds of the slowest block of ranks; each holds `virtual` of the stages."""
    blocks: dict[int, float] = {}
    for index, (first, last) in enumerate(cuts):
        block = rank_block(schedule, index, len(cuts)) if virtual > 1 else index
        blocks[block] = blocks.get(block, 0.0) + float_sum(cost_s[first:last])
    return max(blocks.values())


def grid(first_rank: int, layout: ModuleLayout) -> tuple[tuple[int, ...], ...]:
    """Consecutive ranks as a grid of rows of tp ranks."""
    starts = range(first_rank, first_rank + layout.stage_ranks, layout.tp)
    return tuple(tuple(range(start, start + layout.tp)) for start in starts)


def virtual_stages(job: Job, module: str) -> int:
    """Stages of the module on each of its ranks: the schedule's for the LLM, one for the others."""
    return job.schedule.virtual_stages if job.model.module(module).modality == TEXT else 1


def module_stages(
    job: Job,
    module: str,
    cuts: Cuts,
    *,
    replica: int,
    first_id: int,
    first_rank: int,
    blocks_apart: int = 1,
) -> tuple[Stage, ...]:
    """The stages of one replica on blocks of ranks; of the LLM as its schedule lays them out.

    Consecutive stages take adjacent blocks, or blocks whose starts are `blocks_apart` blocks apart.

    Raises:
        ValueError: a block in a pool that does not take the module.
    """
    layout = layout_of(job, module)
    size = layout.stage_ranks * blocks_apart
    is_virtual = virtual_stages(job, module) > 1
    stages = []
    for index, layers in enumerate(cuts):
        block = rank_block(job.schedule, index, len(cuts)) if is_virtual else index
        ranks = grid(first_rank + block * size, layout)
        check_taken(job.pools, module, [rank for row in ranks for rank in row])
        stages.append(
            Stage(
                id=first_id + index,
                module=module,
                replica=replica,
                layers=layers,
                ranks=ranks,
                ep=layout.ep,
                joint_replicas=layout.joint_replicas,
            )
        )
    return tuple(stages)


def num_ranks(stages: Sequence[Stage]) -> int:
    """The number of distinct ranks of the stages."""
    return len({rank for stage in stages for rank in stage.flat_ranks})


def disjoint_stages(job: Job, cuts: Mapping[str, Cuts], colocated: Collection[str] = ()) -> tuple[Stage, ...]:
    """Stages with every module on its own ranks, in the model's order, one replica after the other.

    Args:
        colocated: modules that all begin on a replica's first rank, instead.

    Raises:
        ValueError: more ranks than the job may use, or a block in a pool that does not take the module.
    """
    stages: list[Stage] = []
    first_rank = 0
    for replica in range(job.replicas):
        base = first_rank
        for module in job.model.modules:
            rank = base if module.name in colocated else first_rank
            chain = module_stages(
                job, module.name, cuts[module.name], replica=replica, first_id=len(stages), first_rank=rank
            )
            stages += chain
            first_rank = max(first_rank, rank + num_ranks(chain))
    if first_rank > job.usable_ranks:
        check_ranks(job, first_rank, () if colocated else _ranks_by_module(stages))
    return tuple(stages)


def _ranks_by_module(stages: Sequence[Stage]) -> tuple[int, ...]:
    names = dict.fromkeys(stage.module for stage in stages)
    return tuple(num_ranks([stage for stage in stages if stage.module == name]) for name in names)


def check_ranks(job: Job, num_ranks: int, apart: Sequence[int] = ()) -> None:
    """Raise ValueError for a layout that needs more ranks than the job may use.

    Args:
        apart: ranks of every module, where none shares them with another.
    """
    if num_ranks <= job.usable_ranks:
        return
    could_share = len(apart) > 1 and max(apart) <= job.usable_ranks
    raise ValueError(
        f"the layout needs {num_ranks} ranks, job {job.name!r} may use {job.usable_ranks}; nearest: "
        f"degrees whose product is smaller, or a cluster and max_ranks of {num_ranks}"
        f"{SHARING if could_share else ''}"
    )


def scheduled(draft: Plan, schedule: Schedule, cost: CostModel) -> Plan:
    """The draft with programs; schedules that order passes by duration use the cost model's durations.

    Under 1F1B with `run_ahead`, frozen encoders run as far ahead as the schedule and memory allow.
    Stages whose weights are sharded become stages of one layer each.

    Raises:
        ValueError: as `with_programs`, and where orders are chosen by durations, as `check_key_exchange`.
    """
    draft = in_units(draft)
    if schedule.run_ahead and schedule.kind is ScheduleKind.ONE_F_ONE_B:
        return _furthest_ahead(draft, schedule)
    if not schedule.spec.splits_backward:
        return with_programs(draft, schedule)
    check_draft(draft)  # a price is of what can be
    check_key_exchange(draft)
    return with_programs(draft, schedule, pass_prices(draft, cost).duration_s)


def _furthest_ahead(draft: Plan, schedule: Schedule) -> Plan:
    """The plan with the most run-ahead that fits in memory, by bisection: memory grows with run-ahead."""

    def ahead(num: int) -> Plan:
        return with_programs(draft, replace(schedule, run_ahead=num))

    plan = with_programs(draft, schedule)
    return plan if fits(plan) else ahead(most_that_fits(ahead, schedule.run_ahead))


def most_that_fits(plan_of: Callable[[int], Plan], too_many: int) -> int:
    """The largest number below `too_many` whose plan fits, by bisection; 0 is not tried.

    Complexity: O(log too_many) plans.
    """
    fitting = 0
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if fits(plan_of(middle)):
            fitting = middle
        else:
            too_many = middle
    return fitting


def lowered_that_fits(plan: Plan) -> Lowered:
    """The lowered plan; ValueError where a rank lacks the memory for it."""
    lowered = lower(plan)
    check_memory(lowered, memory_table(lowered))
    return lowered


def fits(plan: Plan) -> bool:
    """Whether the plan is sound and fits in the memory of every rank."""
    try:
        lowered_that_fits(plan)
    except ValueError:
        return False
    return True
