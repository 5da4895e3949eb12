"""A move that takes the answer to one question from another strategy's plan."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from workbench.planner.groupings import dealt, groups_of, replicas_of
from workbench.search.joint.choice import Choice
from workbench.search.joint.grouping_moves import regrouped
from workbench.search.joint.layout_moves import Reschedule
from workbench.search.joint.move import Space
from workbench.search.joint.question import Question
from workbench.search.joint.setting_moves import with_settings
from workbench.search.joint.starts import OPEN


@dataclass(frozen=True, slots=True)
class Take:
    """The answer of a strategy's plan to one question, in place of the choice's."""

    question: Question
    start: str

    def apply(self, space: Space, choice: Choice) -> Choice:
        other = space.starts[self.start]
        if self.question is Question.LAYOUT:
            return _with_layout(space, choice, other)
        if self.question is Question.ORDER:
            return _with_order(space, choice, other)
        if self.question is Question.GROUPING:
            return _with_grouping(space, choice, other)
        return _with_settings(space, choice, other, self.question)


def _with_layout(space: Space, choice: Choice, other: Choice) -> Choice:
    """Its stages; samples keep their order, and the schedule stays where it lays out stages alike."""
    microbatches, replicas = choice.microbatches, replicas_of(space.job, other.microbatches)
    if replicas_of(space.job, microbatches) != replicas:
        microbatches = dealt(space.job, groups_of(space.job, microbatches), replicas)
    was, its = choice.schedule, other.schedule
    alike = was.virtual_stages == its.virtual_stages and was.kind.spec.layout is its.kind.spec.layout
    takes = was.kind.spec.shares_ranks_in_part or not its.kind.spec.shares_ranks_in_part
    return replace(
        choice,
        stages=other.stages,
        microbatches=microbatches,
        schedule=was if alike and takes else its,
        programs=(),
        token_shards=(),
    )


def _with_order(space: Space, choice: Choice, other: Choice) -> Choice:
    found = Reschedule(other.schedule).apply(space, choice)
    same = _keys(other) == _keys(found) and len(other.stages) == len(found.stages)
    return replace(found, programs=other.programs if same else ())


def _with_grouping(space: Space, choice: Choice, other: Choice) -> Choice:
    microbatches, replicas = other.microbatches, replicas_of(space.job, choice.microbatches)
    if replicas_of(space.job, microbatches) != replicas:
        microbatches = dealt(space.job, groups_of(space.job, microbatches), replicas)
    return regrouped(choice, microbatches)


def _keys(choice: Choice) -> set[tuple[str, int, int]]:
    return {(each.module, each.replica, each.index) for each in choice.microbatches}


def _with_settings(space: Space, choice: Choice, other: Choice, question: Question) -> Choice:
    found = choice
    for module in space.job.model.modules:
        own, its = choice.settings.of(module.name), other.settings.of(module.name)
        if question is Question.TOKENS:
            changed = replace(own, key_exchange=its.key_exchange)
        else:
            changed = replace(its, key_exchange=own.key_exchange)
        found = with_settings(found, changed)
    if question is Question.TOKENS:
        return replace(found, tokens=other.tokens, token_shards=())
    return found


def taken(space: Space, fixed: Mapping[Question, str]) -> tuple[Take, ...]:
    """Moves that take the answers of strategies; of their plans with layouts open where they have no other.

    Raises:
        ValueError: a strategy without a plan.
    """
    found = []
    for question, name in fixed.items():
        held = name if name in space.starts else name + OPEN
        if held not in space.starts:
            raise ValueError(f"joint search: {question} cannot be {name}'s, it has no plan of the job")
        found.append(Take(question, held))
    return tuple(found)
