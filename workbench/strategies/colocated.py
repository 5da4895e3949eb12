"""Megatron colocated (C): every module on all ranks under a grid of its own, in three phases, searched.

Source: Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training",
sections 3.2, 3.3 and 4.
Differs: the paper tunes by trying; here the search is exact over the step model's layouts, and encoders
have one stage.
"""

from dataclasses import replace

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.plan.plan import Plan
from workbench.planner.assembly import in_phases
from workbench.planner.layout_choice import LayoutChoice, Mode
from workbench.planner.layout_plan import searched_plans
from workbench.planner.own_space import KARNATI, Chooser, OwnSpace
from workbench.planner.stage_counts import Progress, silent
from workbench.planner.strategy_spec import StrategySpec
from workbench.strategies import megatron_heterogeneous

NAME = "megatron-colocated"


def plan(job: Job, cost: CostModel, progress: Progress = silent) -> Plan:
    """The fastest colocated layout under the job's memory; layouts that the job gives are kept.

    Raises:
        ValueError: no layout fits, or a schedule that is neither 1F1B nor one in phases.
    """
    return shortlist(job, cost, progress, 1)[0]


def shortlist(job: Job, cost: CostModel, progress: Progress, most: int) -> tuple[Plan, ...]:
    """The layout of `plan`, then those that its search held best before; errors as there."""
    job = in_phases(job, NAME)

    def build(found: Job, _: LayoutChoice) -> Plan:
        return replace(megatron_heterogeneous.plan(found, cost), strategy=NAME)

    return searched_plans(job, cost, Mode.COLOCATED, build, progress, most)


SPEC = StrategySpec(
    name=NAME,
    planner=plan,
    shortlist=shortlist,
    searches_layouts=True,
    summary="a searched layout: every module over all ranks",
    own_space=OwnSpace(degrees=Chooser.ITSELF, where=KARNATI, says_memory=True, effort=8.0),
    placing=None,
)
