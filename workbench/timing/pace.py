"""How many times as long passes take in a running plan as their layers do alone in a loop."""

from workbench.cost.profile import Profile
from workbench.plan.plan import Plan, Stage
from workbench.schedule.action import Pass


def pace(plan: Plan, stage: Stage, profile: Profile, kind: Pass) -> float:
    """Of a stage's passes of one kind.

    Where all stages of a replica are on the same ranks, no messages come and go between its passes, which
    then find caches and cores as a loop does.

    Complexity: O(stages) where the profile tells the two apart, else O(1).
    """
    if not profile.without_messages:
        return profile.pipeline_factor(kind)
    ranks = {other.flat_ranks for other in plan.stages if other.replica == stage.replica}
    return profile.pipeline_factor(kind) if len(ranks) > 1 else profile.alone_factor(kind)
