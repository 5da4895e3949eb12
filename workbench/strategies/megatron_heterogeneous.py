"""Megatron with a layout per module: on islands of ranks (NC), or all on the same ranks (C).

Source: Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training", section 3:
disjoint rank sets under graph-aware 1F1B, or the same ranks in three phases; section 4. Differs: the paper
sets all degrees by hand and gives encoders 8 GPUs. Here, on islands, stage counts that the job leaves open
are searched, and open stages are balanced by the gradients that are computed. Or all degrees, and the
islands' sizes, are searched exactly over the step model's layouts, where colocated encoders have one stage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage
from workbench.planner.assembly import (
    check_ranks,
    dp_of,
    in_phases,
    layout_of,
    module_stages,
    num_ranks,
    shared_draft,
)
from workbench.planner.block_cuts import Cuts
from workbench.planner.cut_candidates import CutCandidates
from workbench.planner.layout_choice import LayoutChoice, Mode
from workbench.planner.layout_plan import searched_plans
from workbench.planner.planner_cost import FROZEN_AWARE
from workbench.planner.rank_spans import Span, placement_of
from workbench.planner.stage_counts import Progress, best_counts
from workbench.planner.strategy_spec import KARNATI, Chooser, First, OwnSpace, StrategySpec

NAME, COLOCATED_NAME, ISLANDS_NAME = "megatron-heterogeneous", "megatron-colocated", "megatron-islands"


def shortlist(job: Job, cost: CostModel, progress: Progress, most: int) -> tuple[Plan, ...]:
    """Every module with its own tp, cp, pp and dp, one after the other or from its rank_offset on.

    Modules with equal rank_offsets share their ranks, each with its own grid; grids whose stages partly
    share ranks need a schedule that supports this.

    Raises:
        ValueError: more stages than layers, a batch that cannot be split, too few ranks, rank sets that
            overlap without being equal or leave a gap, modules on the same ranks without pp.
    """
    if _shares_ranks(job):
        _check_all_given(job)
    candidates = CutCandidates(job, shared_draft(job, NAME), cost, FROZEN_AWARE, grid_stages)
    return best_counts(candidates, progress, most)


plan = First(shortlist)


def shortlist_colocated(job: Job, cost: CostModel, progress: Progress, most: int) -> tuple[Plan, ...]:
    """Every module on all ranks: the fastest layout that fits, then the runners-up of its search.

    Layouts of the job are kept.

    Raises:
        ValueError: no layout fits, or a schedule that is neither 1F1B nor one in phases.
    """
    job, build = in_phases(job, COLOCATED_NAME), partial(_built, COLOCATED_NAME, cost)
    return searched_plans(job, cost, Mode.COLOCATED, build, progress, most)


plan_colocated = First(shortlist_colocated)


def shortlist_islands(job: Job, cost: CostModel, progress: Progress, most: int) -> tuple[Plan, ...]:
    """As `shortlist_colocated`, for layouts on islands: how many ranks each module gets, and every degree on
    them.

    Raises:
        ValueError: no layout fits.
    """
    return searched_plans(job, cost, Mode.APART, partial(_built, ISLANDS_NAME, cost), progress, most)


plan_islands = First(shortlist_islands)


def _built(name: str, cost: CostModel, job: Job, _: LayoutChoice) -> Plan:
    return replace(plan(job, cost), strategy=name)


def grid_stages(job: Job, cuts: Mapping[str, Cuts]) -> tuple[Stage, ...]:
    """The modules' stages; within a module tp varies fastest, then cp, dp and pp.

    Source: Megatron-LM's default order of ranks, tp-cp-ep-dp-pp.

    Raises:
        ValueError: rank sets that overlap without being equal or leave a gap, or more ranks than
            there are.
    """
    stages: list[Stage] = []
    spans: list[Span] = []
    for module in job.model.modules:
        layout, dp = layout_of(job, module.name), dp_of(job, module.name)
        end = spans[-1].end if spans else 0
        first = end if layout.rank_offset is None else layout.rank_offset
        start = len(stages)
        for replica in range(dp):
            stages += module_stages(
                job,
                module.name,
                cuts[module.name],
                replica=replica,
                first_id=len(stages),
                first_rank=first + replica * layout.stage_ranks,
                blocks_apart=dp,
            )
        spans.append(Span(module.name, first, num_ranks(stages[start:])))
    if _shares_ranks(job):
        _check_equal_spans(job, spans)
    placement_of(spans, [pool.first_rank for pool in job.pools])
    apart = () if _shares_ranks(job) else [span.num_ranks for span in spans]
    check_ranks(job, max(span.end for span in spans), apart)
    return tuple(stages)


def _shares_ranks(job: Job) -> bool:
    offsets = {layout_of(job, module.name).rank_offset for module in job.model.modules}
    return len(job.model.modules) > 1 and len(offsets) == 1 and None not in offsets


def _check_equal_spans(job: Job, spans: Sequence[Span]) -> None:
    """Check that modules on the same ranks have equally many; the error names the dp that gives that."""
    most = max(spans, key=lambda span: span.num_ranks)
    for span in spans:
        if span.num_ranks == most.num_ranks:
            continue
        per_dp = span.num_ranks // dp_of(job, span.module)
        nearest = f"nearest: dp {most.num_ranks // per_dp} for {span.module!r}"
        if most.num_ranks % per_dp:
            dp = max(1, round(most.num_ranks / per_dp))
            nearest = (
                f"no dp of {per_dp} ranks each gives {most.num_ranks}; nearest: {dp * per_dp} with dp {dp}"
            )
        raise ValueError(
            f"{NAME}: modules on the same ranks need equally many, {span.module!r} has {span.num_ranks} "
            f"ranks, {most.module!r} {most.num_ranks}; {nearest}"
        )


def _check_all_given(job: Job) -> None:
    for module in job.model.modules:
        layout = layout_of(job, module.name)
        if layout.pp is None and not layout.stage_layers:
            raise ValueError(
                f"{NAME}: modules on the same ranks need pp, module {module.name!r} has none; nearest: pp 1"
            )


SPEC = StrategySpec(
    name=NAME,
    planner=plan,
    shortlist=shortlist,
    summary="the layouts of the job, modules on separate ranks or all on the same ranks",
    own_space=OwnSpace(degrees=Chooser.EACH, where=KARNATI),
)

SPEC_COLOCATED = StrategySpec(
    name=COLOCATED_NAME,
    planner=plan_colocated,
    shortlist=shortlist_colocated,
    searches_layouts=True,
    summary="every module on all ranks, with its own layout; layouts searched",
    own_space=OwnSpace(degrees=Chooser.ITSELF, where=KARNATI, says_memory=True, effort=8.0),
    placing=None,
)

SPEC_ISLANDS = StrategySpec(
    name=ISLANDS_NAME,
    planner=plan_islands,
    shortlist=shortlist_islands,
    searches_layouts=True,
    summary="every module on separate ranks; layouts searched",
    own_space=OwnSpace(degrees=Chooser.ITSELF, where=KARNATI, says_memory=True, effort=15.0),
)
