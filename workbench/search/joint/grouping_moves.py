"""Moves of samples: between microbatches and replicas, in order and in number."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar

from workbench.balance.microbatches.assignment import hierarchical_assignment
from workbench.balance.microbatches.reorder import reorder_samples
from workbench.balance.tokens.policies import longest_first_equal_counts
from workbench.plan.plan import Microbatch
from workbench.planner.sample_work import sample_work
from workbench.search.joint.choice import Choice
from workbench.search.joint.grouping import (
    Group,
    dealt,
    exchanged,
    groups_of,
    llm_of,
    moved,
    permuted,
    replicas_of,
    resized,
)
from workbench.search.joint.move import Space
from workbench.search.joint.question import Question


@dataclass(frozen=True, slots=True)
class Exchange:
    """Two samples in each other's places."""

    question: ClassVar[Question] = Question.GROUPING
    first: int
    second: int

    def apply(self, space: Space, choice: Choice) -> Choice:
        return regrouped(choice, exchanged(space.job, choice.microbatches, self.first, self.second))


@dataclass(frozen=True, slots=True)
class MoveSample:
    """A sample into another microbatch of every module; deferred: of the LLM alone."""

    question: ClassVar[Question] = Question.GROUPING
    sample: int
    replica: int
    index: int
    deferred: bool = False

    def apply(self, space: Space, choice: Choice) -> Choice:
        modules = [llm_of(space.job)] if self.deferred else [m.name for m in space.job.model.modules]
        target = self.replica, self.index
        return regrouped(choice, moved(space.job, choice.microbatches, self.sample, target, modules=modules))


@dataclass(frozen=True, slots=True)
class Reorder:
    """A microbatch of a replica taken out and put in at another index, in every module."""

    question: ClassVar[Question] = Question.GROUPING
    replica: int
    start: int
    end: int

    def apply(self, space: Space, choice: Choice) -> Choice:
        def order(index: int) -> int:
            if index == self.start:
                return self.end
            if self.start < index <= self.end:
                return index - 1
            return index + 1 if self.end <= index < self.start else index

        return regrouped(choice, permuted(choice.microbatches, self.replica, order))


@dataclass(frozen=True, slots=True)
class Resize:
    """Microbatches of so many samples each, in the same order."""

    question: ClassVar[Question] = Question.GROUPING
    samples: int

    def apply(self, space: Space, choice: Choice) -> Choice:
        groups = resized(groups_of(space.job, choice.microbatches), self.samples)
        replicas = replicas_of(space.job, choice.microbatches)
        return regrouped(choice, dealt(space.job, groups, replicas))


class Grouping(StrEnum):
    """Named ways to group a batch."""

    ARRIVAL = "as they came"
    HEAVIEST_FIRST = "heaviest first"
    LIGHTEST_FIRST = "lightest first"
    EVEN_REPLICAS = "even replicas"
    EVEN = "even microbatches"


@dataclass(frozen=True, slots=True)
class Regroup:
    """All samples grouped anew by a named way, as many microbatches as before."""

    question: ClassVar[Question] = Question.GROUPING
    way: Grouping

    def apply(self, space: Space, choice: Choice) -> Choice:
        job = space.job
        replicas = replicas_of(job, choice.microbatches)
        groups = _grouped(space, self.way, groups_of(job, choice.microbatches), replicas[llm_of(job)])
        return regrouped(choice, dealt(job, groups, replicas))


def _grouped(space: Space, way: Grouping, was: Sequence[Group], replicas: int) -> tuple[Group, ...]:
    job = space.job
    ids = [sample.id for sample in job.batch]
    size = max(1, len(ids) // len(was))
    work = sample_work(job, space.cost)
    whole = [encoder_s + llm_s for encoder_s, llm_s in zip(*work, strict=True)]
    heaviest = sorted(range(len(ids)), key=lambda place: (-whole[place], place))
    if way is Grouping.EVEN:
        found = hierarchical_assignment(
            work.encoder_s, work.llm_s, num_replicas=replicas, num_microbatches=max(1, len(was) // replicas)
        )
        rounds = zip(*(each.llm for each in found), strict=False)
        groups = [tuple(ids[place] for place in held) for each in rounds for held in each if held]
        if sorted(member for group in groups for member in group) != sorted(ids):
            raise ValueError("replicas have unequal numbers of even microbatches")
        return tuple(groups)
    if way is Grouping.EVEN_REPLICAS:
        held = reorder_samples(whole, replicas, longest_first_equal_counts)
        heaviest = [
            place
            for start in range(0, len(held[0]), size)
            for own in held
            for place in own[start : start + size]
        ]
    in_order = {
        Grouping.ARRIVAL: list(range(len(ids))),
        Grouping.HEAVIEST_FIRST: heaviest,
        Grouping.LIGHTEST_FIRST: heaviest[::-1],
        Grouping.EVEN_REPLICAS: heaviest,
    }[way]
    return resized([tuple(ids[place] for place in in_order)], size)


def regrouped(choice: Choice, microbatches: Sequence[Microbatch]) -> Choice:
    """Other microbatches; an order of the choice's own stays where their numbers are the same."""
    keys = {(each.module, each.replica, each.index) for each in microbatches}
    same = keys == {(each.module, each.replica, each.index) for each in choice.microbatches}
    programs = choice.programs if same else ()
    return replace(choice, microbatches=tuple(microbatches), programs=programs, token_shards=())
