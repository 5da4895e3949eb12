"""Megatron on islands (NC), searched: how many ranks each module gets, and every degree on them.

Source: Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training",
sections 3.1 and 4.
Differs: the paper gives encoders 8 GPUs; here the size of the islands is searched too.
"""

from dataclasses import replace

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.plan.plan import Plan
from workbench.planner.layout_choice import LayoutChoice, Mode
from workbench.planner.layout_plan import searched_plans
from workbench.planner.own_space import KARNATI, Chooser, OwnSpace
from workbench.planner.stage_counts import Progress, silent
from workbench.planner.strategy_spec import StrategySpec
from workbench.strategies import megatron_heterogeneous

NAME = "megatron-islands"


def plan(job: Job, cost: CostModel, progress: Progress = silent) -> Plan:
    """The fastest layout on islands under the job's memory; layouts that the job gives are kept.

    Raises:
        ValueError: no layout fits.
    """
    return shortlist(job, cost, progress, 1)[0]


def shortlist(job: Job, cost: CostModel, progress: Progress, most: int) -> tuple[Plan, ...]:
    """The layout of `plan`, then those that its search held best before; errors as there."""

    def build(found: Job, _: LayoutChoice) -> Plan:
        return replace(megatron_heterogeneous.plan(found, cost), strategy=NAME)

    return searched_plans(job, cost, Mode.APART, build, progress, most)


SPEC = StrategySpec(
    name=NAME,
    planner=plan,
    shortlist=shortlist,
    searches_layouts=True,
    summary="searched layouts: every module on an island of its own",
    own_space=OwnSpace(degrees=Chooser.ITSELF, where=KARNATI, says_memory=True, effort=15.0),
)
