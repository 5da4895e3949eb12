"""Programs with a split backward, made of ones without: any legal order of I and W."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random

from workbench.plan.check import check
from workbench.plan.plan import Plan
from workbench.plan.routing import routing_of
from workbench.schedule.action import STEP, Action, Pass

Order = Callable[[Sequence[Action]], Sequence[Action]]  # of a program's passes, I and W side by side


def split(plan: Plan, order: Order = lambda passes: passes) -> Plan:
    """Every B as I and, where the stage trains a weight for that microbatch, W right behind it.

    REDUCE_GRADs go to the end of the program, where every order of the passes leaves them legal.
    """
    trains = _trains(plan)
    programs = []
    for program in plan.programs:
        passes = [part for action in program.actions for part in _parts(action, trains)]
        reductions = [action for action in program.actions if action.kind is Pass.REDUCE_GRAD]
        ordered = order([action for action in passes if action.kind is not Pass.REDUCE_GRAD])
        programs.append(replace(program, actions=(*ordered, *reductions, STEP)))
    found = replace(plan, programs=tuple(programs))
    check(found)
    return found


def _trains(plan: Plan) -> frozenset[tuple[int | None, int | None]]:
    """(stage, microbatch) that have weight gradients."""
    routing = routing_of(plan)
    return frozenset(
        (stage.id, index)
        for stage in plan.stages
        for index, is_trained in enumerate(routing.trained(stage))
        if is_trained
    )


def _parts(action: Action, trains: frozenset[tuple[int | None, int | None]]) -> Iterator[Action]:
    if action == STEP:
        return
    if action.kind is not Pass.B:
        yield action
        return
    yield action._replace(kind=Pass.I)
    if (action.stage, action.microbatch) in trains:
        yield action._replace(kind=Pass.W)


def weights_last(passes: Sequence[Action]) -> Sequence[Action]:
    """All W at the end: as many microbatches outstanding as there are."""
    return sorted(passes, key=lambda action: action.kind is Pass.W)


def weights_last_reversed(passes: Sequence[Action]) -> Sequence[Action]:
    """The same, the last microbatch's W first."""
    weights = [action for action in passes if action.kind is Pass.W]
    return [*(action for action in passes if action.kind is not Pass.W), *reversed(weights)]


def weights_anywhere(seed: int) -> Order:
    """Every W anywhere behind its I."""

    def order(passes: Sequence[Action]) -> Sequence[Action]:
        rng = Random(seed)
        found = [action for action in passes if action.kind is not Pass.W]
        for weight in (action for action in passes if action.kind is Pass.W):
            first = found.index(weight._replace(kind=Pass.I)) + 1
            found.insert(rng.randint(first, len(found)), weight)
        return found

    return order
