"""Actions of a plan that take equal times: a stage's passes over microbatches of equal work, its rounds."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from workbench.plan.frame import frame_of
from workbench.plan.lru_cache import LruCache
from workbench.plan.plan import Microbatch, Plan, Stage
from workbench.plan.routing import routing_of
from workbench.plan.work import works_of
from workbench.schedule.action import COMPUTE, Action, Pass

MOST_ACTIONS = 1_000_000  # of all plans that are cached


class AlikeActions(NamedTuple):
    """One action for each set of equal ones, and of every action of the programs the place of its set's.

    Args:
        firsts: the first of each set.
        place: action -> place among the firsts; in the order of the programs.
    """

    firsts: tuple[Action, ...]
    place: dict[Action, int]


_KNOWN: LruCache[AlikeActions] = LruCache(MOST_ACTIONS, lambda alike: len(alike.place) + 1)


def alike_actions(plan: Plan, *, by_tokens: bool) -> AlikeActions:
    """The sets of the plan, and of all plans of its frame.

    Args:
        by_tokens: the time of a pass depends on which tokens attend to which, and not on their number
            alone: passes over two microbatches are never equal.

    Raises:
        ValueError: a pass without a microbatch, or a backward of a stage in which no gradient runs.

    Complexity: O(actions), of the first plan of a frame.
    """
    return _KNOWN.get_or((frame_of(plan), by_tokens), lambda: _alike_actions(plan, by_tokens=by_tokens))


def _alike_actions(plan: Plan, *, by_tokens: bool) -> AlikeActions:
    shapes = _Shapes(plan)
    sets: dict[Hashable, int] = {}
    set_of: dict[Action, int] = {}
    for action in plan.program_actions:
        stage, kind, _ = action
        key: Hashable = stage, kind
        if kind in COMPUTE:
            shape = shapes.of(action)
            key = action if by_tokens else (stage, kind, shape)
        set_of[action] = sets.setdefault(key, len(sets))
    firsts = {at: action for action, at in reversed(set_of.items())}
    return AlikeActions(tuple(firsts[at] for at in range(len(sets))), set_of)


class _Shapes:
    """Numbers for all of a microbatch that the times of its passes follow from."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._routing = plan, routing_of(plan)
        self._numbers: dict[Hashable, int] = {}
        self._of_replica: dict[tuple[str, int], list[int]] = {}  # by microbatch
        self._of_stage: dict[int, tuple[list[int], Sequence[bool]]] = {}  # and who has a backward there

    def of(self, action: Action) -> int:
        """Of a pass, if it is one."""
        number, index = action.stage or 0, action.microbatch or 0
        if number not in self._of_stage:
            stage = self._plan.stage[number]
            self._of_stage[number] = self._in_replica(stage), self._routing.backwards(stage)
        shapes, backwards = self._of_stage[number]
        if not 0 <= index < len(shapes):
            module = self._plan.stage[number].module
            raise ValueError(f"action {action}: {module!r} has no microbatch {action.microbatch}")
        if action.kind is not Pass.F and not backwards[index]:
            raise ValueError(f"action {action}: no gradient runs in stage {number}, it has no backward")
        return shapes[index]

    def _in_replica(self, stage: Stage) -> list[int]:
        place = stage.module, stage.replica
        if place not in self._of_replica:
            self._of_replica[place] = [*map(self._number, self._plan.microbatches_of.get(place, ()))]
        return self._of_replica[place]

    def _number(self, microbatch: Microbatch) -> int:
        shape = works_of(self._plan, microbatch), self._routing.present(microbatch)
        return self._numbers.setdefault(shape, len(self._numbers))
