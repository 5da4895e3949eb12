"""Actions of a plan that take equal times: passes of one stage over microbatches of equal work."""

from collections.abc import Hashable
from typing import NamedTuple

from workbench.plan.frame import frame_of
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.remembered import Remembered
from workbench.plan.routing import routing_of
from workbench.plan.work import work_of
from workbench.schedule.action import COMPUTE, Action

MOST_ACTIONS = 1_000_000  # of all plans that are remembered


class AlikeActions(NamedTuple):
    """One action for each set of equal ones, and of every action of the programs the place of its set's.

    Args:
        firsts: the first of each set.
        place: action -> place among the firsts; in the order of the programs.
    """

    firsts: tuple[Action, ...]
    place: dict[Action, int]


_KNOWN: Remembered[AlikeActions] = Remembered(MOST_ACTIONS, lambda alike: len(alike.place) + 1)


def alike_actions(plan: Plan, *, by_tokens: bool) -> AlikeActions:
    """The sets of the plan, and of all plans of its frame.

    Args:
        by_tokens: the time of a pass depends on which tokens attend to which, and not on their number
            alone: passes over two microbatches are never equal.

    Complexity: O(actions), of the first plan of a frame.
    """
    return _KNOWN.answer((frame_of(plan), by_tokens), lambda: _alike_actions(plan, by_tokens=by_tokens))


def _alike_actions(plan: Plan, *, by_tokens: bool) -> AlikeActions:
    shapes = _Shapes(plan)
    sets: dict[Hashable, int] = {}
    firsts: list[Action] = []
    place: dict[Action, int] = {}
    for action in plan.program_actions:
        key: Hashable = action
        if action.kind in COMPUTE and action.stage in plan.stage and not by_tokens:
            key = action.stage, action.kind, shapes.of(action)
        place[action] = sets.setdefault(key, len(firsts))
        if place[action] == len(firsts):
            firsts.append(action)
    return AlikeActions(tuple(firsts), place)


class _Shapes:
    """Numbers for all of a microbatch that the times of its passes follow from."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._routing = plan, routing_of(plan)
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[tuple[str, int, int | None], int] = {}

    def of(self, action: Action) -> int:
        """Of a pass; -1 without a microbatch, which pricing refuses."""
        stage = self._plan.stage[action.stage or 0]
        name = stage.module, stage.replica, action.microbatch
        if name not in self._known:
            held = self._plan.microbatches_of.get(name[:2], ())
            found = next((m for m in held if m.index == action.microbatch), None)
            self._known[name] = -1 if found is None else self._number(found)
        return self._known[name]

    def _number(self, microbatch: Microbatch) -> int:
        routing = self._routing
        shape = work_of(self._plan, microbatch), routing.present(microbatch), routing.is_read(microbatch)
        return self._numbers.setdefault(shape, len(self._numbers))
