"""Where the reductions of gradients stand among the passes, the same on all ranks of a stage."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter
from itertools import pairwise

from workbench.schedule.action import MEANING, Action, Operation, Pass, reduction_of
from workbench.schedule.parts import Programs

_SCATTERS = frozenset(kind for kind in Pass if MEANING[kind].operation is Operation.REDUCE_SCATTER)


def with_reductions(programs: Programs, reduced: Sequence[int]) -> Programs:
    """The programs with a reduction per stage: after its last action, and after all that come before it.

    Where that reduce-scatters gradients of sharded weights, it is after the next that does: the passes
    behind that wait for the first in any case, so nothing stands still for this sum.

    Where stages share all their ranks or none, what comes before it are the reductions of the same ranks.
    Where they share ranks in part, it is every reduction, by a total order of all passes: else two
    ranks of a stage could come to its reduction at different passes.

    Args:
        programs: passes, and rounds of sharded weights, by the stages that some ranks hold;
            restrictions of one total order.
        reduced: stages whose gradients are reduced, in the order in which every rank does it.

    Complexity: O(actions).
    """
    is_shared = max(Counter(stage for group in programs for stage in group).values(), default=0) > 1
    if is_shared:
        order = _order(programs)
        place, due = {action: index for index, action in enumerate(order)}, _due(order, reduced)
        return {
            group: _merged(actions, [place[action] for action in actions], group, due)
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
    """All actions in an order of which all programs are restrictions."""
    order: TopologicalSorter[Action] = TopologicalSorter()
    for actions in programs.values():
        for action in actions:
            order.add(action)
        for before, after in pairwise(actions):
            order.add(after, before)
    return tuple(order.static_order())


def _due(order: Sequence[Action], reduced: Sequence[int]) -> dict[int, int]:
    """Stage -> place that its reduction comes behind, in the order of the reductions; -1: before all."""
    if not reduced:
        return {}
    last = {action.stage: index for index, action in enumerate(order)}
    next_scatter = dict(pairwise(index for index, action in enumerate(order) if action.kind in _SCATTERS))
    due: dict[int, int] = {}
    latest = -1
    for stage in reduced:
        own = last.get(stage, -1)
        latest = due[stage] = max(latest, next_scatter.get(own, own))
    return due


def _merged(
    actions: Sequence[Action], places: Sequence[int], group: Sequence[int], due: Mapping[int, int]
) -> tuple[Action, ...]:
    """Actions, whose places in the order ascend, each reduction behind those that it comes behind."""
    found: list[Action] = []
    done = 0
    for stage, after in due.items():
        if stage in group:
            end = bisect_right(places, after)
            found += (*actions[done:end], reduction_of(stage))
            done = end
    return (*found, *actions[done:])
