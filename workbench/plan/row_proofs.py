"""Proofs over rows in columns that they break no rule; who finds none looks at row after row."""

from collections.abc import Iterable, Mapping
from itertools import chain

import numpy as np

from workbench.arrays import Flags, Ints, ints, starts
from workbench.plan.lowered import ROUTES, Lowered, Route, Rows, RowsByAction
from workbench.plan.order import issue_ticks
from workbench.schedule.action import COMPUTE, Action, Pass, TaskKind

TALKS = (Pass.F, Pass.B, Pass.I)  # passes that send and receive


def are_rows_sound(lowered: Lowered) -> bool:
    """Whether every row surely has both ends, on ranks that run them, and comes from who has it.

    To be asked where every action stands on all ranks of its stage.
    """
    rows, of_program = lowered.rows, lowered.plan.program_actions
    num_rows, is_first = len(rows), rows.after < 0
    return bool(
        (rows.number == np.arange(num_rows)).all()
        and all(action in of_program and action.kind in TALKS for action in rows.actions)
        and _holds(lowered.inputs, rows, rows.consumer, np.ones(num_rows, dtype=np.bool_))
        and _holds(lowered.outputs, rows, rows.producer, is_first)
        and (num_rows == 0 or (_are_ends_there(lowered) and _do_follow(rows, is_first)))
    )


def _holds(table: Mapping[Action, Iterable[int]], rows: Rows, ends: Ints, wanted: Flags) -> bool:
    """Whether a table has rows with this end alone, each once, and the wanted ones all."""
    if isinstance(table, RowsByAction) and table.end is ends:
        return True
    of_each = list(map(tuple, table.values()))
    listed = ints(chain.from_iterable(of_each))
    if len(listed) and not 0 <= listed.min() <= listed.max() < len(ends):
        return False
    times = np.bincount(listed, minlength=len(ends))
    numbers = {action: number for number, action in enumerate(rows.actions)}
    owners = np.repeat(ints(numbers.get(action, -1) for action in table), ints(map(len, of_each)))
    return bool(max(times, default=0) <= 1 and times[wanted].all() and (ends[listed] == owners).all())


def _are_ends_there(lowered: Lowered) -> bool:
    """Whether the ranks of rows belong to the stages of their passes, one to one but for broadcasts."""
    rows, stages = lowered.rows, lowered.plan.stages
    places = {stage.id: place for place, stage in enumerate(stages)}
    stage = ints(places.get(action.stage or 0, -1) for action in rows.actions)
    held = np.array(
        [rank * len(stages) + place for place, stage in enumerate(stages) for rank in stage.flat_ranks]
    )
    is_first, is_relay = rows.after < 0, rows.route == ROUTES[Route.RELAY]
    if rows.num_destinations.min() < 1:
        return False
    is_own = rows.source == rows.destination[starts(rows.num_destinations)]
    received = np.repeat(~is_relay, rows.num_destinations)
    consumed = rows.destination * len(stages) + np.repeat(stage[rows.consumer], rows.num_destinations)
    produced = rows.source * len(stages) + stage[rows.producer]
    return bool(
        np.isin(consumed[received], held).all()
        and np.isin(produced[is_first], held).all()
        and (rows.num_destinations[is_first] == 1).all()
        and (is_own == (rows.route == ROUTES[Route.LOCAL]))[is_first].all()
    )


def _do_follow(rows: Rows, is_first: Flags) -> bool:
    """Whether every row behind another, as each broadcast is, passes on what that brought to one rank."""
    follower = np.flatnonzero(~is_first)
    before = rows.after[follower]
    first = rows.destination[starts(rows.num_destinations)]
    return bool(
        not (is_first & (rows.route == ROUTES[Route.BROADCAST])).any()
        and (before < follower).all()
        and (rows.num_destinations[before] == 1).all()
        and (first[before] == rows.source[follower]).all()
    )


def goes_forward(lowered: Lowered) -> bool:
    """Whether all but sums of gradients and STEP surely goes in one order, in which nothing waits for later.

    The order is that of the passes' ticks, as `issue_ticks` has them, and behind the passes of a tick the
    rows that they make ready, by number. Then rows of a communicator are in it as they stand, so are those
    that are one as rendezvous, being of one tick, and no rank sends an earlier one later.

    Complexity: O(actions + rows).
    """
    graph, rows = lowered.tasks, lowered.rows
    numbers = lowered.plan.program_actions
    passes = {action: number for action, number in numbers.items() if action.kind in COMPUTE}
    ticks = row_ticks(lowered)
    is_late = np.array([task.kind in _LATE for task in graph.tasks], dtype=np.bool_)
    of_passes = ticks[ints(passes.values())]
    if (of_passes == ticks[-1]).any() or len(passes) + int(is_late.sum()) != graph.num_tasks:
        return False
    made = ticks[rows.numbers(numbers)][rows.producer]
    if (made[1:] < made[:-1]).any() or (rows.route[rows.after >= 0] != ROUTES[Route.BROADCAST]).any():
        return False
    place = np.zeros(graph.num_nodes, dtype=np.int64)
    place[[graph.passes[action] for action in passes]] = of_passes * (len(rows) + 1)
    place[graph.num_tasks :] = made * (len(rows) + 1) + 1 + np.arange(len(rows))
    place[: graph.num_tasks][is_late] = -1
    before, after = place[graph.before], place[graph.after]
    return bool(((after < 0) | ((before >= 0) & (before < after))).all())


def row_ticks(lowered: Lowered) -> Ints:
    """`issue_ticks` of the plan with its rows."""
    numbers = lowered.rows.numbers(lowered.plan.program_actions)
    return issue_ticks(lowered.plan, numbers[lowered.rows.producer], numbers[lowered.rows.consumer])


_LATE = (TaskKind.ALL_REDUCE, TaskKind.STEP)
