"""Finds the fastest layout that fits by exact branch and bound over a mode's space; and its oracle."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heapreplace
from itertools import count, islice
from math import inf
from typing import NamedTuple

import numpy as np

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.planner.assembly import check_apart
from workbench.planner.layout_choice import LayoutChoice, LayoutStep, Mode
from workbench.planner.layout_combinations import Bounded, Family
from workbench.planner.layout_space import Freedom, LayoutSpace
from workbench.planner.layout_step import LayoutSteps, steps_of
from workbench.planner.stage_counts import ROUNDING, Progress, silent
from workbench.units import gib_text, wanted_memory_text

Accepts = Callable[[LayoutChoice, LayoutStep], bool]


def any_layout(choice: LayoutChoice, step: LayoutStep) -> bool:
    """Accepts every layout that fits."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLayout:
    """The best layout of a space.

    Args:
        choice, step: the layout and its step.
        num_layouts: upper bound on the layouts in the space.
        num_priced: layouts whose step was computed.
    """

    choice: LayoutChoice
    step: LayoutStep
    num_layouts: int
    num_priced: int


class NoLayoutError(ValueError):
    """There is no layout; the reason is found when it is read, as searches over sizes drop most of them."""

    def __init__(self, reason: Callable[[], str]) -> None:
        super().__init__()
        self._reason = cache(reason)

    def __str__(self) -> str:
        return self._reason()

    def __reduce__(self) -> tuple[type[ValueError], tuple[str]]:
        return ValueError, (str(self),)


def fastest_layout(
    job: Job,
    cost: CostModel,
    mode: Mode,
    *,
    num_ranks: int | None = None,
    freedom: Freedom | None = None,
    progress: Progress = silent,
) -> FoundLayout:
    """`fastest_by` the published estimate, in which passes hide what replicas exchange."""
    return fastest_by(steps_of(job, cost), mode, num_ranks=num_ranks, freedom=freedom, progress=progress)


def fastest_by(
    steps: LayoutSteps,
    mode: Mode,
    *,
    num_ranks: int | None = None,
    freedom: Freedom | None = None,
    accepts: Accepts = any_layout,
    progress: Progress = silent,
) -> FoundLayout:
    """The fastest layout of a mode that fits in memory, among all on `num_ranks` ranks.

    Best-first search: layouts are priced by ascending bound until the bound reaches the best step;
    families of layouts whose bound is never reached are not enumerated.
    Same result as `exhaustive_layout`; among equals the smaller bound wins, then the earlier layout.

    Args:
        steps: the estimate, of a job whose layouts of modules are kept, as is its microbatch size.
        mode: how modules share the ranks.
        num_ranks: ranks of every layout; None: all that the job may use.
        freedom: what varies besides degrees.
        accepts: called for every layout that would be the best so far; False: it is skipped.
        progress: receives the layouts priced, their total, and the best seconds so far.

    Raises:
        NoLayoutError: no layout fits, or none exists on that many ranks.
        ValueError: the space does not cover these modules.

    Complexity: one bound per choice of the LLM and encoder; at worst one step per layout.
    """
    space = _space(steps, num_ranks, freedom)
    families = tuple(space.families(mode))
    total = sum(family.most for family in families)

    def report(done: int, _: int, best_s: float) -> None:
        progress(done, total, best_s)

    result = _best(
        steps, best_first(families), lambda bound_s, best_s: bound_s * ROUNDING > best_s, accepts, report
    )
    return _best_layout(steps.job, mode, result, total, space)


def exhaustive_layout(
    job: Job, cost: CostModel, mode: Mode, *, freedom: Freedom | None = None
) -> FoundLayout:
    """The fastest layout by pricing every one: the oracle of `fastest_layout`, with the same errors."""
    steps = LayoutSteps(job, cost)
    space = _space(steps, None, freedom)
    layouts = list(space.layouts(mode))
    result = _best(steps, layouts, lambda bound_s, best_s: False, any_layout, silent)
    return _best_layout(job, mode, result, len(layouts), space)


def likely_layouts(job: Job, cost: CostModel, mode: Mode, most: int) -> tuple[FoundLayout, ...]:
    """Layouts of a mode that fit in memory, fastest first, out of the `most` with the smallest bounds.

    Empty where a mode has no layout on all ranks of the job, whose layouts of modules are kept. What
    replicas exchange comes behind all passes, as in plans.

    Args:
        most: number of layouts that are priced.

    Complexity: `most` steps, after one bound per choice of the LLM and encoder.
    """
    try:
        steps = steps_of(job, cost, hides_exchange=False)
        families = tuple(_space(steps, None, None).families(mode))
    except ValueError:  # the space does not cover these modules
        return ()
    total = sum(family.most for family in families)
    priced = ((choice, steps.step(choice)) for _, choice in islice(best_first(families), most))
    fitting = sorted((pair for pair in priced if pair[1].fits), key=lambda pair: pair[1].step_s)
    return tuple(FoundLayout(choice=c, step=s, num_layouts=total, num_priced=most) for c, s in fitting)


def has_layouts(job: Job, cost: CostModel, mode: Mode, num_ranks: int) -> bool:
    """Whether any layout takes exactly `num_ranks` ranks, whether it fits or not."""
    return any(True for _ in _space(steps_of(job, cost), num_ranks, None).families(mode))


def _space(steps: LayoutSteps, num_ranks: int | None, freedom: Freedom | None) -> LayoutSpace:
    job = steps.job
    check_apart(job, f"job {job.name!r}")
    return LayoutSpace(steps, job.usable_ranks if num_ranks is None else num_ranks, freedom)


def best_first(families: Sequence[Family]) -> Iterator[Bounded]:
    """Layouts by ascending bound.

    The family with the smallest bound gets a tighter one; if it is still the smallest, it is opened.
    Among equal bounds families come first, then layouts in the order in which their families were opened.
    """
    waiting: list[tuple[float, int, LayoutChoice | None, Iterator[tuple[float, LayoutChoice | None]]]] = [
        (family.bound_s, number, None, _by_bound(family)) for number, family in enumerate(families)
    ]
    heapify(waiting)
    numbers = count(len(waiting))
    while waiting:
        bound_s, number, choice, followers = waiting[0]
        if choice is not None:
            yield bound_s, choice
        next_s, next_choice = next(followers, (inf, None))
        if next_s == inf:
            heappop(waiting)
            continue
        is_opened = choice is None and next_choice is not None
        heapreplace(waiting, (next_s, next(numbers) if is_opened else number, next_choice, followers))


def _by_bound(family: Family) -> Iterator[tuple[float, LayoutChoice | None]]:
    """The family's tighter bound, then its layouts by ascending bound, each made on demand."""
    closer_s = max(family.closer_s(), family.bound_s)
    yield closer_s, None
    layouts = family.layouts()
    bounds_s = np.maximum(layouts.bounds_s, closer_s)
    for index in np.argsort(bounds_s, kind="stable").tolist():
        yield float(bounds_s[index]), layouts.at(index)


class _Progress(NamedTuple):
    """The best layout so far, the one with the least memory, and the number priced."""

    best: tuple[LayoutChoice, LayoutStep] | None
    smallest: tuple[LayoutChoice, LayoutStep] | None
    num_priced: int


def _best(
    steps: LayoutSteps,
    layouts: Iterable[Bounded],
    is_beaten: Callable[[float, float], bool],
    accepts: Accepts,
    progress: Progress,
) -> _Progress:
    best: tuple[LayoutChoice, LayoutStep] | None = None
    smallest: tuple[LayoutChoice, LayoutStep] | None = None
    best_s, priced = float("inf"), 0
    for bound_s, choice in layouts:
        if is_beaten(bound_s, best_s):
            break
        step = steps.step(choice)
        priced += 1
        if step.fits and step.step_s < best_s and accepts(choice, step):
            best, best_s = (choice, step), step.step_s
        if smallest is None or step.peak_bytes < smallest[1].peak_bytes:
            smallest = choice, step
        progress(priced, 0, best_s)
    return _Progress(best, smallest, priced)


def _best_layout(
    job: Job, mode: Mode, result: _Progress, num_layouts: int, space: LayoutSpace
) -> FoundLayout:
    if result.best is None:
        raise NoLayoutError(lambda: f"job {job.name!r}: {_refusal(job, mode, result.smallest, space)}")
    choice, step = result.best
    return FoundLayout(choice=choice, step=step, num_layouts=num_layouts, num_priced=result.num_priced)


def _unlike_grids(job: Job, mode: Mode) -> str | None:
    """The first encoder whose layout in the job excludes a homogeneous layout; None: there is none."""
    given = {layout.module: layout for layout in job.layouts}
    llm = given.pop(job.model.llm.name, None)
    if mode is not Mode.HOMOGENEOUS or llm is None:
        return None
    for name, layout in given.items():
        if (layout.tp, layout.cp) != (llm.tp, llm.cp):
            return (
                f"encoders share the grid of {llm.module!r}, tp {llm.tp} and cp {llm.cp}, but the layout of "
                f"{name!r} has tp {layout.tp} and cp {layout.cp}; nearest: equal ones, or no layout of "
                f"{name!r}"
            )
    return None


def _too_few_nodes(job: Job, mode: Mode, space: LayoutSpace) -> str | None:
    """Why there is no island for every module; None: there is one, or the mode has none."""
    num_modules = len(job.model.modules)
    least = num_modules * space.island_unit
    if mode is not Mode.APART or least <= space.num_ranks:
        return None
    unit = "ranks" if space.island_unit == 1 else f"whole nodes of {space.island_unit} ranks"
    return (
        f"{num_modules} modules on {unit} of their own take at least {least} ranks, got {space.num_ranks}; "
        f"nearest: {least} ranks, or strategy megatron-heterogeneous"
    )


def _refusal(
    job: Job, mode: Mode, nearest: tuple[LayoutChoice, LayoutStep] | None, space: LayoutSpace
) -> str:
    if nearest is None:
        reason = (
            _unlike_grids(job, mode)
            or _too_few_nodes(job, mode, space)
            or space.obstacle()
            or "dp of modules on the same ranks must divide each other, and the state of modules on ranks of "
            "their own must fit; nearest: more ranks, or a batch that is a multiple of them"
        )
        return f"no {mode} layout takes all ranks: {reason}"
    choice, step = nearest
    return (
        f"no {mode} layout fits: the smallest, {choice}, holds {gib_text(step.peak_bytes)} on a rank of "
        f"{gib_text(step.memory_bytes)}; want {wanted_memory_text(step.peak_bytes)} or more ranks"
        f"{_or_free(job)}"
    )


def _or_free(job: Job) -> str:
    """A remedy of jobs whose layouts keep the search from other degrees."""
    given = [repr(layout.module) for layout in job.layouts]
    return f", or no layouts of {', '.join(given)}, which fix tp, cp and ep" if given else ""
