"""Where the reductions of gradients stand among the passes, the same on all ranks of a stage."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter
from itertools import pairwise

from workbench.schedule.action import MEANING, Action, Operation, reduction_of
from workbench.schedule.parts import Programs


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
        positions = _places(programs)
        due = _due(positions, reduced)
        return {group: _merged(actions, positions, group, due) for group, actions in programs.items()}
    found: Programs = {}
    for group, actions in programs.items():
        positions = {action: index for index, action in enumerate(actions)}
        due = _due(positions, [stage for stage in reduced if stage in group])
        found[group] = _merged(actions, positions, group, due)
    return found


def _places(programs: Programs) -> dict[Action, int]:
    """Every action's place in an order of which all programs are restrictions."""
    order: TopologicalSorter[Action] = TopologicalSorter()
    for actions in programs.values():
        for action in actions:
            order.add(action)
        for before, after in pairwise(actions):
            order.add(after, before)
    return {action: index for index, action in enumerate(order.static_order())}


def _due(place: Mapping[Action, int], reduced: Sequence[int]) -> dict[int, int]:
    """Stage -> place that its reduction comes behind, in the order of the reductions; -1: before all."""
    last: dict[int | None, int] = {}
    for action, index in place.items():
        last[action.stage] = max(index, last.get(action.stage, -1))
    scatters = sorted(
        index for action, index in place.items() if MEANING[action.kind].operation is Operation.REDUCE_SCATTER
    )
    next_scatter = dict(pairwise(scatters))
    due: dict[int, int] = {}
    latest = -1
    for stage in reduced:
        own = last.get(stage, -1)
        latest = due[stage] = max(latest, next_scatter.get(own, own))
    return due


def _merged(
    actions: Sequence[Action], place: Mapping[Action, int], group: Sequence[int], due: Mapping[int, int]
) -> tuple[Action, ...]:
    waiting = deque((after, stage) for stage, after in due.items() if stage in group)
    found: list[Action] = []
    for action in actions:
        while waiting and waiting[0][0] < place[action]:
            found.append(reduction_of(waiting.popleft()[1]))
        found.append(action)
    return (*found, *(reduction_of(stage) for _, stage in waiting))
