"""What a move is: a change of the answer to one question."""

from dataclasses import dataclass
from typing import Protocol

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.search.joint.choice import Choice
from workbench.search.joint.question import Question


@dataclass(frozen=True, slots=True)
class Space:
    """What moves are of: a job on a machine, and the choices that a search starts from, by strategy."""

    job: Job
    cost: CostModel
    starts: dict[str, Choice]


class Move(Protocol):
    """A change of a choice."""

    @property
    def question(self) -> Question:
        """Whose answer it changes."""

    def apply(self, space: Space, choice: Choice) -> Choice:
        """The choice changed; ValueError where it cannot be."""
