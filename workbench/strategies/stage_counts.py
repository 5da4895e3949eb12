"""Finds the stage counts that a job leaves open: the fastest plan under its rank budget."""

from collections.abc import Callable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import product
from typing import Protocol

from workbench.graph.model_graph import TEXT
from workbench.job import Job
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.plan.memory import check_memory, memory_table
from workbench.plan.plan import Plan
from workbench.strategies.assembly import dp_of, layout_of, virtual_stages

Progress = Callable[[int, int, float], None]  # (candidates done, candidates in all, best seconds so far)


ROUNDING = 1 - 1e-9  # a bound is a sum in another order than the path it bounds


class Candidates(Protocol):
    """How a planner turns stage counts into plans, and what it believes of them."""

    def bound_s(self, counts: Mapping[str, int]) -> float:
        """Seconds that no plan of these counts is believed to beat."""

    def closer_s(self, counts: Mapping[str, int]) -> float:
        """The same, closer and dearer; ValueError where no plan of these counts is sound or fits."""

    def plan(self, counts: Mapping[str, int]) -> Plan:
        """The plan of these counts; ValueError when there is none."""

    def believed_s(self, lowered: Lowered) -> float:
        """The planner's own estimate of a plan."""


def silent(done: int, total: int, best_s: float) -> None:
    """The progress callback that tells nobody."""


def fastest_counts(
    job: Job, ranks_per_stage: Mapping[str, int], candidates: Candidates, progress: Progress = silent
) -> Plan:
    """The plan that the planner believes fastest among all stage counts that fit.

    Branch and bound, exact: combinations of the open counts within the rank budget are tried from the
    smallest bound on, and bounded more closely first; the search ends where the bound reaches the best
    plan. Plans that do not fit in memory are left out. Among equals the plan with fewer ranks wins,
    then the lexicographically first counts.
    Differs: Cornstarch v1 Algorithm 1 tries one count per encoder and LLM depth; this tries all.

    Args:
        ranks_per_stage: entries whose counts are to be found -> ranks that one replica's stage takes.
        candidates: how a planner bounds, builds and judges.

    Raises:
        ValueError: a given count is impossible, or no combination fits (the last reason is named).

    Complexity: at worst O(product of the open ranges) plans.
    """
    options = {name: _options(job, name) for name in ranks_per_stage}
    if all(len(counts) == 1 for counts in options.values()):
        return candidates.plan({name: counts[0] for name, counts in options.items()})
    waiting = _Waiting(candidates, _within_budget(job, ranks_per_stage, options))
    best: tuple[float, int, tuple[int, ...]] | None = None
    best_plan: Plan | None = None
    least = sum(dp_of(job, name) * size * options[name][0] for name, size in ranks_per_stage.items())
    refusal = (
        f"no stage counts fit {_budget(job)} ranks; nearest: max_ranks {least}, or smaller tp, cp and dp"
    )
    for bound_s, chosen in waiting.by_bound():
        if best is not None and bound_s * ROUNDING > best[0]:
            break
        try:
            plan = candidates.plan(dict(zip(options, chosen, strict=True)))
            lowered = lower(plan)
            key = (candidates.believed_s(lowered), len(plan.ranks), chosen)
            if best is None or key < best:
                check_memory(lowered, memory_table(lowered))
                best, best_plan = key, plan
        except ValueError as error:
            refusal = str(error)
            continue
        progress(waiting.num_settled, waiting.num_all, best[0])
    if best_plan is None:
        raise ValueError(f"job {job.name!r}: {waiting.refusal or refusal}")
    return best_plan


class _Waiting:
    """Stage counts by ascending bound; only those whose cheap bound is reached get a closer one.

    `num_settled` of `num_all` were handed out or refused.
    """

    def __init__(self, candidates: Candidates, all_counts: Iterator[dict[str, int]]) -> None:
        self._candidates = candidates
        self._counts = {tuple(counts.values()): counts for counts in all_counts}
        self.num_all, self.num_settled = len(self._counts), 0
        self.refusal = ""

    def by_bound(self) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Bounds in seconds with their counts; ties by the counts."""
        waiting = [(self._candidates.bound_s(c), chosen, False) for chosen, c in self._counts.items()]
        heapify(waiting)
        while waiting:
            bound_s, chosen, is_close = heappop(waiting)
            if is_close:
                self.num_settled += 1
                yield bound_s, chosen
                continue
            try:
                closer_s = self._candidates.closer_s(self._counts[chosen])
            except ValueError as error:
                self.num_settled += 1
                self.refusal = str(error)
                continue
            heappush(waiting, (max(bound_s, closer_s), chosen, True))


def _options(job: Job, name: str) -> tuple[int, ...]:
    """Stage counts to try: the one given, or all that the layers and the budget allow."""
    modules = [m for m in job.model.modules if m.name == name] or [
        m for m in job.model.modules if m.modality != TEXT
    ]
    layout = layout_of(job, modules[0].name)
    given = layout.pp or len(layout.stage_layers) // virtual_stages(job, modules[0].name)
    if given:
        return (given,)
    layers = min(len(module.layers) // virtual_stages(job, module.name) for module in modules)
    return tuple(range(1, min(layers, _budget(job)) + 1))


def _within_budget(
    job: Job, ranks_per_stage: Mapping[str, int], options: Mapping[str, tuple[int, ...]]
) -> Iterator[dict[str, int]]:
    for counts in product(*options.values()):
        chosen = dict(zip(options, counts, strict=True))
        used = sum(dp_of(job, name) * ranks_per_stage[name] * count for name, count in chosen.items())
        if used <= _budget(job):
            yield chosen


def _budget(job: Job) -> int:
    return job.cluster.num_ranks if job.max_ranks is None else min(job.max_ranks, job.cluster.num_ranks)
