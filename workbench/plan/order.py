"""Which actions follow which where a rank does its actions one at a time, whatever their lanes.

The task graph says what may run beside what. Here nothing does: for the numbers of rows, which passes
alone decide, before there are rows to make a graph of; for search, which compares plans by one lane;
and for emulation, where one device does all.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from workbench.arrays import Ints
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


def compute_actions(plan: Plan) -> list[Action]:
    """The passes of all programs, in order of first appearance."""
    return [action for action in plan.program_actions if action.kind in COMPUTE]


def issue_ticks(plan: Plan, rows: Sequence[Ends]) -> dict[Action, int]:
    """Action -> tick in which it ends: one after the latest of its ranks' previous actions and its inputs.

    Only passes count. Actions on or behind a ring never run: they get the tick after all
    others. Longest path, O(actions + rows).
    """
    numbers = {action: number for number, action in enumerate(compute_actions(plan))}
    ends = {(row.producer, row.consumer) for row in rows}
    pairs = [(numbers.get(one, -1), numbers.get(next_one, -1)) for one, next_one in ends]
    starts = _starts(plan, numbers, pairs)
    actions = list(numbers)
    ticks = {actions[number]: int(start) + 1 for number, start in starts.items()}
    never = max(ticks.values(), default=0) + 1
    stuck = {action: never for pair in ends for action in pair if action not in ticks}
    return ticks | stuck


def ticks_of(plan: Plan, numbers: Mapping[Action, int], producers: Ints, consumers: Ints) -> Ints | None:
    """As `issue_ticks`, by number of the plan's `compute_actions`; None where some never run.

    Args:
        producers, consumers: [rows] numbers of the ends.
    """
    ends = np.unique(producers * len(numbers) + consumers)
    pairs = zip((ends // len(numbers)).tolist(), (ends % len(numbers)).tolist(), strict=True)
    starts = _starts(plan, numbers, pairs)
    if len(starts) < len(numbers):
        return None
    found = np.empty(len(numbers), dtype=np.int64)
    found[list(starts)] = list(starts.values())
    return found + 1


def _starts(plan: Plan, numbers: Mapping[Action, int], rows: Iterable[tuple[int, int]]) -> dict[int, float]:
    """Number of a pass -> passes that end before it, one after another; absent: it never starts.

    Args:
        rows: numbers of both ends; -1 of what is no pass.
    """
    followers: list[list[int]] = [[] for _ in numbers]
    for program in plan.programs:
        passes = [numbers[action] for action in program.actions if action in numbers]
        for before, after in pairwise(passes):
            followers[before].append(after)
    for before, after in rows:
        if before >= 0 and after >= 0:
            followers[before].append(after)
    return longest_path(followers, [1.0] * len(followers))
