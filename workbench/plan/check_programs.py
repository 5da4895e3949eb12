"""Checks that programs do every pass once, in order, and alike on all ranks of a stage."""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, zip_longest
from typing import NamedTuple

from workbench.plan.alike import alike_replicas, first_of_all
from workbench.plan.gradient_groups import reduction_order
from workbench.plan.lru_cache import LruCache
from workbench.plan.parameter_shards import is_sharded
from workbench.plan.plan import Plan
from workbench.plan.routing import routing_of
from workbench.plan.stage import Stage
from workbench.schedule.action import (
    COMPUTE,
    REDUCTIONS,
    ROUND,
    STEP,
    Action,
    Order,
    Pass,
    by_stage,
    reduction_of,
)

MOST_ACTIONS = 500_000  # in all cached sound orders together


class _Work(NamedTuple):
    """What a stage has to do, independent of its id.

    Args:
        backward: per microbatch, whether it has a backward (B, or I instead).
        trained: per microbatch, whether its I has a W as well.
        is_reduced: whether the stage's gradients are reduced over ranks.
        in_rounds: whether its weights are sharded.
    """

    backward: tuple[bool, ...]
    trained: tuple[bool, ...]
    is_reduced: bool
    in_rounds: bool


_SOUND: LruCache[int] = LruCache(MOST_ACTIONS, lambda num_actions: num_actions + 1)


def check_programs(plan: Plan) -> None:
    """Raise ValueError for the first rank that has not exactly one program, or whose program breaks a rule.

    A program ends with its only STEP and holds all actions of its stages, each once: F before B or I, I
    before W, a backward whole or split, the reduction after all of them. All ranks of a stage run its actions
    in one order. Of replicas that equal each other only the first is checked.
    """
    ranks = Counter(rank for program in plan.programs for rank in program.ranks)
    for rank in plan.ranks:
        if ranks[rank] != 1:
            raise ValueError(f"rank {rank} must have one program, got {ranks[rank]}")
    idle = sorted(set(ranks) - set(plan.ranks))
    if idle:
        raise ValueError(f"rank {idle[0]} has a program but holds no stage")
    copied = _ranks_of_copies(plan)
    work = _work_by_stage(plan, [stage for stage in plan.stages if stage.flat_ranks[0] not in copied])
    for program in plan.programs:
        rank_by_stages = {
            plan.stages_on[rank]: rank for rank in reversed(program.ranks) if rank not in copied
        }
        for stages, rank in rank_by_stages.items():  # ranks with the same stages break the same rules
            _check_program(rank, program.actions, {stage.id: work[stage.id] for stage in stages})
    _check_agreement(plan, copied)


def _ranks_of_copies(plan: Plan) -> set[int]:
    """Return the ranks of replicas that equal an earlier one, and so break the same rules."""
    return {rank for _, *others in alike_replicas(plan) for other in others for rank in other.ranks}


def _work_by_stage(plan: Plan, stages: Sequence[Stage]) -> dict[int, _Work]:
    """Return the work of stages of replicas that equal no earlier one, by stage id."""
    routing, reduced = routing_of(first_of_all(plan)), set(reduction_order(plan))
    return {
        stage.id: _Work(
            routing.backwards(stage), routing.trained(stage), stage.id in reduced, is_sharded(plan, stage)
        )
        for stage in stages
    }


def _check_program(rank: int, program: tuple[Action, ...], work: Mapping[int, _Work]) -> None:
    if not program or program[-1] != STEP or program.count(STEP) != 1:
        raise ValueError(f"rank {rank}: a program ends with its only STEP, got {_tail(program)}")
    orders = by_stage(program[:-1])
    for stage in orders:
        if stage not in work:
            action = next(action for action in program if action.stage == stage)
            raise ValueError(f"rank {rank}: action {action} is of a stage that the rank does not hold")
    for stage, required in work.items():  # a verdict holds for all stages with the same work
        order = orders.get(stage, ())
        _SOUND.get_or((order, required), partial(_check_order, rank, stage, order, required))


def _check_order(rank: int, stage: int, order: Order, work: _Work) -> int:
    """Raise ValueError where the stage's actions break a rule; how many they are."""
    required = _required(stage, work)
    done: set[Action] = set()
    for kind, number in order:
        action = Action(stage, kind, number)
        if action in done:
            raise ValueError(f"rank {rank}: action {action} stands twice")
        _check_required(rank, action, required)
        _check_order_of(rank, action, done)
        done.add(action)
    if Action(stage, Pass.OFFLOAD) in done and (back := Action(stage, Pass.ONLOAD)) not in done:
        raise ValueError(f"rank {rank}: action {back} is missing from the program")
    missing = [action for action in required.actions - done if action.kind is not Pass.B]
    for backward in required.actions - done - set(missing):
        missing += _missing_of_backward(backward, required, done)
    if missing:
        raise ValueError(f"rank {rank}: action {min(missing, key=str)} is missing from the program")
    return len(order)


@dataclass(frozen=True, slots=True)
class _Required:
    """The actions that a stage must do.

    Args:
        actions: F, whole backwards (B) and the reduction.
        weights: the Bs that, if split, have a W as well as an I.
        in_rounds: whether the stage's weights are sharded.
    """

    actions: set[Action]
    weights: set[Action]
    in_rounds: bool


def _required(stage: int, work: _Work) -> _Required:
    """Return the stage's required actions; a B may be replaced by I, with W where weights train."""
    backwards = [Action(stage, Pass.B, index) for index in range(len(work.backward))]
    actions = {Action(stage, Pass.F, index) for index in range(len(work.backward))}
    actions.update(compress(backwards, work.backward), [reduction_of(stage)] if work.is_reduced else ())
    return _Required(actions, set(compress(backwards, work.trained)), work.in_rounds)


def _check_required(rank: int, action: Action, required: _Required) -> None:
    if action in required.actions:
        return
    if action.kind in (*ROUND, Pass.OFFLOAD, Pass.ONLOAD):
        if (action.kind in ROUND) != required.in_rounds:
            rule = (
                "sharded weights stay on the device" if required.in_rounds else "its weights are not sharded"
            )
            raise ValueError(f"rank {rank}: action {action} of stage {action.stage}: {rule}")
        return
    backward = action._replace(kind=Pass.B)
    if action.kind not in (Pass.I, Pass.W) or backward not in required.actions:
        raise ValueError(f"rank {rank}: action {action} has no microbatch or no gradient to work on")
    if action.kind is Pass.W and backward not in required.weights:
        raise ValueError(
            f"rank {rank}: action {action} has no weights to train, {backward} splits into I alone"
        )


def _missing_of_backward(backward: Action, required: _Required, done: set[Action]) -> list[Action]:
    """Return B if no part of it is present; otherwise the missing ones of I and W."""
    split = [backward._replace(kind=Pass.I)] + [backward._replace(kind=Pass.W)] * (
        backward in required.weights
    )
    return [action for action in split if action not in done] if done & set(split) else [backward]


_RIVALS = {Pass.B: (Pass.I, Pass.W), Pass.I: (Pass.B,), Pass.W: (Pass.B,)}


def _check_order_of(rank: int, action: Action, done: Container[object]) -> None:
    """Check F before B or I, I before W, a backward whole or split, the reduction last, weights present."""
    stage, kind, number = action
    if (stage, Pass.OFFLOAD, None) in done or kind is Pass.ONLOAD:
        _check_on_device(rank, action, done)
    for rival in _RIVALS.get(kind, ()):
        if (stage, rival, number) in done:
            raise ValueError(
                f"rank {rank}: action {action} stands after {action._replace(kind=rival)}: "
                "a backward is whole or split"
            )
    before = action.continues
    if before is not None and before not in done:
        earlier = "its forward" if before.kind is Pass.F else str(before)
        raise ValueError(f"rank {rank}: action {action} stands before {earlier}")
    for closing in REDUCTIONS:
        if (stage, closing, None) in done:
            raise ValueError(f"rank {rank}: action {action} stands after {Action(stage, closing)}")


def _check_on_device(rank: int, action: Action, done: Container[object]) -> None:
    """Check that a stage whose weights go to the host has them on the device when it works."""
    away = Action(action.stage, Pass.OFFLOAD)
    if action.kind is Pass.ONLOAD and away not in done:
        raise ValueError(f"rank {rank}: action {action} stands before {away}: its stage has not left")
    if action.kind in COMPUTE and away in done and (back := away._replace(kind=Pass.ONLOAD)) not in done:
        raise ValueError(f"rank {rank}: action {action} stands after {away}, before {back}")


def _check_agreement(plan: Plan, copied: Container[int]) -> None:
    """Check that all ranks of a stage, and of stages that share ranks, run the actions in one order."""
    first_of: dict[tuple[tuple[int, ...], ...], Stage] = {}
    for stage in plan.stages:
        first_of.setdefault(stage.ranks, stage)
    for stage in first_of.values():
        leader, *others = stage.flat_ranks
        if leader in copied:
            continue
        for rank in others:
            if plan.program[rank] is plan.program[leader]:
                continue
            shared = {s.id for s in plan.stages if {rank, leader} <= set(s.flat_ranks)}
            order, leader_order = (
                [action for action in plan.program[r] if action.stage in shared] for r in (rank, leader)
            )
            if order != leader_order:
                pairs = enumerate(zip_longest(leader_order, order))
                index, (theirs, own) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
                raise ValueError(
                    f"ranks {leader} and {rank} share stage {stage.id} but differ in order: "
                    f"{theirs or 'nothing'} and {own or 'nothing'} at position {index}"
                )


def _tail(program: tuple[Action, ...]) -> str:
    return " ".join(str(action) for action in program[-3:]) or "nothing"
