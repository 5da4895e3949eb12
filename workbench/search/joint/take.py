"""A move that takes the answer to one question from another strategy's plan."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from workbench.planner.groupings import groups_of, replicas_of, round_robin
from workbench.search.joint.choice import Choice
from workbench.search.joint.grouping_moves import regrouped
from workbench.search.joint.layout_moves import Reschedule
from workbench.search.joint.move import Space
from workbench.search.joint.question import Question
from workbench.search.joint.setting_moves import with_settings
from workbench.search.joint.starts import OPEN


@dataclass(frozen=True, slots=True)
class Take:
    """Replace the choice's answer to a question by that of a strategy's plan."""

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
    """The other choice's stages; samples keep their order, and the schedule if it uses the same layout."""
    microbatches, replicas = choice.microbatches, replicas_of(space.job, other.microbatches)
    if replicas_of(space.job, microbatches) != replicas:
        microbatches = round_robin(space.job, groups_of(space.job, microbatches), replicas)
    schedule, other_schedule = choice.schedule, other.schedule
    same_layout = (
        schedule.virtual_stages == other_schedule.virtual_stages
        and schedule.spec.layout is other_schedule.spec.layout
    )
    supports_sharing = schedule.spec.shares_ranks_in_part or not other_schedule.spec.shares_ranks_in_part
    return replace(
        choice,
        stages=other.stages,
        microbatches=microbatches,
        schedule=schedule if same_layout and supports_sharing else other_schedule,
        programs=(),
        token_shards=(),
    )


def _with_order(space: Space, choice: Choice, other: Choice) -> Choice:
    rescheduled = Reschedule(other.schedule).apply(space, choice)
    same_indices = _indices(other) == _indices(rescheduled) and len(other.stages) == len(rescheduled.stages)
    return replace(rescheduled, programs=other.programs if same_indices else ())


def _with_grouping(space: Space, choice: Choice, other: Choice) -> Choice:
    microbatches, replicas = other.microbatches, replicas_of(space.job, choice.microbatches)
    if replicas_of(space.job, microbatches) != replicas:
        microbatches = round_robin(space.job, groups_of(space.job, microbatches), replicas)
    return regrouped(choice, microbatches)


def _indices(choice: Choice) -> set[tuple[str, int, int]]:
    return {(each.module, each.replica, each.index) for each in choice.microbatches}


def _with_settings(space: Space, choice: Choice, other: Choice, question: Question) -> Choice:
    result = choice
    for module in space.job.model.modules:
        settings, other_settings = choice.settings.of(module.name), other.settings.of(module.name)
        if question is Question.TOKENS:
            changed = replace(settings, key_exchange=other_settings.key_exchange)
        else:
            changed = replace(other_settings, key_exchange=settings.key_exchange)
        result = with_settings(result, changed)
    if question is Question.TOKENS:
        return replace(result, tokens=other.tokens, token_shards=())
    return result


def take_moves(space: Space, fixed: Mapping[Question, str]) -> tuple[Take, ...]:
    """Moves that take the fixed answers of strategies, from their plans with layouts open if they have no
    other.

    Raises:
        ValueError: a strategy without a plan.
    """
    moves = []
    for question, name in fixed.items():
        start = name if name in space.starts else name + OPEN
        if start not in space.starts:
            raise ValueError(f"joint search: {question} cannot be {name}'s, it has no plan of the job")
        moves.append(Take(question, start))
    return tuple(moves)
