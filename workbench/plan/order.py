"""Which actions follow which where a rank does its actions one at a time, whatever their lanes.

The task graph says what may run beside what. Here nothing does: for the numbers of rows, which passes
alone decide, before there are rows to make a graph of; for search, which compares plans by one lane;
and for emulation, where one device does all.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np

from workbench.arrays import Ints
from workbench.plan.lru_cache import LruCache, value_key
from workbench.plan.plan import Plan
from workbench.schedule.action import COMPUTE, Action
from workbench.schedule.precedence import longest_path

MOST_ACTIONS = 1_000_000  # of all plans whose ticks are remembered
_TICKS: LruCache[Ints] = LruCache(MOST_ACTIONS, len)


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


def issue_ticks(plan: Plan, producers: Ints, consumers: Ints) -> Ints:
    """[actions + 1] tick in which each ends: one after the latest of its ranks' previous actions and inputs.

    Only passes count. Those on or behind a ring never run: they get the tick after all others, as do all
    that are no passes and, at the end, what is in no program. Longest path, O(actions + rows), once for
    equal orders.

    Args:
        plan: whose `program_actions` give actions their numbers.
        producers, consumers: [rows] numbers of the ends; -1: in no program.
    """
    numbers = plan.program_actions
    pairs = np.unique((producers * len(numbers) + consumers)[(producers >= 0) & (consumers >= 0)])
    return _TICKS.get_or((value_key(plan.programs), pairs.tobytes()), lambda: _issue_ticks(plan, pairs))


def _issue_ticks(plan: Plan, pairs: Ints) -> Ints:
    """Likewise; a row's ends are one number: producer x actions + consumer."""
    numbers = plan.program_actions
    followers: list[list[int]] = [[] for _ in numbers]
    passes = {action: number for action, number in numbers.items() if action.kind in COMPUTE}
    for program in plan.programs:
        for before, after in pairwise([passes[action] for action in program.actions if action in passes]):
            followers[before].append(after)
    for before, after in zip((pairs // len(numbers)).tolist(), (pairs % len(numbers)).tolist(), strict=True):
        followers[before].append(after)
    starts = longest_path(followers, [1.0] * len(followers))
    found = np.zeros(len(numbers) + 1, dtype=np.int64)
    of_passes = np.fromiter(passes.values(), np.int64)
    found[list(starts)] = np.fromiter(starts.values(), np.int64) + 1
    is_run = np.zeros(len(found), dtype=np.bool_)
    is_run[of_passes] = found[of_passes] > 0
    found[~is_run] = 1 + max(found[is_run], default=0)
    return found
