"""Layouts that need no step model: one grid for all modules, and pipelines of whole nodes."""

from collections.abc import Collection, Iterator, Sequence
from itertools import chain, product, zip_longest

from workbench.job.job import Job
from workbench.plan.plan import Recompute, Sharding
from workbench.planner.expert_choices import expert_choices, expert_counts
from workbench.planner.groupings import Grouping, differ
from workbench.planner.layout_choice import Degrees
from workbench.schedule.choice import Schedule, ScheduleKind, usual
from workbench.schedule.sharded import ReshardAfter
from workbench.search.joint.arrangement import Arrangement, Placement
from workbench.search.joint.grouping_moves import Regroup
from workbench.search.joint.layout_moves import Arrange, CutStages, Reschedule
from workbench.search.joint.move import Move
from workbench.search.joint.own_spaces import shared_grids
from workbench.search.joint.proposals import Moves
from workbench.search.joint.question import Question
from workbench.search.joint.setting_moves import Keep, Reshard, instance_counts

UNSHARDED = 2  # a grid's first plans, without sharded weights
LIKELY = 4  # plans on the smallest grid, and pipelines, that are tried before all others
PIECES = 8  # of each trained stage
SIZES = 2  # the largest microbatch sizes tried
SPLIT = sorted(
    (usual(kind) for kind in reversed(ScheduleKind) if kind.spec.splits_backward),
    key=lambda schedule: schedule.virtual_stages,  # virtual stages cannot be cut in pieces: last
)
ROUND_NODES = (usual(ScheduleKind.ZB_V), Schedule(kind=ScheduleKind.ZB_H1, virtual_stages=3))


def plain_layouts(job: Job, questions: Collection[Question]) -> Iterator[Moves]:
    """Answer every open question in a few plain, compatible ways.

    One grid: every module on every rank, without a pipeline, so that ranks only wait for collectives;
    weights sharded within nodes or across all ranks, or optimizer state alone. Unlike searched layouts,
    this needs no step model of the modules. Pipelines: each stage takes a whole node, so that gradients are
    reduced and experts exchange tokens inside nodes, and split backwards fill the pipeline's bubbles. Modules
    have nodes of their own, or all of them a stage on every node, so that no module waits for another whose
    samples are larger. If samples differ, microbatches and replicas are balanced.

    Complexity: O(grids x microbatch sizes + nodes x schedules x microbatch sizes) moves; none is priced.
    """
    if Question.LAYOUT not in questions:
        return
    first, *larger = (tuple(_on_grid(job, *grid, questions)) for grid in _grids(job))
    stages = tuple(_stages_of_nodes(job, questions))
    layouts = (
        *first[:LIKELY],
        *stages[:LIKELY],
        *first[LIKELY:],
        *chain.from_iterable(moves[:UNSHARDED] for moves in larger),
        *stages[LIKELY:],
        *chain.from_iterable(moves[UNSHARDED:] for moves in larger),
    )
    for regroup in _groupings(job, questions):
        yield from ((*moves, *regroup) for moves in layouts)


def _groupings(job: Job, questions: Collection[Question]) -> tuple[Moves, ...]:
    if Question.GROUPING not in questions or not differ(job.batch):
        return ((),)
    return tuple(
        (Regroup(grouping),) for grouping in (Grouping.EVEN_MODULES, Grouping.EVEN, Grouping.EVEN_REPLICAS)
    )


def _grids(job: Job) -> list[tuple[int, int]]:
    """The (tp, cp) that all modules support, fewest ranks first, then most tp."""
    return sorted(shared_grids(job), key=lambda grid: (grid[0] * grid[1], -grid[0]))


def _on_grid(job: Job, tp: int, cp: int, questions: Collection[Question]) -> Iterator[Moves]:
    """As many replicas as fit on the ranks; the largest microbatches first."""
    dp = job.usable_ranks // (tp * cp)
    if dp == 0:
        return
    degrees = tuple(Degrees(module=module.name, tp=tp, cp=cp, dp=dp) for module in job.model.modules)
    arrangement = Arrangement(placement=Placement.FIRST_STAGE, degrees=degrees)
    for size in _sizes(job, dp, 1, questions):
        for memory_moves in _memory_options(job, tp, cp, dp, questions):
            yield (*_with_1f1b(questions), *memory_moves, Arrange(arrangement, size), *_cut(questions))


def _memory_options(job: Job, tp: int, cp: int, dp: int, questions: Collection[Question]) -> Iterator[Moves]:
    """Shard the weights of some modules and the optimizer state of the others.

    First state alone, then nothing; then weights of the trained modules, whose gradients are reduced beside
    the backward layer by layer; then of single modules, small ones first, to save memory; then of all.
    """
    if Question.MEMORY not in questions:
        yield ()
        return
    state = _keep(None, Sharding.OPTIMIZER, tp=tp)
    yield (state,)
    yield (_keep(None, Sharding.NONE, tp=tp),)
    counts = instance_counts(dp, cp) if tp == 1 else ()
    nodes = job.usable_ranks // _ranks_per_node(job)
    within_nodes = [count for count in (nodes, 1) if count in counts]
    pairs = [count for count in counts[:1] if count not in within_nodes]
    by_size = sorted(job.model.modules, key=lambda module: module.num_parameters)
    names = tuple(module.name for module in by_size)
    trained = tuple(
        module.name
        for module in by_size
        if module.layers[0].trainable or any(layer.has_adapters for layer in module.layers)
    )
    options = [
        *product([trained] * bool(trained), (*within_nodes, *pairs)),
        *product(((name,) for name in names), pairs or within_nodes[:1]),
        *product([names], (*within_nodes, *pairs)),
    ]
    for modules, count in dict.fromkeys(options):
        sharded = (state, *(_keep(module, Sharding.PARAMETERS, count) for module in modules))
        yield sharded
        yield *sharded, Reshard(None, ReshardAfter.STEP)


def _keep(module: str | None, sharding: Sharding, instances: int = 1, *, tp: int = 1) -> Move:
    """Memory settings without recomputation; tensor-parallel ranks use sequence parallelism."""
    return Keep(module, Recompute.NONE, sharding, instances, sequence_parallel=tp > 1)


def _stages_of_nodes(job: Job, questions: Collection[Question]) -> Iterator[Moves]:
    """Pipelines of whole nodes: all modules on all of them, in turn with each module on nodes of its own."""
    ranks_per_node = _ranks_per_node(job)
    nodes = job.usable_ranks // ranks_per_node
    if ranks_per_node < 2 or nodes < 2 or Question.ORDER not in questions:
        return
    modules = job.model.modules
    depths = _shares(len(modules), nodes) if len(modules) <= 2 else ()
    own = [Arrangement(placement=Placement.ISLANDS, degrees=_on_nodes(job, pps)) for pps in depths]
    shared = []
    if len(modules) > 1 and min(len(module.layers) for module in modules) >= nodes:
        degrees = _on_nodes(job, [nodes] * len(modules))
        shared.append(Arrangement(placement=Placement.EVERYWHERE, degrees=degrees))
    on_all = _pipelines(job, nodes, shared, ROUND_NODES, questions)
    in_turn = zip_longest(on_all, _pipelines(job, nodes, own, SPLIT, questions))
    yield from (moves for moves in chain.from_iterable(in_turn) if moves is not None)


def _on_nodes(job: Job, depths: Sequence[int]) -> tuple[Degrees, ...]:
    """Modules in stages of a node each, with a replica on every rank, among which experts are distributed."""
    ranks_per_node = _ranks_per_node(job)
    ep = max(expert_choices(expert_counts(job.model.llm), ranks_per_node))
    return tuple(
        Degrees(
            module=module.name,
            pp=pp,
            dp=ranks_per_node // ep,
            ep=ep if module.name == job.model.llm.name else 1,
            joint_replicas=ep,
        )
        for module, pp in zip(job.model.modules, depths, strict=True)
    )


def _pipelines(
    job: Job,
    nodes: int,
    arrangements: Sequence[Arrangement],
    schedules: Sequence[Schedule],
    questions: Collection[Question],
) -> Iterator[Moves]:
    """Each arrangement with the largest microbatches, under each schedule.

    At least as many microbatches per replica as stages; at least one if experts are distributed, as passes
    that read so many weights take hardly longer for more samples.
    """
    memory_moves = (_keep(None, Sharding.OPTIMIZER),) if Question.MEMORY in questions else ()
    for arrangement in arrangements:
        llm = arrangement.of(job.model.llm.name)
        sizes = _sizes(job, llm.num_replicas, nodes if llm.ep == 1 else 1, questions)
        for size, schedule in product(sizes, schedules):
            yield (
                *memory_moves,
                *_with_1f1b(questions),
                Arrange(arrangement, None if size is None else size * llm.joint_replicas),
                Reschedule(schedule),
                *(_cut(questions) if schedule.virtual_stages == 1 else ()),
            )


def _shares(num_modules: int, nodes: int) -> Sequence[tuple[int, ...]]:
    """Stages of every module, nearest to equal shares first."""
    if num_modules == 1:
        return [(nodes,)]
    return sorted(((nodes - pp, pp) for pp in range(1, nodes)), key=lambda counts: (max(counts), counts))


def _cut(questions: Collection[Question]) -> Moves:
    return (CutStages(PIECES),) if Question.ORDER in questions else ()


def _with_1f1b(questions: Collection[Question]) -> Moves:
    """Set the schedule that works for any grid, in place of one for the choice's current stages."""
    return (Reschedule(usual(ScheduleKind.ONE_F_ONE_B)),) if Question.ORDER in questions else ()


def _sizes(job: Job, dp: int, stages: int, questions: Collection[Question]) -> Sequence[int | None]:
    """Samples per microbatch, most first, with at least as many microbatches per replica as stages."""
    share = len(job.batch) // dp if dp and len(job.batch) % dp == 0 else 0
    sizes = [size for size in range(share // stages, 0, -1) if share % size == 0]
    if Question.GROUPING not in questions:
        return [None] * bool(sizes)
    return sizes[:SIZES]


def _ranks_per_node(job: Job) -> int:
    return min(node.num_ranks for node in job.cluster.nodes)
