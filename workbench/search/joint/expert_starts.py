"""Jobs that distribute experts over data-parallel replicas, as users of Megatron and torchtitan run them."""

from collections.abc import Iterator
from dataclasses import replace
from math import gcd
from typing import NamedTuple

from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.job.other_layouts import with_layouts
from workbench.plan.plan import ModuleSettings, Recompute, Sharding
from workbench.planner.expert_choices import expert_counts
from workbench.planner.layout_space import divisors


class ExpertJob(NamedTuple):
    """A job, and in words what its layout is."""

    name: str
    job: Job


def expert_jobs(job: Job) -> Iterator[ExpertJob]:
    """The job with tp 1, experts distributed over the replicas of a node, and 1, 2, 4, ... stages.

    Optimizer state is sharded. First nothing is recomputed, then the language model. Each replica takes as
    many samples as now. Nothing for models without experts.

    Complexity: O(log ranks) jobs.
    """
    counts = expert_counts(job.model.llm)
    if not counts:
        return
    num_layers, in_node = len(job.model.llm.layers), min(node.num_ranks for node in job.cluster.nodes)
    for recompute in (Recompute.NONE, Recompute.FULL):
        pp = 1
        while pp <= min(num_layers, job.usable_ranks):
            dp = job.usable_ranks // pp
            ep = max(each for each in divisors(gcd(dp, *counts)) if each <= in_node)
            if ep > 1 and len(job.batch) % dp == 0:
                words = f"ep {ep}, dp {dp}" + (f", pp {pp}" if pp > 1 else "")
                words += ", recomputed" if recompute is Recompute.FULL else ""
                yield ExpertJob(words, _laid_out(job, dp, pp, ep, recompute))
            pp *= 2


def _laid_out(job: Job, dp: int, pp: int, ep: int, recompute: Recompute) -> Job:
    llm = job.model.llm.name
    modules = tuple(
        ModuleSettings(
            module=module.name,
            recompute=recompute if module.name == llm else Recompute.NONE,
            sharding=Sharding.OPTIMIZER,
            products=job.settings.of(module.name).products,
        )
        for module in job.model.modules
    )
    layout = ModuleLayout(module=llm, pp=pp, ep=ep)
    return replace(with_layouts(job, (layout,), replicas=dp), settings=replace(job.settings, modules=modules))
