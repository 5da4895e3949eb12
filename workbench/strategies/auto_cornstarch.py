"""Cornstarch's loosely-coupled parallelization: encoders cut to match the stage time of each LLM depth.

Source: Cornstarch v1 section 5.2, Algorithm 1. Differs: an encoder layer that alone takes longer than the
LLM's stages becomes a stage of its own; stage counts that the job states are kept; depths whose plans do
not fit are skipped.
"""

from collections.abc import Iterator
from operator import itemgetter

from workbench.balance.stages.partition import bottleneck_s, partition_min_stages
from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.plan.plan import Plan
from workbench.planner.assembly import (
    disjoint_stages,
    draft_plan,
    layout_of,
    lowered_that_fits,
    virtual_stages,
)
from workbench.planner.cut_candidates import CutCandidates
from workbench.planner.planner_cost import FROZEN_AWARE
from workbench.planner.stage_counts import Progress
from workbench.planner.strategy_spec import Chooser, First, OwnSpace, StrategySpec
from workbench.strategies.cornstarch import with_balanced_tokens

NAME = "cornstarch-loosely-coupled"


def shortlist(job: Job, cost: CostModel, progress: Progress, most: int) -> tuple[Plan, ...]:
    """The fastest of one plan per number of LLM stages, by the estimate of `cornstarch`.

    They are among the plans that `cornstarch` searches, so the first is `cornstarch`'s own choice whenever
    that gives encoders the fewest stages that keep up with the LLM's.

    Raises:
        ValueError: no depth's plan is valid and fits; names the last reason.

    Complexity: O(LLM layers) plans, one cut of each encoder per plan.
    """
    candidates = CutCandidates(job, draft_plan(job, NAME), cost, FROZEN_AWARE, disjoint_stages)
    depths = tuple(_depths(candidates))
    fitting: list[tuple[float, Plan]] = []
    refusal = f"no depth of the LLM fits {job.usable_ranks} ranks"
    for done, counts in enumerate(depths):
        try:
            candidate_plan = candidates.plan(counts)
            lowered = lowered_that_fits(candidate_plan)
        except ValueError as error:
            refusal = str(error)
            continue
        fitting.append((candidates.believed_s(lowered), candidate_plan))
        progress(done + 1, len(depths), min(fitting, key=itemgetter(0))[0])
    if not fitting:
        raise ValueError(f"job {job.name!r}: {refusal}")
    fitting.sort(key=itemgetter(0))
    return tuple(with_balanced_tokens(candidate_plan) for _, candidate_plan in fitting[:most])


plan = First(shortlist)


def _depths(candidates: CutCandidates) -> Iterator[dict[str, int]]:
    """Stage counts of all modules for each LLM depth that the ranks allow."""
    job, layers_s, ranks_per_stage = candidates.job, candidates.layers_s, candidates.ranks_per_stage
    llm = job.model.llm.name
    virtual = virtual_stages(job, llm)
    llm_depth = _stated_depth(job, llm)
    for depth in range(1, len(job.model.llm.stage_starts) // virtual + 1):
        if llm_depth in (None, depth):
            target_s = bottleneck_s(layers_s[llm], depth)
            counts = {
                module: depth if module == llm else _stated_depth(job, module) or _fewest(each_s, target_s)
                for module, each_s in layers_s.items()
            }
            ranks = sum(ranks_per_stage[module] * count for module, count in counts.items())
            if job.replicas * ranks <= job.usable_ranks:
                yield counts


def _fewest(each_s: tuple[float, ...], target_s: float) -> int:
    """Fewest stages of an encoder that take no longer than the LLM's, if its layers allow."""
    return len(partition_min_stages(each_s, max(target_s, *each_s)))


def _stated_depth(job: Job, module: str) -> int | None:
    layout = layout_of(job, module)
    return layout.pp or len(layout.stage_layers) // virtual_stages(job, module) or None


SPEC = StrategySpec(
    name=NAME,
    planner=plan,
    shortlist=shortlist,
    summary="Cornstarch v1, Algorithm 1: encoder stages cut to the stage time of each LLM depth",
    own_space=OwnSpace(degrees=Chooser.EACH, where="Cornstarch v1, section 5.2"),
)
