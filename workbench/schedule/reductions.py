"""Inserts gradient reductions among the passes, in the same order on all ranks of a stage."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter
from itertools import pairwise

from workbench.schedule.action import MEANING, Action, Operation, Pass, reduction_of
from workbench.schedule.parts import Programs

_SCATTERS = frozenset(kind for kind in Pass if MEANING[kind].operation is Operation.REDUCE_SCATTER)


def with_reductions(programs: Programs, reduced: Sequence[int]) -> Programs:
    """Return the programs with a reduction per stage, after its last action and after earlier reductions.

    If that last action reduce-scatters gradients of sharded weights, the reduction follows the next
    reduce-scatter: the passes after that wait for the first one anyway, so nothing idles for it. Where stages
    reduce once a step, passes wait for neither.

    If stages share all their ranks or none, earlier reductions are those of the same ranks. If they share
    ranks in part, they are all reductions, by a total order of all passes: otherwise two ranks of a stage
    could come to its reduction at different passes.

    Args:
        programs: passes, and rounds of sharded weights, by the stages that some ranks hold;
            restrictions of one total order.
        reduced: stages whose gradients are reduced, in the order in which every rank does it.

    Complexity: O(actions).
    """
    is_shared = max(Counter(stage for group in programs for stage in group).values(), default=0) > 1
    if is_shared:
        order = _order(programs)
        position_of, due = {action: index for index, action in enumerate(order)}, _due(order, reduced)
        return {
            group: _merged(actions, [position_of[action] for action in actions], group, due)
            for group, actions in programs.items()
        }
    return {
        group: _merged(
            actions,
            range(len(actions)),
            group,
            _due(actions, [stage for stage in reduced if stage in group]),
        )
        for group, actions in programs.items()
    }


def _order(programs: Programs) -> tuple[Action, ...]:
    """Return all actions in an order of which all programs are restrictions."""
    order: TopologicalSorter[Action] = TopologicalSorter()
    for actions in programs.values():
        for action in actions:
            order.add(action)
        for before, after in pairwise(actions):
            order.add(after, before)
    return tuple(order.static_order())


def _due(order: Sequence[Action], reduced: Sequence[int]) -> dict[int, int]:
    """Map stages, in reduction order, to the position after which they reduce; -1: before all."""
    if not reduced:
        return {}
    last = {action.stage: index for index, action in enumerate(order)}
    next_scatter = dict(pairwise(index for index, action in enumerate(order) if action.kind in _SCATTERS))
    due: dict[int, int] = {}
    latest = -1
    for stage in reduced:
        last_own = last.get(stage, -1)
        latest = due[stage] = max(latest, next_scatter.get(last_own, last_own))
    return due


def _merged(
    actions: Sequence[Action], positions: Sequence[int], group: Sequence[int], due: Mapping[int, int]
) -> tuple[Action, ...]:
    """Insert each reduction after its position; positions of the actions ascend."""
    program: list[Action] = []
    done = 0
    for stage, after in due.items():
        if stage in group:
            end = bisect_right(positions, after)
            program += (*actions[done:end], reduction_of(stage))
            done = end
    return (*program, *actions[done:])
