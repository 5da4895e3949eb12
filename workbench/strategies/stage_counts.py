"""Finds the stage counts that a job leaves open: the fastest plan under its rank budget."""

from collections.abc import Callable, Iterator, Mapping
from itertools import product

from workbench.cost.model import CostModel
from workbench.graph.model_graph import TEXT
from workbench.job import Job
from workbench.plan.critical_path import critical_path_s
from workbench.plan.lower import lower
from workbench.plan.memory import check_memory, memory_table
from workbench.plan.plan import Plan
from workbench.plan.price import price
from workbench.strategies.assembly import layout_of

Progress = Callable[[int, int, float], None]  # (candidates done, candidates in all, best seconds so far)


def silent(done: int, total: int, best_s: float) -> None:
    """The progress callback that tells nobody."""


def fastest_counts(
    job: Job,
    cost: CostModel,
    ranks_per_stage: Mapping[str, int],
    with_counts: Callable[[Mapping[str, int]], Plan],
    progress: Progress = silent,
) -> Plan:
    """The plan with the shortest critical path among all stage counts that fit.

    Every combination of the open counts within the rank budget is built, priced and judged
    by its critical path; plans that do not fit in memory are left out. Among equals the
    plan with fewer ranks wins, then the lexicographically first counts.
    Differs: Cornstarch v1 Algorithm 1 tries one count per encoder and LLM depth; this tries all.

    Args:
        ranks_per_stage: entries whose counts are to be found -> ranks that one stage takes.
        with_counts: builds the plan of given counts.

    Raises:
        ValueError: a given count is impossible, or no combination fits (the last reason is named).

    Complexity: O(product of the open ranges) plans.
    """
    options = {name: _options(job, name) for name in ranks_per_stage}
    if all(len(counts) == 1 for counts in options.values()):
        return with_counts({name: counts[0] for name, counts in options.items()})
    candidates = list(_within_budget(job, ranks_per_stage, options))
    best: tuple[float, int, Plan] | None = None
    refusal = f"no stage counts fit {_budget(job)} ranks"
    for done, counts in enumerate(candidates):
        try:
            plan = with_counts(counts)
            lowered = lower(plan)
            check_memory(lowered, memory_table(lowered))
        except ValueError as error:
            refusal = str(error)
            continue
        key = (critical_path_s(lowered, price(lowered, cost).duration_s), len(plan.ranks))
        if best is None or key < best[:2]:
            best = (*key, plan)
        progress(done + 1, len(candidates), best[0])
    if best is None:
        raise ValueError(f"job {job.name!r}: {refusal}")
    return best[2]


def _options(job: Job, name: str) -> tuple[int, ...]:
    """Stage counts to try: the one given, or all that the layers and the budget allow."""
    modules = [m for m in job.model.modules if m.name == name] or [
        m for m in job.model.modules if m.modality != TEXT
    ]
    given = layout_of(job, modules[0].name).pp
    if given is not None:
        return (given,)
    layers = min(len(module.layers) for module in modules)
    return tuple(range(1, min(layers, _budget(job)) + 1))


def _within_budget(
    job: Job, ranks_per_stage: Mapping[str, int], options: Mapping[str, tuple[int, ...]]
) -> Iterator[dict[str, int]]:
    for counts in product(*options.values()):
        chosen = dict(zip(options, counts, strict=True))
        used = job.replicas * sum(ranks_per_stage[name] * count for name, count in chosen.items())
        if used <= _budget(job):
            yield chosen


def _budget(job: Job) -> int:
    return job.cluster.num_ranks if job.max_ranks is None else min(job.max_ranks, job.cluster.num_ranks)
