"""Encoders colocated: all encoders cut into the same number of stages on the same ranks, then the LLM.

Source: Cornstarch v1 section 2.2, Figures 1c and 2b (Megatron-LM's VLM pipeline), and the
baseline of section 6.1; the ICML version's Table 2 uses the frozen-aware form.
"""

from collections.abc import Mapping

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.job.notations.cornstarch import EncoderPlacing
from workbench.model.model_graph import TEXT
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage
from workbench.planner.assembly import disjoint_stages, draft_plan, layout_of
from workbench.planner.block_cuts import Cuts
from workbench.planner.cut_candidates import CutCandidates
from workbench.planner.planner_cost import FROZEN_AWARE, FROZEN_UNAWARE, PlannerCost
from workbench.planner.stage_counts import Progress, best_counts
from workbench.planner.strategy_spec import Chooser, First, OwnSpace, StrategySpec

NAME, AWARE_NAME = "encoders-colocated", "encoders-colocated-frozen-aware"
ENCODERS = "encoders"  # the stage count that all encoders share


def shortlist(job: Job, cost: CostModel, progress: Progress, most: int) -> tuple[Plan, ...]:
    """The papers' baseline: stages balanced by forward time, as if everything were trainable."""
    return _best(job, cost, NAME, FROZEN_UNAWARE, progress, most)


plan = First(shortlist)


def shortlist_frozen_aware(job: Job, cost: CostModel, progress: Progress, most: int) -> tuple[Plan, ...]:
    """Colocated encoders, stages balanced by forward plus backward (ICML section 5.3)."""
    return _best(job, cost, AWARE_NAME, FROZEN_AWARE, progress, most)


plan_frozen_aware = First(shortlist_frozen_aware)


def _best(
    job: Job, cost: CostModel, name: str, planner_cost: PlannerCost, progress: Progress, most: int
) -> tuple[Plan, ...]:
    _check_layouts(job)
    entry_of = {m.name: ENCODERS if m.modality != TEXT else m.name for m in job.model.modules}
    candidates = CutCandidates(job, draft_plan(job, name), cost, planner_cost, colocated_stages, entry_of)
    return best_counts(candidates, progress, most)


def colocated_stages(job: Job, cuts: Mapping[str, Cuts]) -> tuple[Stage, ...]:
    """The k-th stages of all encoders on one block of ranks, then the LLM's stages."""
    return disjoint_stages(job, cuts, colocated=[module.name for module in job.model.encoders])


def _check_layouts(job: Job) -> None:
    """Check that encoders that share ranks also share pp, tp and cp."""
    layouts = [layout_of(job, module.name) for module in job.model.encoders]
    shapes = {(layout.pp, layout.tp, layout.cp) for layout in layouts}
    if len(shapes) > 1:
        raise ValueError(
            "encoders-colocated: all encoders must have the same pp, tp and cp, got "
            + ", ".join(f"{x.module}: pp {x.pp}, tp {x.tp}, cp {x.cp}" for x in layouts)
        )


SPEC = StrategySpec(
    name=NAME,
    planner=plan,
    shortlist=shortlist,
    summary="all encoders on the same ranks before the LLM, equal stage counts; balanced by forward alone",
    own_space=OwnSpace(degrees=Chooser.ALIKE, where="Cornstarch v1, section 6.1", shares_ranks=True),
    placing=EncoderPlacing.COLOCATED,
)

SPEC_FROZEN_AWARE = StrategySpec(
    name=AWARE_NAME,
    planner=plan_frozen_aware,
    shortlist=shortlist_frozen_aware,
    summary="as encoders-colocated, but balanced by forward plus needed backward",
    own_space=OwnSpace(degrees=Chooser.ALIKE, where="Cornstarch ICML, section 5.3", shares_ranks=True),
    placing=EncoderPlacing.COLOCATED,
    stands_for_placing=True,
)
