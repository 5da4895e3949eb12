"""Moves of layout and order: degrees, placement, schedules, stage boundaries, and forwards run ahead."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

from workbench.job.job import Job
from workbench.model.layer import Layer
from workbench.model.trained import is_trained
from workbench.plan.plan import Program, Sharding
from workbench.plan.stage import Stage
from workbench.planner.assembly import cut
from workbench.planner.block_cuts import even_blocks
from workbench.planner.groupings import groups_of, replicas_of, resized, round_robin
from workbench.planner.layer_cost import believed_layers_s
from workbench.planner.layout_choice import Degrees, degrees_of
from workbench.planner.planner_cost import FROZEN_AWARE
from workbench.schedule.choice import Schedule, rank_block, usual_in_phases
from workbench.schedule.eager import with_eager_forwards
from workbench.search.joint.arrangement import Arrangement, Placement, stages_of
from workbench.search.joint.choice import Choice, build, draft_of
from workbench.search.joint.move import Space
from workbench.search.joint.question import Question


@dataclass(frozen=True, slots=True)
class Arrange:
    """Change degrees or placement; samples keep their order, and their groups if the replicas allow.

    Args:
        samples: per microbatch; None: as many as now, or fewer if there is not one microbatch per replica.
            Replicas that are joined merge their microbatches, and those that are parted divide them.
    """

    question: ClassVar[Question] = Question.LAYOUT
    arrangement: Arrangement
    samples: int | None = None

    def apply(self, space: Space, choice: Choice) -> Choice:
        job = space.job
        replicas = {each.module: each.dp for each in self.arrangement.degrees}
        microbatches, samples = choice.microbatches, self._samples(job, choice)
        if samples is not None or replicas_of(job, microbatches) != replicas:
            groups, most = groups_of(job, microbatches), replicas[job.model.llm.name]
            if samples is not None:
                groups = resized(groups, samples)
            elif len(groups) < most and len(job.batch) % most == 0:
                groups = resized(groups, len(job.batch) // most)
            microbatches = round_robin(job, groups, replicas)
        schedule = choice.schedule
        if self.arrangement.placement is Placement.EVERYWHERE and not schedule.spec.shares_ranks_in_part:
            schedule = usual_in_phases()
        draft = draft_of(job, replace(choice, microbatches=microbatches, stages=()))
        stages = stages_of(job, self.arrangement, schedule, draft, space.cost)
        return replace(
            choice,
            stages=stages,
            microbatches=microbatches,
            schedule=schedule,
            programs=(),
            token_shards=(),
        )

    def _samples(self, job: Job, choice: Choice) -> int | None:
        """Samples per microbatch; None: the groups stay."""
        before = next(stage.joint_replicas for stage in choice.stages if stage.module == job.model.llm.name)
        num_joint = self.arrangement.of(job.model.llm.name).joint_replicas
        if self.samples is not None or num_joint == before:
            return self.samples
        each = max(1, len(job.batch) // len(groups_of(job, choice.microbatches)) // before)
        return each * num_joint


@dataclass(frozen=True, slots=True)
class Reschedule:
    """Change the schedule; if it needs other virtual stages, cut the LLM anew on the same ranks."""

    question: ClassVar[Question] = Question.ORDER
    schedule: Schedule

    def apply(self, space: Space, choice: Choice) -> Choice:
        stages = choice.stages
        if _needs_recut(choice, self.schedule, space.job):
            stages = _recut(space, choice, self.schedule)
        return replace(choice, stages=stages, schedule=self.schedule, programs=(), token_shards=())


def _needs_recut(choice: Choice, schedule: Schedule, job: Job) -> bool:
    current = choice.schedule
    same_layout = current.spec.layout is schedule.spec.layout or schedule.virtual_stages == 1
    return current.virtual_stages != schedule.virtual_stages or not same_layout


def _recut(space: Space, choice: Choice, schedule: Schedule) -> tuple[Stage, ...]:
    llm, job = space.job.model.llm.name, replace(space.job, schedule=schedule)
    draft = draft_of(space.job, choice)
    stages: list[Stage] = [stage for stage in choice.stages if stage.module != llm]
    for replica in draft.replicas(llm):
        chain = draft.chain[llm, replica]
        blocks = list({stage.ranks: stage for stage in chain}.values())
        seconds = _layers_s(space, choice, degrees_of(draft, llm))
        cuts = cut(seconds, len(blocks) * schedule.virtual_stages, llm)

        def block(index: int, num: int = len(cuts)) -> int:
            return rank_block(job.schedule, index, num)

        cuts = even_blocks(seconds, cuts, block) if schedule.virtual_stages > 1 else cuts
        stages += [replace(blocks[block(index)], id=0, layers=layers) for index, layers in enumerate(cuts)]
    order = {module.name: index for index, module in enumerate(space.job.model.modules)}
    stages.sort(key=lambda stage: (stage.replica, order[stage.module], stage.layers))
    return tuple(replace(stage, id=number) for number, stage in enumerate(stages))


def _layers_s(space: Space, choice: Choice, degrees: Degrees) -> tuple[float, ...]:
    """Seconds of a module's layers for a typical microbatch."""
    layout = replace(degrees.layout, pp=None, dp=None)
    job = replace(space.job, layouts=(layout,), settings=choice.settings)
    draft = draft_of(space.job, choice)
    return believed_layers_s(job, draft, space.cost, FROZEN_AWARE.layer_s)[degrees.module]


@dataclass(frozen=True, slots=True)
class ShiftLayer:
    """Move one layer across the boundary after a module's `place`-th stage: by 1 to the front, by -1 back."""

    question: ClassVar[Question] = Question.ORDER
    module: str
    place: int
    by: int

    def apply(self, space: Space, choice: Choice) -> Choice:
        chains: dict[int, list[Stage]] = {}
        for stage in sorted(choice.stages, key=lambda stage: stage.layers):
            if stage.module == self.module:
                chains.setdefault(stage.replica, []).append(stage)
        changed: dict[int, Stage] = {}
        for chain in chains.values():
            if self.place + 1 >= len(chain):
                raise ValueError(f"{self.module!r} has {len(chain)} stages, none behind {self.place}")
            front, behind = chain[self.place : self.place + 2]
            border = front.layers[1] + self.by
            if not front.layers[0] < border < behind.layers[1]:
                raise ValueError(f"a stage of {self.module!r} would have no layers")
            changed[front.id] = replace(front, layers=(front.layers[0], border))
            changed[behind.id] = replace(behind, layers=(border, behind.layers[1]))
        return replace(choice, stages=tuple(changed.get(stage.id, stage) for stage in choice.stages))


@dataclass(frozen=True, slots=True)
class CutStages:
    """Cut each trained stage into pieces on its own ranks, to overlap gradient reduction with its backward.

    A reduction starts when its stage's last backward has ended, so that a stage in one piece exposes all of
    it. Stages with sharded weights are already one layer each.
    """

    question: ClassVar[Question] = Question.ORDER
    pieces: int

    def apply(self, space: Space, choice: Choice) -> Choice:
        if (num := choice.schedule.virtual_stages) > 1:
            raise ValueError(f"{num} virtual stages lie where their schedule wants them; nearest: 1")
        stages: list[Stage] = []
        for stage in _merged(choice.stages):
            first, last = stage.layers
            layers = space.job.model.module(stage.module).layers[first:last]
            pieces = min(self.pieces, len(layers)) if self._cuts(choice, stage, layers) else 1
            borders = [first + len(layers) * piece // pieces for piece in range(pieces + 1)]
            stages += [
                stage.holding(piece_layers, number)
                for number, piece_layers in enumerate(pairwise(borders), len(stages))
            ]
        return replace(choice, stages=tuple(stages), programs=(), token_shards=())

    def _cuts(self, choice: Choice, stage: Stage, layers: Sequence[Layer]) -> bool:
        is_sharded = choice.settings.of(stage.module).sharding is Sharding.PARAMETERS
        return not is_sharded and any(map(is_trained, layers))


def _merged(stages: Sequence[Stage]) -> list[Stage]:
    """Merge consecutive stages on the same ranks."""
    merged: list[Stage] = []
    for stage in stages:
        last = merged[-1] if merged else stage
        if last.layers[1] == stage.layers[0] and last.holding(stage.layers, stage.id) == stage:
            merged[-1] = last.holding((last.layers[0], stage.layers[1]), last.id)
        else:
            merged.append(stage)
    return merged


@dataclass(frozen=True, slots=True)
class RunEncodersAhead:
    """Run forwards of stages that read no other module `lead` more microbatches ahead."""

    question: ClassVar[Question] = Question.ORDER
    lead: int

    def apply(self, space: Space, choice: Choice) -> Choice:
        fed = {edge.target for edge in space.job.model.edges}
        eager: dict[int, dict[int, int]] = {s.id: {} for s in choice.stages if s.module not in fed}
        plan = build(space.job, choice, space.cost)
        if plan.stages != choice.stages:
            raise ValueError("stages whose weights are sharded keep the order of their schedule")
        programs = tuple(
            Program(ranks=program.ranks, actions=with_eager_forwards(program.actions, eager, self.lead))
            for program in plan.programs
        )
        return replace(choice, programs=programs)
