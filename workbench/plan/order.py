"""Order of actions where a rank runs them one at a time, whatever their lanes.

The task graph says what may run beside what; here nothing does. This order numbers rows, which passes alone
decide, before there are rows to make a graph of; search compares plans by one lane; and in emulation one
device does everything.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np

from workbench.arrays import Ints
from workbench.plan.lru_cache import LruCache, value_key
from workbench.plan.plan import Plan
from workbench.schedule.action import COMPUTE, Action
from workbench.schedule.precedence import longest_path

MOST_ACTIONS = 1_000_000  # in all cached plans together
_TICKS: LruCache[Ints] = LruCache(MOST_ACTIONS, len)


def one_by_one(plan: Plan, is_wanted: Callable[[Action], bool]) -> Iterable[tuple[Action, Action]]:
    """Yield pairs of consecutive actions of each program, unwanted ones left out."""
    for program in plan.programs:
        yield from pairwise(filter(is_wanted, program.actions))


def followers_of(actions: Iterable[Action], edges: Iterable[tuple[Action, Action]]) -> list[list[int]]:
    """Return the successors of each action by index, each once; edges of other actions are left out."""
    number = {action: index for index, action in enumerate(actions)}
    followers: list[list[int]] = [[] for _ in number]
    numbers = (
        (number[earlier], number[later]) for earlier, later in edges if earlier in number and later in number
    )
    for before, after in dict.fromkeys(numbers):
        followers[before].append(after)
    return followers


def issue_ticks(plan: Plan, producers: Ints, consumers: Ints) -> Ints:
    """[actions + 1] tick in which each action ends: one after its ranks' previous actions and its inputs.

    Only passes count. Those on or behind a cycle never run: they get the tick after all others, as do all
    actions that are no passes and, in the last entry, actions in no program. Longest path, O(actions + rows),
    once for equal orders.

    Args:
        plan: whose `program_actions` number the actions.
        producers, consumers: [rows] numbers of the ends; -1: in no program.
    """
    numbers = plan.program_actions
    pairs = np.unique((producers * len(numbers) + consumers)[(producers >= 0) & (consumers >= 0)])
    return _TICKS.get_or((value_key(plan.programs), pairs.tobytes()), lambda: _issue_ticks(plan, pairs))


def _issue_ticks(plan: Plan, pairs: Ints) -> Ints:
    """As `issue_ticks`; a pair of ends is one number: producer x actions + consumer."""
    numbers = plan.program_actions
    followers: list[list[int]] = [[] for _ in numbers]
    passes = {action: number for action, number in numbers.items() if action.kind in COMPUTE}
    for program in plan.programs:
        for before, after in pairwise([passes[action] for action in program.actions if action in passes]):
            followers[before].append(after)
    for before, after in zip((pairs // len(numbers)).tolist(), (pairs % len(numbers)).tolist(), strict=True):
        followers[before].append(after)
    starts = longest_path(followers, [1.0] * len(followers))
    ticks = np.zeros(len(numbers) + 1, dtype=np.int64)
    pass_numbers = np.fromiter(passes.values(), np.int64)
    ticks[list(starts)] = np.fromiter(starts.values(), np.int64) + 1
    is_run = np.zeros(len(ticks), dtype=np.bool_)
    is_run[pass_numbers] = ticks[pass_numbers] > 0
    ticks[~is_run] = 1 + max(ticks[is_run], default=0)
    return ticks
