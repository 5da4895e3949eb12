"""Moves of samples between microbatches and replicas, of their order and of microbatch sizes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from workbench.plan.plan import Microbatch
from workbench.planner.groupings import (
    Grouping,
    grouped_again,
    groups_of,
    replicas_of,
    resized,
    round_robin,
)
from workbench.search.joint.choice import Choice
from workbench.search.joint.grouping import exchanged, moved, reordered
from workbench.search.joint.move import Space
from workbench.search.joint.question import Question


@dataclass(frozen=True, slots=True)
class Exchange:
    """Swap two samples."""

    question: ClassVar[Question] = Question.GROUPING
    first: int
    second: int

    def apply(self, space: Space, choice: Choice) -> Choice:
        return regrouped(choice, exchanged(space.job, choice.microbatches, self.first, self.second))


@dataclass(frozen=True, slots=True)
class MoveSample:
    """Move a sample to another microbatch of every module; deferred: of the LLM alone."""

    question: ClassVar[Question] = Question.GROUPING
    sample: int
    replica: int
    index: int
    deferred: bool = False

    def apply(self, space: Space, choice: Choice) -> Choice:
        modules = [space.job.model.llm.name] if self.deferred else [m.name for m in space.job.model.modules]
        target = self.replica, self.index
        return regrouped(choice, moved(space.job, choice.microbatches, self.sample, target, modules=modules))


@dataclass(frozen=True, slots=True)
class Reorder:
    """Move a microbatch of a replica to another index, in every module."""

    question: ClassVar[Question] = Question.GROUPING
    replica: int
    start: int
    end: int

    def apply(self, space: Space, choice: Choice) -> Choice:
        microbatches = reordered(space.job, choice.microbatches, self.replica, self.start, self.end)
        return regrouped(choice, microbatches)


@dataclass(frozen=True, slots=True)
class Resize:
    """Form microbatches of `samples` samples each, in the same order."""

    question: ClassVar[Question] = Question.GROUPING
    samples: int

    def apply(self, space: Space, choice: Choice) -> Choice:
        groups = resized(groups_of(space.job, choice.microbatches), self.samples)
        replicas = replicas_of(space.job, choice.microbatches)
        return regrouped(choice, round_robin(space.job, groups, replicas))


@dataclass(frozen=True, slots=True)
class Regroup:
    """Group all samples anew by a rule, into as many microbatches as before."""

    question: ClassVar[Question] = Question.GROUPING
    way: Grouping

    def apply(self, space: Space, choice: Choice) -> Choice:
        return regrouped(choice, grouped_again(space.job, space.cost, self.way, choice.microbatches))


def regrouped(choice: Choice, microbatches: Sequence[Microbatch]) -> Choice:
    """Replace the microbatches; the choice's own programs stay if the microbatches' indices do."""
    keys = {(each.module, each.replica, each.index) for each in microbatches}
    same = keys == {(each.module, each.replica, each.index) for each in choice.microbatches}
    programs = choice.programs if same else ()
    return replace(choice, microbatches=tuple(microbatches), programs=programs, token_shards=())
