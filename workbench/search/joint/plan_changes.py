"""Changes of a plan that no strategy makes again: every single move of the joint search from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.plan.plan import Plan
from workbench.search.joint.arrangement import arrangement_of
from workbench.search.joint.choice import Choice, choice_of, draft_of
from workbench.search.joint.evaluate import changed, plan_of
from workbench.search.joint.move import Move, Space
from workbench.search.joint.proposals import in_turn, single_moves
from workbench.search.joint.question import Question


class MoveChange(NamedTuple):
    """A move as a change of a plan.

    Args:
        kind: the question whose answer it changes.
        about: the move in words.
        move: itself.
    """

    kind: Question
    about: str
    move: Move


@dataclass(frozen=True, slots=True)
class MoveOrigin:
    """A plan's answers, and the space in which moves change them."""

    space: Space
    choice: Choice

    def moves(self) -> Sequence[Move]:
        """All moves from the plan, but for regroupings of single samples: each once, kinds in turn."""
        job, choice = self.space.job, self.choice
        draft = draft_of(job, choice)
        arrangement = arrangement_of(job, choice.stages, choice.schedule, draft, self.space.cost)
        return in_turn(list(dict.fromkeys(single_moves(self.space, choice, draft, arrangement))))

    def planned(self, change: MoveChange) -> Plan:
        """The plan after a move; ValueError where the move is impossible."""
        return plan_of(self.space, changed(self.space, self.choice, (change.move,)))


def move_origin_of(plan: Plan, job: Job, cost: CostModel) -> MoveOrigin:
    """The origin of a plan of this job. Complexity: that of `choice_of`."""
    return MoveOrigin(Space(job, cost, {}), choice_of(job, plan, cost))
