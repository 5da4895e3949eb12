"""What a move is: a change of the answer to one question."""

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
    """What moves are of.

    Args:
        job: to plan.
        cost: its machine.
        starts: choices that a search starts from, by strategy.
        planners: of strategies that may plan anew, by name.
        varies: whether plans are judged by other batches too, so that a grouping counts as a rule for each.
        keeps_front: whether outcomes say what plans cost besides their value.
        counts_ranks: whether a plan on fewer ranks may be better, though its step takes longer.
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
        """Whose answer it changes."""

    def apply(self, space: Space, choice: Choice) -> Choice:
        """The choice changed; ValueError where it cannot be."""
