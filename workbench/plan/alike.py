"""Replicas of a plan that are equal but for names: what is derived of one of them holds for the others."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from workbench.plan.kept import kept
from workbench.plan.plan import Boundaries, Plan, Program, Stage
from workbench.schedule.action import Action


class Replica(NamedTuple):
    """One replica of every module; equal replicas have equal parts at equal places.

    Args:
        number: in the plan.
        stages: their ids, in the plan's order.
        ranks: ascending.
        samples: in the order in which its microbatches come to them.
        programs: of its ranks, in the plan's order.
    """

    number: int
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    samples: tuple[int, ...]
    programs: tuple[Program, ...]

    def actions_as(self, other: "Replica") -> dict[Action, Action]:
        """From every action of this replica's programs to that of an equal one."""
        pairs = zip(self.programs, other.programs, strict=True)
        return {a: b for mine, theirs in pairs for a, b in zip(mine.actions, theirs.actions, strict=True)}


@kept
def alike_replicas(plan: Plan) -> tuple[tuple[Replica, ...], ...]:
    """Sets of equal replicas, each in ascending order, the sets in that of their first ones.

    Equal means: stages, ranks, samples and programs of one become those of the other when each is named by
    its place, and stages and ranks keep their order, by which ties are broken. No two replicas share
    ranks or samples, so no row leaves a replica, and its rows, their order and its memory follow from these
    alone; of sharded weights every rank has a part of one size. Empty where replicas are not by themselves
    in that way, or there are no two of them. Links and devices are not compared.

    Complexity: O(items + actions + ranks).
    """
    numbers = {plan.replicas(module.name) for module in plan.model.modules}
    is_brokered = plan.settings.boundaries is Boundaries.BROKERS  # a row passes another replica's rank
    if len(numbers) > 1 or len(next(iter(numbers))) < 2 or plan.token_shards or is_brokered:
        return ()
    replicas = _replicas(plan, next(iter(numbers)))
    if replicas is None:
        return ()
    found: dict[object, list[Replica]] = {}
    for replica in replicas:
        found.setdefault(_shape(plan, replica), []).append(replica)
    return tuple(map(tuple, found.values()))


@kept
def first_of_all(plan: Plan) -> Plan:
    """The plan with its first replica alone, where all others equal it; else the plan itself."""
    sets = alike_replicas(plan)
    return part_of(plan, [sets[0][0].number]) if len(sets) == 1 and len(sets[0]) > 1 else plan


def part_of(plan: Plan, replicas: Collection[int]) -> Plan:
    """The plan with these replicas alone."""
    stages = tuple(stage for stage in plan.stages if stage.replica in replicas)
    ranks = {rank for stage in stages for rank in stage.flat_ranks}
    return replace(
        plan,
        stages=stages,
        microbatches=tuple(m for m in plan.microbatches if m.replica in replicas),
        programs=tuple(program for program in plan.programs if ranks.issuperset(program.ranks)),
    )


def _replicas(plan: Plan, numbers: tuple[int, ...]) -> list[Replica] | None:
    """Each with its stages, ranks, samples and programs; None where two share any of them."""
    stages: dict[int, list[Stage]] = {number: [] for number in numbers}
    samples: dict[int, dict[int, None]] = {number: {} for number in numbers}
    programs: dict[int, list[Program]] = {number: [] for number in numbers}
    for stage in plan.stages:
        stages[stage.replica].append(stage)
    for microbatch in plan.microbatches:
        if microbatch.replica not in samples:
            return None
        samples[microbatch.replica].update((item.sample, None) for item in microbatch.items)
    ranks = {number: {rank for s in stages[number] for rank in s.flat_ranks} for number in numbers}
    replica_of = {stage.id: stage.replica for stage in plan.stages}
    for program in plan.programs:
        of = {replica_of.get(action.stage) for action in program.actions if action.stage is not None}
        number = next(iter(of), None)
        if number is None or len(of) > 1 or not ranks[number].issuperset(program.ranks):
            return None
        programs[number].append(program)
    if any(sum(map(len, held.values())) > len(set().union(*held.values())) for held in (ranks, samples)):
        return None
    return [
        Replica(
            number,
            tuple(stage.id for stage in stages[number]),
            tuple(sorted(ranks[number])),
            tuple(samples[number]),
            tuple(programs[number]),
        )
        for number in numbers
    ]


def _shape(plan: Plan, replica: Replica) -> object:
    """What must be equal: everything of the replica by places instead of names."""
    stage_at = {stage: place for place, stage in enumerate(sorted(replica.stages))}
    rank_at = {rank: place for place, rank in enumerate(replica.ranks)}
    sample_at = {sample: place for place, sample in enumerate(replica.samples)}
    return (
        tuple(_stage_shape(plan.stage[stage], stage_at, rank_at) for stage in replica.stages),
        tuple((plan.sample[sample].segments, plan.sample[sample].mask) for sample in replica.samples),
        tuple(
            tuple(
                (m.index, tuple(tuple((sample_at[item.sample], item.k) for item in row) for row in m.rows))
                for m in plan.microbatches_of.get((module.name, replica.number), ())
            )
            for module in plan.model.modules
        ),
        tuple(_program_shape(program, stage_at, rank_at) for program in replica.programs),
    )


def _stage_shape(stage: Stage, stage_at: Mapping[int, int], rank_at: Mapping[int, int]) -> object:
    grid = tuple(tuple(rank_at[rank] for rank in row) for row in stage.ranks)
    return stage_at[stage.id], stage.module, stage.layers, grid, stage.ep


def _program_shape(program: Program, stage_at: Mapping[int, int], rank_at: Mapping[int, int]) -> object:
    ranks = tuple(rank_at[rank] for rank in program.ranks)
    actions = tuple(
        (-1 if action.stage is None else stage_at[action.stage], action.kind, action.microbatch)
        for action in program.actions
    )
    return ranks, actions
