"""DistTrain: ranks and degrees of every module by a formula, modules on ranks of their own.

Source: Z. Zhang et al., "DistTrain", sections 4.1 to 4.3: parallelism units, the formulation, adaptive
orchestration; section 8: modules on different kinds of GPUs. Its reordering of samples is in `reordered`.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from workbench.balance.orchestration.cheapest import dollars_per_sample, orchestrate_cheapest
from workbench.balance.orchestration.depth import orchestrate_in_flight
from workbench.balance.orchestration.exact import orchestrate
from workbench.balance.orchestration.task import Cut, Orchestration, Task, Unit
from workbench.balance.orchestration.task import Pool as GpuPool
from workbench.cost.model import CostModel
from workbench.float_sum import float_sum
from workbench.job.device_pools import Pool, placements, pool_cluster
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.model.model_graph import Module
from workbench.plan.plan import Plan, Sharding
from workbench.planner.assembly import check_apart, lowered_that_fits
from workbench.planner.expert_choices import fastest_degree, with_fastest_degrees
from workbench.planner.layout_choice import on_tensor_ranks
from workbench.planner.module_price import ModulePrices
from workbench.planner.stage_counts import PlannerStopped, Progress
from workbench.planner.strategy_spec import PLAIN_OR_INTERLEAVED, Chooser, First, OwnSpace, StrategySpec
from workbench.strategies import megatron_heterogeneous

NAME = "disttrain"
CHEAPEST = "disttrain-cheapest"
TP_SIZES = (1, 2, 4, 8)

ROOM = (1.0, 0.9, 0.8, 0.7, 0.6)  # shares of a GPU's memory available to what the formula counts

Score = tuple[float, float]  # of an orchestration; less is better


def shortlist(job: Job, cost: CostModel, progress: Progress, most: int) -> tuple[Plan, ...]:
    """The fastest degrees by the formula, on the fewest ranks that achieve them, then balanced stages.

    If the job has device pools, every assignment of modules to pools that take them is tried. Differs: the
    integers are the formula's exact optimum, where the source rounds a convex program's; stages consist of
    whole layers; microbatches on their way to later units count, see `orchestrate_in_flight`; wider groups
    come first, so that none spans nodes; layouts of the job are ignored; experts are cut or distributed,
    whichever is faster at a tp.

    As the source's, the formula leaves out the optimizer's step, AdamW's and Muon's, but counts its state.
    Differs: where several plans are wanted, those follow that it finds with it, one unit after the other.

    Raises:
        ValueError: nothing fits, or a batch that the degrees found cannot split.
    """
    built = _fitting(job, cost, progress, orchestrate, lambda _, o: (o.iteration_s, o.num_gpus), most)
    return tuple(replace(plan, strategy=NAME) for plan in built)


plan = First(shortlist)


def shortlist_cheapest(job: Job, cost: CostModel, progress: Progress, most: int) -> tuple[Plan, ...]:
    """As `shortlist`, for dollars per sample, on pools whose ranks have a price.

    Raises:
        ValueError: as `plan`, or a pool without dollars_per_hour.
    """
    if not job.pools or any(pool.dollars_per_hour is None for pool in job.pools):
        raise ValueError(f"{CHEAPEST}: job {job.name!r} wants cluster.pools, each with dollars_per_hour")
    built = _fitting(
        job,
        cost,
        progress,
        orchestrate_cheapest,
        lambda task, orchestration: (dollars_per_sample(task, orchestration), orchestration.iteration_s),
        most,
    )
    return tuple(replace(plan, strategy=CHEAPEST) for plan in built)


plan_cheapest = First(shortlist_cheapest)


def _fitting(
    job: Job,
    cost: CostModel,
    progress: Progress,
    search: Callable[[Task], Orchestration],
    score: Callable[[Task, Orchestration], Score],
    most: int,
) -> tuple[Plan, ...]:
    """Plans by the formula; where several are wanted, then those that it finds with the optimizer's step."""
    check_apart(job, "disttrain")
    placed = partial(best_placed, job, cost, search, score)
    plans = _by_formula(placed, cost, progress, most)
    if most > 1:
        with suppress(ValueError, PlannerStopped):  # there are plans to hand over
            more = _by_formula(partial(placed, counts_updates=True), cost, progress, most)
            plans += tuple(plan for plan in more if plan not in plans)
    return plans


def _by_formula(
    placed: Callable[[float], Job], cost: CostModel, progress: Progress, most: int
) -> tuple[Plan, ...]:
    """Plans of the best placement, with less and less memory for what the formula counts, until `most` fit.

    The formula ignores working memory and uneven layers; the plan's memory account includes them.

    Args:
        placed: the job with layouts within a share of every GPU's memory.
    """
    refusal = ""
    plans: list[Plan] = []
    for share in ROOM:
        try:
            candidate = megatron_heterogeneous.plan(placed(share), cost, progress)
        except ValueError:
            if plans:
                break
            raise
        try:
            lowered_that_fits(candidate)
        except ValueError as error:
            refusal = str(error)
            continue
        if candidate not in plans:
            plans.append(candidate)
        if len(plans) == most:
            break
    if not plans:
        raise ValueError(refusal)
    return tuple(plans)


def best_placed(
    job: Job,
    cost: CostModel,
    search: Callable[[Task], Orchestration],
    score: Callable[[Task, Orchestration], Score],
    memory_share: float = 1.0,
    *,
    counts_updates: bool = False,
) -> Job:
    """The job with the layouts of the best placement's orchestration; ties keep the earlier placement.

    Args:
        memory_share: share of every GPU's memory available to what the formula counts.
        counts_updates: whether the formula counts the optimizer's step, which the source's does not.

    Raises:
        ValueError: no placement fits, with the last one's reason.
    """
    best: tuple[Score, Orchestration, tuple[Pool, ...]] | None = None
    refusal = ""
    for task, pools in placed_tasks(job, cost, counts_updates=counts_updates):
        try:
            orchestration = orchestrate_in_flight(_with_memory(task, memory_share), search)
        except ValueError as error:
            refusal = str(error)
            continue
        if best is None or score(task, orchestration) < best[0]:
            best = score(task, orchestration), orchestration, pools
    if best is None:
        raise ValueError(refusal)
    return with_fastest_degrees(with_degrees(job, *best[1:]), cost)


def placed_tasks(
    job: Job, cost: CostModel, *, counts_updates: bool = False
) -> tuple[tuple[Task, tuple[Pool, ...]], ...]:
    """The formula's task for every assignment of modules, in the model's order, to pools that take them.

    Args:
        counts_updates: as in `best_placed`.
    """
    if not job.pools:
        return ((task_of(job, cost, counts_updates=counts_updates), ()),)
    modules = job.model.modules
    units: dict[tuple[str, str], Unit] = {}
    for pool in job.pools:
        pool_job = replace(job, cluster=pool_cluster(job.cluster, pool), pools=(), layouts=(), max_ranks=None)
        prices = ModulePrices(pool_job, cost.on(pool.device))
        for module in filter(lambda module: pool.takes(module.name), modules):
            unit = _unit(pool_job, prices, module, counts_updates=counts_updates)
            units[pool.name, module.name] = replace(unit, pool=pool.name)
    gpus = tuple(_gpus(job, pool) for pool in job.pools)
    tasks = []
    for module_pools in placements(job.pools, [module.name for module in modules]):
        placed = tuple(
            units[pool.name, module.name] for module, pool in zip(modules, module_pools, strict=True)
        )
        tasks.append((_task(job, placed, gpus), module_pools))
    return tuple(tasks)


def _with_memory(task: Task, share: float) -> Task:
    pools = tuple(replace(pool, gpu_bytes=pool.gpu_bytes * share) for pool in task.pools)
    return replace(task, gpu_bytes=task.gpu_bytes * share, pools=pools)


def task_of(job: Job, cost: CostModel, *, counts_updates: bool = False) -> Task:
    """The job in the formula's terms: mean seconds and bytes of a sample, by module.

    Args:
        counts_updates: as in `best_placed`.
    """
    prices = ModulePrices(job, cost)
    units = (_unit(job, prices, module, counts_updates=counts_updates) for module in job.model.modules)
    return _task(job, tuple(units))


def with_degrees(job: Job, orchestration: Orchestration, module_pools: Sequence[Pool] = ()) -> Job:
    """The job with the layout of every module, consecutive in its pool, wider groups first.

    Widths are powers of two, so a group that starts after wider ones stays within a node.
    """
    pools = [(pool.name, pool.first_rank) for pool in module_pools] or [("", 0)] * len(orchestration.degrees)
    free = dict(pools)
    offsets = [0] * len(orchestration.degrees)
    for index in sorted(range(len(offsets)), key=lambda index: (-orchestration.degrees[index].tp, index)):
        name, _ = pools[index]
        offsets[index] = free[name]
        free[name] += orchestration.degrees[index].num_gpus
    layouts = tuple(
        ModuleLayout(module=module.name, tp=degrees.tp, pp=degrees.pp, dp=degrees.dp, rank_offset=offset)
        for module, degrees, offset in zip(job.model.modules, orchestration.degrees, offsets, strict=True)
    )
    return replace(job, layouts=layouts)


def _gpus(job: Job, pool: Pool) -> GpuPool:
    cluster = pool_cluster(job.cluster, pool)
    return GpuPool(
        name=pool.name,
        num_gpus=pool.num_ranks,
        gpu_bytes=float(cluster.nodes[0].memory_bytes),
        gpu_bytes_per_s=cluster.rank_bytes_per_s,
        dollars_per_hour=pool.dollars_per_hour or 0.0,
    )


def _task(job: Job, units: tuple[Unit, ...], pools: tuple[GpuPool, ...] = ()) -> Task:
    llm = job.model.llm
    return Task(
        units=units,
        pacing=llm.name,
        batch_samples=len(job.batch),
        microbatch_samples=job.microbatch_samples,
        num_gpus=sum(pool.num_gpus for pool in pools) if pools else job.usable_ranks,
        gpu_bytes=float(job.cluster.nodes[0].memory_bytes),
        virtual_stages=job.schedule.virtual_stages,
        gpu_bytes_per_s=job.cluster.rank_bytes_per_s,
        cut=Cut.LAYERS,
        pools=pools,
    )


def _unit(job: Job, prices: ModulePrices, module: Module, *, counts_updates: bool) -> Unit:
    settings = job.settings.of(module.name)
    widest = min(node.num_ranks for node in job.cluster.nodes)
    sample_s: list[tuple[int, float]] = []
    update_s: list[tuple[int, float]] = []
    for tp in TP_SIZES:
        if tp > widest or any(count % tp for count in module.kv_heads):
            break
        choice = on_tensor_ranks(settings, tp)
        choice = replace(choice, ep=fastest_degree(prices, choice))
        layers = prices.layers(choice, 1)
        sample_s.append((tp, float_sum(layer.forward_s + layer.backward_s for layer in layers)))
        if counts_updates:
            update_s.append((tp, prices.step_s(choice)))
    alone, size = on_tensor_ranks(settings), prices.size
    whole = prices.total(alone, 1)
    held = whole.held
    optimizer_bytes = held.trained * size.optimizer - prices.saved_bytes(alone, held.matrices)
    sharded_bytes = optimizer_bytes if settings.sharding is Sharding.OPTIMIZER else 0.0
    return Unit(
        name=module.name,
        sample_s=tuple(sample_s),
        num_layers=len(module.stage_starts),
        weight_bytes=held.weights * size.weight
        + held.trained * size.gradient
        + (optimizer_bytes - sharded_bytes),
        optimizer_bytes=sharded_bytes,
        activation_bytes=whole.kept_bytes,
        reduction_bytes=held.trained * (size.gradient + size.weight),
        update_s=tuple(update_s),
    )


SPEC = StrategySpec(
    name=NAME,
    planner=plan,
    shortlist=shortlist,
    searches_layouts=True,
    summary="DistTrain: degrees of every module by its formula, solved exactly",
    own_space=OwnSpace(
        degrees=Chooser.ITSELF, where="DistTrain, section 4", schedules=PLAIN_OR_INTERLEAVED, effort=2.0
    ),
)

SPEC_CHEAPEST = StrategySpec(
    name=CHEAPEST,
    planner=plan_cheapest,
    shortlist=shortlist_cheapest,
    searches_layouts=True,
    summary="as disttrain, but minimizes dollars per sample on priced devices",
    wants_prices=True,
    own_space=OwnSpace(
        degrees=Chooser.ITSELF,
        where="DistTrain, sections 4 and 8",
        schedules=PLAIN_OR_INTERLEAVED,
        effort=2.0,
    ),
)
