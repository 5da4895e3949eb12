"""Finds the stage counts that a job leaves open: the fastest plan under its rank budget."""

from collections.abc import Callable, Iterator, Mapping
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

    Branch and bound, exact: combinations of the open counts within the rank budget are
    tried from the smallest bound on; the search ends where the bound reaches the best plan.
    Plans that do not fit in memory are left out. Among equals the plan with fewer ranks
    wins, then the lexicographically first counts.
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
    bounded = sorted(
        ((candidates.bound_s(counts), tuple(counts.values())), counts)
        for counts in _within_budget(job, ranks_per_stage, options)
    )
    best: tuple[float, int, tuple[int, ...]] | None = None
    best_plan: Plan | None = None
    least = sum(dp_of(job, name) * size * options[name][0] for name, size in ranks_per_stage.items())
    refusal = (
        f"no stage counts fit {_budget(job)} ranks; nearest: max_ranks {least}, or smaller tp, cp and dp"
    )
    for done, ((bound_s, chosen), counts) in enumerate(bounded):
        if best is not None and bound_s * ROUNDING > best[0]:
            break
        try:
            plan = candidates.plan(counts)
            lowered = lower(plan)
            check_memory(lowered, memory_table(lowered))
        except ValueError as error:
            refusal = str(error)
            continue
        key = (candidates.believed_s(lowered), len(plan.ranks), chosen)
        if best is None or key < best:
            best, best_plan = key, plan
        progress(done + 1, len(bounded), best[0])
    if best_plan is None:
        raise ValueError(f"job {job.name!r}: {refusal}")
    return best_plan


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
