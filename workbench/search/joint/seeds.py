"""Layouts that are likely to be fast by the step model, as moves from any choice."""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.plan.plan import Recompute, Sharding
from workbench.planner.groupings import Grouping, differ
from workbench.planner.layout_choice import Degrees, LayoutChoice, Mode, ModuleChoice
from workbench.planner.layout_search import FoundLayout, likely_layouts, usable_ranks
from workbench.search.joint.arrangement import Arrangement, Placement
from workbench.search.joint.grouping_moves import Regroup
from workbench.search.joint.layout_moves import Arrange
from workbench.search.joint.own_spaces import shared_grids
from workbench.search.joint.plain_layouts import plain_layouts
from workbench.search.joint.proposals import Moves
from workbench.search.joint.question import Question
from workbench.search.joint.setting_moves import Keep

PRICED = 24  # layouts of a mode and microbatch size whose step is worked out
ON_ALL = 3  # layouts on all ranks for one on fewer
KEPT = 3  # of those, that become candidates
MOST_DIVISIONS = 25_000  # of ranks into islands of encoders: to bound the layouts of so many takes seconds
_PLACEMENTS = {
    Mode.HOMOGENEOUS: Placement.FIRST_STAGE,
    Mode.COLOCATED: Placement.EVERYWHERE,
    Mode.APART: Placement.ISLANDS,
}


def seeds(
    job: Job, cost: CostModel, questions: Collection[Question], fewer: Sequence[Job] = ()
) -> Iterator[Moves]:
    """Layouts on all ranks, and between them, in turn, those on fewer.

    Args:
        fewer: the job on fewer of its first ranks.
    """
    on_all = _seeds(job, cost, questions)
    on_fewer = _in_turn([_seeds(each, cost, questions) for each in fewer])
    return _in_turn([*[on_all] * ON_ALL, on_fewer]) if fewer else on_all


def _in_turn(some: Sequence[Iterator[Moves]]) -> Iterator[Moves]:
    """One of each as long as it has any."""
    waiting = deque(some)
    while waiting:
        each = waiting.popleft()
        found = next(each, None)
        if found is not None:
            waiting.append(each)
            yield found


def _seeds(job: Job, cost: CostModel, questions: Collection[Question]) -> Iterator[Moves]:
    """Plain layouts, then the best of every mode and microbatch size, the job's own size first.

    Where the step model knows none, as of a model with a generator, every grid that all modules share.

    Where samples differ, each with replicas and with microbatches of even work.
    With their memory settings where these are open, and of the job's own microbatch size where that is not.
    The step model does not know single samples, so that several are worth a candidate.

    Complexity: `PRICED` steps for each mode and microbatch size, when the first of these is asked for, behind
    one bound for each division of the ranks into islands, of which there are at most `MOST_DIVISIONS`.
    """
    if Question.LAYOUT not in questions:
        return
    yield from plain_layouts(job, questions)
    sizes = _sizes(job) if Question.GROUPING in questions else [job.microbatch_samples]
    regroups = Question.GROUPING in questions
    ways = _ways(job) if regroups else ((),)
    modes = _modes(job)

    @cache
    def likely(mode: Mode, size: int) -> tuple[FoundLayout, ...]:
        return likely_layouts(replace(job, layouts=(), microbatch_samples=size), cost, mode, PRICED)

    if not any(likely(mode, job.microbatch_samples) for mode in modes):
        yield from _on_one_grid(job, questions)
        return
    for size in sizes:
        for mode in modes:
            for each in likely(mode, size)[:KEPT]:
                samples = size if regroups else None
                moves = _moves(job, each.choice, samples, settings=Question.MEMORY in questions)
                yield from ((*moves, *way) for way in ways)


def _modes(job: Job) -> list[Mode]:
    """Of layouts to ask for; of modules apart only where their islands have few enough sizes."""
    num_divisions = usable_ranks(job) ** len(job.model.encoders)
    return [mode for mode in _PLACEMENTS if mode is not Mode.APART or num_divisions <= MOST_DIVISIONS]


def _on_one_grid(job: Job, questions: Collection[Question]) -> Iterator[Moves]:
    """All modules on the same ranks, without a pipeline; small grids first, and fewest microbatches.

    Where memory is open, with optimizer state sharded: every such grid with nothing computed again, then
    with one module computed again, and so on; then with the settings that are there.
    """
    names = [module.name for module in job.model.modules]
    arranged = []
    for tp, cp in sorted(shared_grids(job), key=lambda grid: (grid[0] * grid[1], grid)):
        if (dp := usable_ranks(job) // (tp * cp)) == 0:
            break
        degrees = tuple(Degrees(module=name, tp=tp, cp=cp, dp=dp) for name in names)
        arrangement = Arrangement(placement=Placement.FIRST_STAGE, degrees=degrees)
        sizes = [size for size in _sizes(job) if len(job.batch) % (dp * size) == 0]
        own = reversed(sizes) if Question.GROUPING in questions else [None] * bool(sizes)
        arranged += [Arrange(arrangement, samples) for samples in own]
    ways = list(_memory_ways(names)) if Question.MEMORY in questions else []
    yield from ((*way, move) for way in (*ways, ()) for move in arranged)


def _memory_ways(modules: Sequence[str]) -> Iterator[Moves]:
    for num in range(len(modules) + 1):
        for again in combinations(modules, num):
            yield tuple(
                Keep(
                    name,
                    Recompute.FULL if name in again else Recompute.NONE,
                    Sharding.OPTIMIZER,
                    1,
                    sequence_parallel=False,
                )
                for name in modules
            )


def _ways(job: Job) -> tuple[Moves, ...]:
    even = (Grouping.EVEN_COUNTS, Grouping.EVEN)
    return tuple((Regroup(way),) for way in even) if differ(job.batch) else ((),)


def _sizes(job: Job) -> list[int]:
    """Of microbatches: the job's, and twice as many samples as long as these divide the batch."""
    found = [job.microbatch_samples]
    while len(job.batch) % (2 * found[-1]) == 0:
        found.append(2 * found[-1])
    return found


def _moves(job: Job, choice: LayoutChoice, samples: int | None, *, settings: bool) -> Moves:
    parts = {part.module: part for part in (*choice.encoders, choice.llm)}
    degrees = tuple(
        Degrees(module=p.module, tp=p.tp, cp=p.cp, pp=p.pp, dp=p.dp, ep=p.ep)
        for p in (parts[module.name] for module in job.model.modules)
    )
    arranged = Arrange(Arrangement(placement=_PLACEMENTS[choice.mode], degrees=degrees), samples)
    kept = tuple(_kept(job, part) for part in parts.values()) if settings else ()
    return (*kept, arranged)


def _kept(job: Job, part: ModuleChoice) -> Keep:
    is_sharded = max(part.num_holders, part.num_expert_holders) > part.instances
    return Keep(
        part.module,
        Recompute(part.recompute),
        Sharding.OPTIMIZER if is_sharded else Sharding.NONE,
        part.instances if is_sharded else 1,
        job.settings.of(part.module).sequence_parallel,
    )
