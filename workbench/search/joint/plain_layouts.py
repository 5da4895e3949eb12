"""Layouts that need no step model: one grid for all modules, and pipelines of whole nodes."""

from collections.abc import Collection, Iterator, Sequence
from itertools import chain, product

from workbench.job.job import Job
from workbench.plan.plan import Recompute, Sharding
from workbench.planner.groupings import Grouping, differ
from workbench.planner.layout_choice import Degrees
from workbench.planner.layout_search import usable_ranks
from workbench.schedule.choice import ScheduleKind, usual
from workbench.search.joint.arrangement import Arrangement, Placement
from workbench.search.joint.grouping_moves import Regroup
from workbench.search.joint.layout_moves import Arrange, CutStages, Reschedule
from workbench.search.joint.move import Move
from workbench.search.joint.own_spaces import shared_grids
from workbench.search.joint.proposals import Moves
from workbench.search.joint.question import Question
from workbench.search.joint.setting_moves import Keep, instance_counts

UNSHARDED = 2  # of a grid's plans, without sharded weights: the first
LIKELY = 4  # of those on the smallest grid, and of pipelines: tried ahead of all others
PIECES = 8  # of stages that train
SIZES = 2  # of microbatches, the largest that there are
SPLIT = sorted(
    (usual(kind) for kind in reversed(ScheduleKind) if kind.spec.splits_backward),
    key=lambda schedule: schedule.virtual_stages,  # of several a cut has no pieces, so they come last
)


def plain_layouts(job: Job, questions: Collection[Question]) -> Iterator[Moves]:
    """Every question that is open answered in a few plain ways, those together that go together.

    One grid: every module on every rank, without a pipeline, so that nothing stands still but for
    exchanges; weights sharded within nodes or among all ranks, or optimizer state alone. No strategy's step
    model has to know the modules, as those of searched layouts do. Pipelines: a stage takes a
    whole node, so that sums of gradients stay inside nodes, and split backwards fill what the pipeline
    leaves idle. Where samples differ, microbatches and replicas are of even work.

    Complexity: O(grids x microbatch sizes + nodes x schedules x microbatch sizes) moves; none is priced.
    """
    if Question.LAYOUT not in questions:
        return
    first, *larger = (tuple(_on_grid(job, *grid, questions)) for grid in _grids(job))
    stages = tuple(_stages_of_nodes(job, questions))
    found = (
        *first[:LIKELY],
        *stages[:LIKELY],
        *first[LIKELY:],
        *chain.from_iterable(moves[:UNSHARDED] for moves in larger),
        *stages[LIKELY:],
        *chain.from_iterable(moves[UNSHARDED:] for moves in larger),
    )
    for way in _groupings(job, questions):
        yield from ((*moves, *way) for moves in found)


def _groupings(job: Job, questions: Collection[Question]) -> tuple[Moves, ...]:
    if Question.GROUPING not in questions or not differ(job.batch):
        return ((),)
    return tuple((Regroup(way),) for way in (Grouping.EVEN_COUNTS, Grouping.EVEN, Grouping.EVEN_REPLICAS))


def _grids(job: Job) -> list[tuple[int, int]]:
    """tp and cp that all modules take, on fewest ranks first, and of as many with most tp."""
    return sorted(shared_grids(job), key=lambda grid: (grid[0] * grid[1], -grid[0]))


def _on_grid(job: Job, tp: int, cp: int, questions: Collection[Question]) -> Iterator[Moves]:
    """As many replicas as go on the ranks; the largest microbatches first."""
    dp = usable_ranks(job) // (tp * cp)
    if dp == 0:
        return
    degrees = tuple(Degrees(module=module.name, tp=tp, cp=cp, dp=dp) for module in job.model.modules)
    arrangement = Arrangement(placement=Placement.FIRST_STAGE, degrees=degrees)
    for size in _sizes(job, dp, 1, questions):
        for kept in _sharded(job, tp, cp, dp, questions):
            yield (*_in_turn(questions), *kept, Arrange(arrangement, size), *_cut(questions))


def _sharded(job: Job, tp: int, cp: int, dp: int, questions: Collection[Question]) -> Iterator[Moves]:
    """Weights of some modules sharded, optimizer state of the others.

    First state alone, then nothing; then weights of the modules that train, whose sums of gradients go
    beside the backward layer by layer; then of single modules, small ones first, for memory; then of all.
    """
    if Question.MEMORY not in questions:
        yield ()
        return
    state = _kept(None, Sharding.OPTIMIZER, tp=tp)
    yield (state,)
    yield (_kept(None, Sharding.NONE, tp=tp),)
    counts = instance_counts(dp, cp) if tp == 1 else ()
    nodes = usable_ranks(job) // _node(job)
    inside = [count for count in (nodes, 1) if count in counts]
    pairs = [count for count in counts[:1] if count not in inside]
    by_size = sorted(job.model.modules, key=lambda module: module.num_parameters)
    names = tuple(module.name for module in by_size)
    trained = tuple(module.name for module in by_size if module.layers[0].trainable)
    ways = [
        *product([trained] * bool(trained), (*inside, *pairs)),
        *product(((name,) for name in names), pairs or inside[:1]),
        *product([names], (*inside, *pairs)),
    ]
    for modules, count in dict.fromkeys(ways):
        yield state, *(_kept(module, Sharding.PARAMETERS, count) for module in modules)


def _kept(module: str | None, sharding: Sharding, instances: int = 1, *, tp: int = 1) -> Move:
    """Nothing computed again; tensor-parallel ranks divide the tokens between their collectives."""
    return Keep(module, Recompute.NONE, sharding, instances, sequence_parallel=tp > 1)


def _stages_of_nodes(job: Job, questions: Collection[Question]) -> Iterator[Moves]:
    """Of every number of nodes for each module; modules on nodes of their own, one behind the other."""
    node = _node(job)
    nodes = usable_ranks(job) // node
    modules = job.model.modules
    if node < 2 or nodes < 2 or len(modules) > 2 or Question.ORDER not in questions:
        return
    kept = (_kept(None, Sharding.OPTIMIZER),) if Question.MEMORY in questions else ()
    for counts in _shares(len(modules), nodes):
        degrees = tuple(
            Degrees(module=module.name, pp=pp, dp=node) for module, pp in zip(modules, counts, strict=True)
        )
        arrangement = Arrangement(placement=Placement.ISLANDS, degrees=degrees)
        for size, schedule in product(_sizes(job, node, nodes, questions), SPLIT):
            yield (
                *kept,
                *_in_turn(questions),
                Arrange(arrangement, size),
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


def _in_turn(questions: Collection[Question]) -> Moves:
    """The schedule that is for any grid, in place of one for stages that the choice has now."""
    return (Reschedule(usual(ScheduleKind.ONE_F_ONE_B)),) if Question.ORDER in questions else ()


def _sizes(job: Job, dp: int, stages: int, questions: Collection[Question]) -> Sequence[int | None]:
    """Samples of a microbatch, most first, with as many microbatches of a replica as stages or more."""
    share = len(job.batch) // dp if dp and len(job.batch) % dp == 0 else 0
    sizes = [size for size in range(share // stages, 0, -1) if share % size == 0]
    if Question.GROUPING not in questions:
        return [None] * bool(sizes)
    return sizes[:SIZES]


def _node(job: Job) -> int:
    return min(node.num_ranks for node in job.cluster.nodes)
