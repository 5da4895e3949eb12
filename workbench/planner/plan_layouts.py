"""The layouts that a plan's stages have."""

from dataclasses import replace
from enum import StrEnum

from workbench.job.job import ModuleLayout
from workbench.plan.plan import Plan
from workbench.planner.layout_choice import degrees_of


class Placing(StrEnum):
    """Whether layouts say where a module's ranks start and how many replicas it has, or leave that open."""

    LEFT = "left to the strategy"
    SAID = "said"


def layouts_of(plan: Plan, replicas: int, placing: Placing) -> tuple[ModuleLayout, ...]:
    """Of every module: what its stages are.

    Where places are said, so are replicas of a module's own, which are not `replicas` in number.
    """
    found = []
    for module in plan.model.modules:
        layout = degrees_of(plan, module.name).layout
        ranks = [rank for stage in plan.stages if stage.module == module.name for rank in stage.flat_ranks]
        found.append(
            replace(
                layout,
                dp=None if placing is Placing.LEFT or layout.dp == replicas else layout.dp,
                rank_offset=min(ranks) if placing is Placing.SAID else None,
            )
        )
    return tuple(found)
