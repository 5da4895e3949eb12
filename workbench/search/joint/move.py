"""A move: a change of the answer to one question."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.planner.strategy_spec import Planner
from workbench.search.joint.choice import Choice
from workbench.search.joint.question import Question


@dataclass(frozen=True, slots=True)
class Space:
    """The job, its cost model and the starts that moves are applied within.

    Args:
        job: to plan.
        cost: model of its machine.
        starts: choices that the search starts from, by name.
        planners: strategies that may plan anew during the search, by name.
        varies: whether plans are also judged on other batches, so that a grouping must be a rule for each.
        keeps_front: whether outcomes include the coordinates of the Pareto front.
        counts_ranks: whether a plan on fewer ranks may be better despite a longer step.
    """

    job: Job
    cost: CostModel
    starts: dict[str, Choice]
    planners: Mapping[str, Planner] = field(default_factory=dict)
    counts_ranks: bool = False
    keeps_front: bool = False
    varies: bool = False


class Move(Protocol):
    """A change of a choice."""

    @property
    def question(self) -> Question:
        """The question whose answer it changes."""

    def apply(self, space: Space, choice: Choice) -> Choice:
        """Return the changed choice; ValueError where the change is impossible."""
