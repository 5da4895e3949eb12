"""Which actions follow which where a rank does its actions one at a time, whatever their lanes.

The task graph says what may run beside what. Here nothing does: for the numbers of rows, which passes
alone decide, before there are rows to make a graph of; for search, which compares plans by one lane;
and for emulation, where one device does all.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from typing import Protocol

from workbench.plan.plan import Plan
from workbench.schedule.action import COMPUTE, Action
from workbench.schedule.precedence import longest_path


class Ends(Protocol):
    """A row: the pass that produces it and the one that waits for it."""

    @property
    def producer(self) -> Action: ...

    @property
    def consumer(self) -> Action: ...


def one_by_one(plan: Plan, is_wanted: Callable[[Action], bool]) -> Iterable[tuple[Action, Action]]:
    """Actions that follow each other in a program, the others left out."""
    for program in plan.programs:
        yield from pairwise(filter(is_wanted, program.actions))


def followers_of(actions: Iterable[Action], edges: Iterable[tuple[Action, Action]]) -> list[list[int]]:
    """By place in `actions`, who follows, each once; edges to and from other actions are left out."""
    number = {action: index for index, action in enumerate(actions)}
    found: list[list[int]] = [[] for _ in number]
    numbers = (
        (number[one], number[next_one]) for one, next_one in edges if one in number and next_one in number
    )
    for before, after in dict.fromkeys(numbers):
        found[before].append(after)
    return found


def issue_ticks(plan: Plan, rows: Sequence[Ends]) -> dict[Action, int]:
    """Action -> tick in which it ends: one after the latest of its ranks' previous actions and its inputs.

    Only passes count. Actions on or behind a ring never run: they get the tick after all
    others. Longest path, O(actions + rows).
    """
    actions = [action for action in plan.program_actions if action.kind in COMPUTE]
    edges = chain(
        one_by_one(plan, lambda action: action.kind in COMPUTE),
        ((row.producer, row.consumer) for row in rows),
    )
    starts = longest_path(followers_of(actions, edges), [1.0] * len(actions))
    ticks = {actions[index]: int(start) + 1 for index, start in starts.items()}
    never = max(ticks.values(), default=0) + 1
    stuck = {action: never for row in rows for action in (row.producer, row.consumer) if action not in ticks}
    return ticks | stuck
