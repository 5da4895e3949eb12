"""When actions would end if each took one tick: the order in which communication is issued."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from workbench.plan.plan import Plan
from workbench.schedule.action import COMPUTE, Action


class Ends(Protocol):
    """A row: the pass that produces it and the one that waits for it."""

    @property
    def producer(self) -> Action: ...

    @property
    def consumer(self) -> Action: ...


def issue_ticks(plan: Plan, rows: Sequence[Ends]) -> dict[Action, int]:
    """Action -> tick in which it ends: one after the latest of its ranks' previous actions and its inputs.

    Only passes count. Actions on or behind a cycle never run: they get the tick after all
    others. Longest path by Kahn's algorithm, O(actions + rows).
    """
    actions = [action for action in plan.program_actions if action.kind in COMPUTE]
    followers: dict[Action, list[Action]] = {action: [] for action in actions}
    waiting = dict.fromkeys(actions, 0)
    for before, after in _dependencies(plan, rows):
        if before in followers and after in waiting:
            followers[before].append(after)
            waiting[after] += 1
    ticks: dict[Action, int] = {}
    ready = [action for action in actions if waiting[action] == 0]
    starts = dict.fromkeys(actions, 0)
    for action in ready:  # grows while we walk it
        ticks[action] = starts[action] + 1
        for follower in followers[action]:
            starts[follower] = max(starts[follower], ticks[action])
            waiting[follower] -= 1
            if waiting[follower] == 0:
                ready.append(follower)
    never = max(ticks.values(), default=0) + 1
    stuck = {action: never for row in rows for action in (row.producer, row.consumer) if action not in ticks}
    return ticks | stuck


def _dependencies(plan: Plan, rows: Sequence[Ends]) -> set[tuple[Action, Action]]:
    found = {(row.producer, row.consumer) for row in rows}
    for program in plan.programs:
        passes = [action for action in program.actions if action.kind in COMPUTE]
        found.update(pairwise(passes))
    return found
