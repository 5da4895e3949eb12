"""The layouts that a plan's stages have."""

from enum import StrEnum

from workbench.job.job import ModuleLayout
from workbench.plan.plan import Plan


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
        chain = plan.chain[module.name, plan.replicas(module.name)[0]]
        dp = len(plan.replicas(module.name))
        ranks = [rank for stage in plan.stages if stage.module == module.name for rank in stage.flat_ranks]
        found.append(
            ModuleLayout(
                module=module.name,
                pp=len({stage.flat_ranks for stage in chain}),
                tp=chain[0].tp,
                cp=chain[0].cp,
                ep=chain[0].ep,
                dp=None if placing is Placing.LEFT or dp == replicas else dp,
                rank_offset=min(ranks) if placing is Placing.SAID else None,
            )
        )
    return tuple(found)
