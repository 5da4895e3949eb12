"""Rounds of sharded weights: when ranks gather, use, free and reduce them."""

from collections.abc import Collection, Mapping, Sequence
from difflib import SequenceMatcher
from enum import StrEnum
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

from workbench.schedule.action import COMPUTE, FSDP, MEANING, Action, Pass, TaskKind
from workbench.schedule.parts import Group, Programs


class ReshardAfter(StrEnum):
    """How long gathered weights stay, and with them whole gradients."""

    PASS = "pass"  # every forward and every backward gathers
    BACKWARD = "backward"  # a forward's weights stay for its backward
    STEP = "step"  # one gather a step, and one reduce-scatter of the sum over microbatches


class _Visit(NamedTuple):
    """Consecutive passes of one unit in a program: [first, last)."""

    unit: int
    reduces: bool
    first: int
    last: int


class _Round(NamedTuple):
    """One gather of a unit's weights.

    Args:
        unit: index of the unit.
        number: counts the unit's rounds.
        first: slot of the common order, see `_slots`, whose passes are its first.
        last: slot whose passes are its last.
        reduces: whether a backward in it trains the unit.
    """

    unit: int
    number: int
    first: int
    last: int
    reduces: bool


def with_rounds(
    programs: Programs,
    units: Sequence[Sequence[int]],
    trained: Collection[int],
    reshard_after: Mapping[int, ReshardAfter] = MappingProxyType({}),
) -> Programs:
    """Return the programs with weights gathered before use and freed after, and gradients reduce-scattered.

    A round of a unit is ALL_GATHER, its passes, FREE and, after a backward that trains it, REDUCE_SCATTER.
    Its ALL_GATHER precedes the previous passes of another unit: weights travel while those compute. With
    `ReshardAfter.PASS` at most two units are whole at once. With `ReshardAfter.STEP` it comes right behind
    the collective before it, so that one gather after another runs beside whatever computes: all these units
    are whole at the end of the first forward anyway. Every rank of a unit takes part in every round;
    one without work in it only gathers and frees, and contributes zeros. Rounds are a common supersequence
    of what the replicas do, so all come to them in one order.

    Source: Zhao et al. 2023, "PyTorch FSDP", VLDB 16(12), sections 3.3 and 4 (units, prefetching).
    How long weights stay: its section 3.3.3 (accumulation of gradients), and torchtitan's
    `reshard_after_forward`.
    Differs: order and prefetching are written in the program; there hooks decide as passes run.

    Args:
        programs: passes and reductions by the stages that some ranks hold.
        units: stages of all replicas that hold the same layers, by unit.
        trained: stages with weights that train.
        reshard_after: by unit; PASS where it is absent.

    Raises:
        ValueError: a split backward of a sharded stage; ranks that share some of their units only.

    Complexity: O(actions), and O(actions squared) at worst for replicas that differ.
    """
    unit_of = {stage: unit for unit, stages in enumerate(units) for stage in stages}
    with_gathers = dict(programs)
    for groups in _groups_by_units(programs, unit_of):
        visits = {group: _visits(programs[group], unit_of, trained) for group in groups}
        keys = _supersequence([tuple((v.unit, v.reduces) for v in visits[group]) for group in groups])
        slots, slot_of = _slots(keys)
        placed = {
            group: [(slot_of[index], visit) for index, visit in zip(_positions(own, keys), own, strict=True)]
            for group, own in visits.items()
        }
        needed = [_needed_later(programs[group], placed[group], len(slots)) for group in groups]
        rounds = _rounds(slots, needed, reshard_after)
        for group in groups:
            stage_of = {unit_of[stage]: stage for stage in group if stage in unit_of}
            program = _with_collectives(programs[group], placed[group], rounds, stage_of)
            kept = {stage for unit, stage in stage_of.items() if reshard_after.get(unit) is ReshardAfter.STEP}
            with_gathers[group] = _gathered_early(program, kept)
    return with_gathers


def _gathered_early(actions: Sequence[Action], kept: Collection[int]) -> tuple[Action, ...]:
    """Move gathers of stages that stay whole for a step before the passes behind the last collective."""
    program: list[Action] = []
    early = 0
    for action in actions:
        if action.kind is Pass.ALL_GATHER and action.stage in kept:
            program.insert(early, action)
            early += 1
            continue
        program.append(action)
        if action.kind not in COMPUTE and action.kind is not Pass.FREE:
            early = len(program)
    return tuple(program)


def waits_of(
    actions: Sequence[Action], once: Collection[int] = frozenset()
) -> dict[Action, tuple[Action, ...]]:
    """Map actions of a program to the all-gathers and reduce-scatters that they wait for.

    A pass and a FREE wait for their round's ALL_GATHER; the next action after a REDUCE_SCATTER waits
    for the REDUCE_SCATTER before it, so that at most two units have whole gradients; STEP waits for all.
    A reduction over replicas, which adds up a stage's shards, waits for the stage's last REDUCE_SCATTER.
    No pass waits for the REDUCE_SCATTER of a stage that reduces once a step, behind its last backward: no
    pass writes to its gradients again, and where a step has several microbatches, whole gradients of all such
    stages exist at the end of the last but one anyway.

    Source: FSDP2's `foreach_reduce` waits for the reduction before; Megatron-Core's `overlap_grad_reduce`,
    whose gradients stay whole for a step, waits for all of them in `finish_grad_sync`.

    Args:
        actions: of the program.
        once: stages with `ReshardAfter.STEP`.

    Complexity: O(actions).
    """
    waits: dict[Action, tuple[Action, ...]] = {}
    gathered: dict[int | None, Action] = {}
    scattered: dict[int | None, Action] = {}
    collectives: list[Action] = []
    latest: Action | None = None
    pending: Action | None = None
    for action in actions:
        if action.kind in FSDP:
            collectives.append(action)
            if action.kind is Pass.ALL_GATHER:
                gathered[action.stage] = action
            else:
                scattered[action.stage] = action
                if action.stage not in once:
                    latest, pending = action, latest
            continue
        awaited = (gathered.get(action.stage), pending)
        if action.kind is Pass.STEP:
            waits[action] = tuple(collectives)
        elif MEANING[action.kind].task is TaskKind.ALL_REDUCE:
            if action.stage in scattered:
                waits[action] = (scattered[action.stage],)
        elif any(awaited):
            waits[action] = tuple(wait for wait in awaited if wait is not None)
            pending = None
    return waits


def _groups_by_units(programs: Programs, unit_of: Mapping[int, int]) -> list[list[Group]]:
    """Return the groups of stages with the same units, together."""
    groups_of: dict[tuple[int, ...], list[Group]] = {}
    for group in programs:
        units = tuple(sorted({unit_of[stage] for stage in group if stage in unit_of}))
        if units:
            groups_of.setdefault(units, []).append(group)
    owner: dict[int, tuple[int, ...]] = {}
    for units in groups_of:
        for unit in units:
            if owner.setdefault(unit, units) != units:
                stages = [stage for stage, other in unit_of.items() if other == unit]
                raise ValueError(
                    f"stages {stages} shard their weights, but their ranks hold different other sharded "
                    "stages; want replicas that lie on their ranks alike"
                )
    return list(groups_of.values())


def _visits(actions: Sequence[Action], unit_of: Mapping[int, int], trained: Collection[int]) -> list[_Visit]:
    visits: list[_Visit] = []
    index = 0
    for unit, run in groupby(actions, key=lambda action: _unit_of(action, unit_of)):
        passes = list(run)
        if unit is not None:
            reduces = any(action.kind is Pass.B and action.stage in trained for action in passes)
            visits.append(_Visit(unit, reduces, index, index + len(passes)))
        index += len(passes)
    return visits


def _unit_of(action: Action, unit_of: Mapping[int, int]) -> int | None:
    """Return the unit whose gathered weights a pass needs."""
    if action.stage is None or action.stage not in unit_of or action.kind not in COMPUTE:
        return None
    if action.kind in (Pass.I, Pass.W):
        raise ValueError(
            f"action {action}: a stage whose weights are sharded has whole backwards; "
            "want a schedule without I and W"
        )
    return unit_of[action.stage]


Key = tuple[int, bool]


def _supersequence(sequences: Sequence[tuple[Key, ...]]) -> tuple[Key, ...]:
    """Return a sequence that has each of these as a subsequence; if they are equal, it is theirs."""
    distinct = list(dict.fromkeys(sequences))
    merged = distinct[0]
    for other in distinct[1:]:
        joined: list[Key] = []
        matcher = SequenceMatcher(None, merged, other, autojunk=False)
        for kind, first, last, other_first, other_last in matcher.get_opcodes():
            joined += merged[first:last]
            joined += other[other_first:other_last] if kind != "equal" else ()
        merged = tuple(joined)
    return merged


def _slots(keys: Sequence[Key]) -> tuple[list[Key], list[int]]:
    """Merge adjacent keys of one unit into slots; return these, and the index of each key's slot."""
    slots: list[Key] = []
    slot_of: list[int] = []
    for unit, reduces in keys:
        if slots and slots[-1][0] == unit:
            slots[-1] = unit, slots[-1][1] or reduces
        else:
            slots.append((unit, reduces))
        slot_of.append(len(slots) - 1)
    return slots, slot_of


def _needed_later(
    actions: Sequence[Action], placed: Sequence[tuple[int, _Visit]], num_slots: int
) -> list[Collection[int]]:
    """[slots] units of which, after the slot, a forward waits for its backward."""
    backwards = {(action.stage, action.microbatch) for action in actions if action.kind is Pass.B}
    waiting: dict[int, int] = {}
    visits_in: dict[int, list[_Visit]] = {}
    for slot, visit in placed:
        visits_in.setdefault(slot, []).append(visit)
    needed: list[Collection[int]] = []
    for slot in range(num_slots):
        for unit, _, first, last in visits_in.get(slot, ()):
            for action in actions[first:last]:
                if (action.stage, action.microbatch) in backwards:
                    waiting[unit] = waiting.get(unit, 0) + (1 if action.kind is Pass.F else -1)
        needed.append({unit for unit, count in waiting.items() if count})
    return needed


def _rounds(
    slots: Sequence[Key],
    needed: Sequence[Sequence[Collection[int]]],
    reshard_after: Mapping[int, ReshardAfter],
) -> list[_Round]:
    """Return the rounds of all units, by their last slots.

    Args:
        slots: of the common order.
        needed: of every replica, see `_needed_later`.
        reshard_after: by unit.
    """
    last_of = {unit: slot for slot, (unit, _) in enumerate(slots)}
    open_rounds: dict[int, _Round] = {}
    numbers: dict[int, int] = {}
    rounds: list[_Round] = []
    for slot, (unit, reduces) in enumerate(slots):
        current = open_rounds.pop(unit, None) or _Round(unit, numbers.get(unit, 0), slot, slot, reduces=False)
        current = current._replace(last=slot, reduces=current.reduces or reduces)
        policy = reshard_after.get(unit, ReshardAfter.PASS)
        stays = policy is ReshardAfter.STEP or (
            policy is ReshardAfter.BACKWARD and any(unit in replica[slot] for replica in needed)
        )
        if stays and slot < last_of[unit]:
            open_rounds[unit] = current
        else:
            rounds.append(current)
            numbers[unit] = current.number + 1
    return rounds


def _positions(visits: Sequence[_Visit], keys: Sequence[Key]) -> list[int]:
    """Return each visit's position in the common sequence, as early as possible."""
    positions: list[int] = []
    index = -1
    for visit in visits:
        index = keys.index((visit.unit, visit.reduces), index + 1)
        positions.append(index)
    return positions


def _with_collectives(
    actions: Sequence[Action],
    placed: Sequence[tuple[int, _Visit]],
    rounds: Sequence[_Round],
    stage_of: Mapping[int, int],
) -> tuple[Action, ...]:
    def collective(of_round: _Round, kind: Pass) -> Action:
        return Action(stage_of[of_round.unit], kind, of_round.number)

    starting = {each.first: each for each in rounds}
    ending = {each.last: each for each in rounds}
    num_slots = 1 + max(ending, default=-1)
    program: list[Action] = [collective(starting[0], Pass.ALL_GATHER)] if rounds else []
    done = index = 0
    for slot in range(num_slots):
        own_visits = []
        while index < len(placed) and placed[index][0] == slot:
            own_visits.append(placed[index][1])
            index += 1
        if own_visits:
            program += actions[done : own_visits[0].first]
            done = own_visits[0].first
        if slot + 1 in starting:
            program.append(collective(starting[slot + 1], Pass.ALL_GATHER))
        if own_visits:
            program += actions[done : own_visits[-1].last]
            done = own_visits[-1].last
        if slot in ending:
            program.append(collective(ending[slot], Pass.FREE))
            if ending[slot].reduces:
                program.append(collective(ending[slot], Pass.REDUCE_SCATTER))
    return (*program, *actions[done:])
