"""Layouts that the step model expects to be fast, as moves from any choice."""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.job.other_layouts import with_layouts
from workbench.plan.plan import Recompute, Sharding
from workbench.planner.groupings import Grouping, differ
from workbench.planner.layout_choice import Degrees, LayoutChoice, Mode, ModuleChoice
from workbench.planner.layout_search import FoundLayout, likely_layouts
from workbench.search.joint.arrangement import Arrangement, Placement
from workbench.search.joint.grouping_moves import Regroup
from workbench.search.joint.layout_moves import Arrange
from workbench.search.joint.own_spaces import shared_grids
from workbench.search.joint.plain_layouts import plain_layouts
from workbench.search.joint.proposals import Moves
from workbench.search.joint.question import Question
from workbench.search.joint.setting_moves import Keep

PRICED = 24  # layouts per mode and microbatch size whose step is computed
ON_ALL = 3  # layouts on all ranks for each one on fewer
KEPT = 3  # of the priced layouts, those that become candidates
MOST_DIVISIONS = 25_000  # of ranks into islands of encoders: bounding so many layouts takes seconds
_PLACEMENTS = {
    Mode.HOMOGENEOUS: Placement.FIRST_STAGE,
    Mode.COLOCATED: Placement.EVERYWHERE,
    Mode.APART: Placement.ISLANDS,
}


def seeds(
    job: Job, cost: CostModel, questions: Collection[Question], fewer: Sequence[Job] = ()
) -> Iterator[Moves]:
    """Layouts on all ranks, interleaved with those on fewer.

    Args:
        fewer: the job on the first ranks, for several numbers of them.
    """
    on_all = _seeds(job, cost, questions)
    on_fewer = _interleaved([_seeds(each, cost, questions) for each in fewer])
    return _interleaved([*[on_all] * ON_ALL, on_fewer]) if fewer else on_all


def _interleaved(iterators: Sequence[Iterator[Moves]]) -> Iterator[Moves]:
    """One item of each iterator in turn, as long as it has any."""
    waiting = deque(iterators)
    while waiting:
        iterator = waiting.popleft()
        moves = next(iterator, None)
        if moves is not None:
            waiting.append(iterator)
            yield moves


def _seeds(job: Job, cost: CostModel, questions: Collection[Question]) -> Iterator[Moves]:
    """Plain layouts, then the best of every mode and microbatch size, the job's own size first.

    If the step model supports no layout, as for models with a generator: every grid that all modules
    support.

    If samples differ, each layout comes with balanced replicas and with balanced microbatches. Memory
    settings follow the layout if they are open; the microbatch size is the job's if grouping is not.
    Several layouts per mode become candidates because the step model ignores differences between samples.

    Complexity: `PRICED` steps for each mode and microbatch size, when the first of these is requested,
    after one bound for each division of the ranks into islands, of which there are at most
    `MOST_DIVISIONS`.
    """
    if Question.LAYOUT not in questions:
        return
    job = with_layouts(job, ())
    yield from plain_layouts(job, questions)
    sizes = _sizes(job) if Question.GROUPING in questions else [job.microbatch_samples]
    regroups = Question.GROUPING in questions
    regroupings = _regroupings(job) if regroups else ((),)
    modes = _modes(job)

    @cache
    def likely(mode: Mode, size: int) -> tuple[FoundLayout, ...]:
        return likely_layouts(replace(job, microbatch_samples=size), cost, mode, PRICED)

    if not any(likely(mode, job.microbatch_samples) for mode in modes):
        yield from _on_one_grid(job, questions)
        return
    for size in sizes:
        for mode in modes:
            for layout in likely(mode, size)[:KEPT]:
                samples = size if regroups else None
                moves = _moves(job, layout.choice, samples, settings=Question.MEMORY in questions)
                yield from ((*moves, *regroup) for regroup in regroupings)


def _modes(job: Job) -> list[Mode]:
    """Modes to search; modules apart only if the ranks divide into few enough islands."""
    num_divisions = job.usable_ranks ** len(job.model.encoders)
    return [mode for mode in _PLACEMENTS if mode is not Mode.APART or num_divisions <= MOST_DIVISIONS]


def _on_one_grid(job: Job, questions: Collection[Question]) -> Iterator[Moves]:
    """All modules on the same ranks, without a pipeline; small grids and few microbatches first.

    If memory is open, with sharded optimizer state: every grid without recomputation, then with one module
    recomputed, and so on; last with the current settings.
    """
    names = [module.name for module in job.model.modules]
    arranged = []
    for tp, cp in sorted(shared_grids(job), key=lambda grid: (grid[0] * grid[1], grid)):
        if (dp := job.usable_ranks // (tp * cp)) == 0:
            break
        degrees = tuple(Degrees(module=name, tp=tp, cp=cp, dp=dp) for name in names)
        arrangement = Arrangement(placement=Placement.FIRST_STAGE, degrees=degrees)
        sizes = [size for size in _sizes(job) if len(job.batch) % (dp * size) == 0]
        samples_options = reversed(sizes) if Question.GROUPING in questions else [None] * bool(sizes)
        arranged += [Arrange(arrangement, samples) for samples in samples_options]
    memory_options = list(_memory_options(names)) if Question.MEMORY in questions else []
    yield from ((*memory_moves, move) for memory_moves in (*memory_options, ()) for move in arranged)


def _memory_options(modules: Sequence[str]) -> Iterator[Moves]:
    for num in range(len(modules) + 1):
        for recomputed in combinations(modules, num):
            yield tuple(
                Keep(
                    name,
                    Recompute.FULL if name in recomputed else Recompute.NONE,
                    Sharding.OPTIMIZER,
                    1,
                    sequence_parallel=False,
                )
                for name in modules
            )


def _regroupings(job: Job) -> tuple[Moves, ...]:
    balanced = (Grouping.EVEN_MODULES, Grouping.EVEN)
    return tuple((Regroup(grouping),) for grouping in balanced) if differ(job.batch) else ((),)


def _sizes(job: Job) -> list[int]:
    """Microbatch sizes: the job's, doubled as long as they divide the batch."""
    sizes = [job.microbatch_samples]
    while len(job.batch) % (2 * sizes[-1]) == 0:
        sizes.append(2 * sizes[-1])
    return sizes


def _moves(job: Job, choice: LayoutChoice, samples: int | None, *, settings: bool) -> Moves:
    parts = {part.module: part for part in (*choice.encoders, choice.llm)}
    degrees = tuple(parts[module.name].degrees for module in job.model.modules)
    if samples is not None:
        samples *= choice.llm.joint_replicas
    arrange = Arrange(Arrangement(placement=_PLACEMENTS[choice.mode], degrees=degrees), samples)
    memory_moves = tuple(_keep(job, part) for part in parts.values()) if settings else ()
    return (*memory_moves, arrange)


def _keep(job: Job, part: ModuleChoice) -> Keep:
    is_sharded = max(part.num_holders, part.num_expert_holders) > part.instances
    return Keep(
        part.module,
        Recompute(part.recompute),
        Sharding.OPTIMIZER if is_sharded else Sharding.NONE,
        part.instances if is_sharded else 1,
        job.settings.of(part.module).sequence_parallel,
    )
