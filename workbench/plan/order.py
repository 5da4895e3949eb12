"""Which actions follow which where a rank does its actions one at a time, whatever their lanes.

The task graph says what may run beside what. Here nothing does: for the numbers of rows, which passes
alone decide, before there are rows to make a graph of; for search, which compares plans by one lane;
and for emulation, where one device does all.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np

from workbench.arrays import Ints
from workbench.plan.action_columns import action_columns
from workbench.plan.order_loop import ticks
from workbench.plan.plan import Plan
from workbench.plan.task_graph import adjacency, num_missing
from workbench.schedule.action import Action


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
    that are no passes and, at the end, what is in no program. Longest path, O(actions + rows).

    Args:
        plan: whose `program_actions` give actions their numbers.
        producers, consumers: [rows] numbers of the ends; -1: in no program.
    """
    of = action_columns(plan)
    num_actions = len(of.kind)
    is_pass = of.is_compute[of.number]
    passes, program = of.number[is_pass], of.program[is_pass]
    is_next, is_in = program[1:] == program[:-1], (producers >= 0) & (consumers >= 0)
    before = np.concatenate((passes[:-1][is_next], producers[is_in]))
    after = np.concatenate((passes[1:][is_next], consumers[is_in]))
    found = np.zeros(num_actions + 1, dtype=np.int64)
    found[:-1] = ticks(num_missing(after, num_actions), *adjacency(before, after, num_actions))
    found[:-1][~of.is_compute] = 0
    found[found == 0] = 1 + found.max()
    return found
