"""From stage boundaries to a plan: numbers the stages, deals out ranks, batches the samples."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from workbench.balance.partition import partition
from workbench.job import Job, ModuleLayout
from workbench.plan.build import batched_microbatches
from workbench.plan.plan import Plan, Stage

Cuts = tuple[tuple[int, int], ...]  # [num_stages] layers [first, last) of each stage


def layout_of(job: Job, module: str) -> ModuleLayout:
    """The job's layout of a module; tp = cp = 1 and a searched stage count by default."""
    return next((layout for layout in job.layouts if layout.module == module), ModuleLayout(module=module))


def draft_plan(job: Job, strategy: str) -> Plan:
    """A plan without stages or programs; its microbatches are the same samples in every module."""
    empty = Plan(
        strategy=strategy,
        model=job.model,
        cluster=job.cluster,
        batch=job.batch,
        stages=(),
        microbatches=(),
        programs=(),
        settings=job.settings,
    )
    microbatches = batched_microbatches(
        empty, samples_per_microbatch=job.microbatch_samples, replicas=range(job.replicas)
    )
    return replace(empty, microbatches=microbatches)


def num_microbatches(draft: Plan, module: str) -> int:
    """Of the replica that has most of them."""
    return max((len(m) for (name, _), m in draft.microbatches_of.items() if name == module), default=0)


@cache
def _partition(cost_s: tuple[float, ...], num_stages: int) -> Cuts:
    return partition(cost_s, num_stages)


def cut(cost_s: tuple[float, ...], num_stages: int, module: str) -> Cuts:
    """Balanced stages of one module; the error of an impossible count names the module."""
    try:
        return _partition(cost_s, num_stages)
    except ValueError as error:
        raise ValueError(f"module {module!r}: {error}") from None


def bottleneck_s(cost_s: Sequence[float], cuts: Cuts) -> float:
    """Seconds of the slowest stage."""
    return max(sum(cost_s[first:last]) for first, last in cuts)


def grid(first_rank: int, layout: ModuleLayout) -> tuple[tuple[int, ...], ...]:
    """Consecutive ranks as a cp x tp grid."""
    starts = range(first_rank, first_rank + layout.cp * layout.tp, layout.tp)
    return tuple(tuple(range(start, start + layout.tp)) for start in starts)


def disjoint_stages(job: Job, cuts: Mapping[str, Cuts]) -> tuple[Stage, ...]:
    """Every stage on ranks of its own: modules in the model's order, one replica after the other."""
    stages: list[Stage] = []
    first_rank = 0
    for replica in range(job.replicas):
        for module in job.model.modules:
            layout = layout_of(job, module.name)
            for layers in cuts[module.name]:
                ranks = grid(first_rank, layout)
                stages.append(
                    Stage(id=len(stages), module=module.name, replica=replica, layers=layers, ranks=ranks)
                )
                first_rank += layout.tp * layout.cp
    check_ranks(job, first_rank)
    return tuple(stages)


def check_ranks(job: Job, num_ranks: int) -> None:
    """Refuse a layout that needs more ranks than the job may use."""
    limit = job.cluster.num_ranks if job.max_ranks is None else min(job.max_ranks, job.cluster.num_ranks)
    if num_ranks > limit:
        raise ValueError(f"the layout needs {num_ranks} ranks, job {job.name!r} may use {limit}")
