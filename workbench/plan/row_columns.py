"""Rows as arrays, and proofs over these that they break no rule; who finds none looks at row after row."""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import NamedTuple

import numpy as np

from workbench.arrays import Flags, Ints
from workbench.plan.lowered import Lowered, Route
from workbench.plan.order import compute_actions, ticks_of
from workbench.schedule.action import Action, Pass, TaskKind

TALKS = (Pass.F, Pass.B, Pass.I)  # passes that send and receive
_ROUTES = {id(route): number for number, route in enumerate(Route)}
_LOCAL, _RELAY, _BROADCAST = (_ROUTES[id(route)] for route in (Route.LOCAL, Route.RELAY, Route.BROADCAST))


class RowColumns(NamedTuple):
    """The rows of a lowered plan, one column each.

    Args:
        row: [R] what each says its number is.
        numbers: pass -> its number; passes in the order of the programs.
        producer, consumer: [R] numbers of passes; -1 for what is none.
        source: [R] rank.
        num_destinations: [R].
        destination: [sum of num_destinations] ranks, row after row.
        route: [R] place among all routes.
        after: [R] row; -1: none.
    """

    row: Ints
    numbers: dict[Action, int]
    producer: Ints
    consumer: Ints
    source: Ints
    num_destinations: Ints
    destination: Ints
    route: Ints
    after: Ints


def columns_of(lowered: Lowered) -> RowColumns:
    """Complexity: O(actions + rows + destinations), a few machine operations each."""
    rows = lowered.transfers
    numbers = {action: number for number, action in enumerate(compute_actions(lowered.plan))}
    destinations = [row.destination_ranks for row in rows]
    return RowColumns(
        np.array([row.row for row in rows], dtype=np.int64),
        numbers,
        numbers_of([row.producer for row in rows], numbers),
        numbers_of([row.consumer for row in rows], numbers),
        np.array([row.source_rank for row in rows], dtype=np.int64),
        np.array([len(ranks) for ranks in destinations], dtype=np.int64),
        np.fromiter(chain.from_iterable(destinations), np.int64),
        np.array([_ROUTES[id(row.route)] for row in rows], dtype=np.int64),
        np.array([-1 if row.after is None else row.after for row in rows], dtype=np.int64),
    )


def numbers_of(actions: Iterable[Action | None], numbers: Mapping[Action, int]) -> Ints:
    """[actions] their numbers; -1: of none. One object again and again, as in rows, is looked up once."""
    found: list[int] = []
    last, number = None, -1
    for action in actions:
        if action is not last:
            last, number = action, -1 if action is None else numbers.get(action, -1)
        found.append(number)
    return np.array(found, dtype=np.int64)


def are_rows_sound(lowered: Lowered, rows: RowColumns) -> bool:
    """Whether every row surely has both ends, on ranks that run them, and comes from who has it.

    To be asked where every action stands on all ranks of its stage.
    """
    num_rows = len(rows.producer)
    if (rows.row != np.arange(num_rows)).any():
        return False
    talks = np.array([action.kind in TALKS for action in rows.numbers], dtype=np.bool_)
    ends = np.concatenate((rows.producer, rows.consumer))
    is_first = rows.after < 0
    return bool(
        num_rows == 0
        or (
            ends.min() >= 0
            and talks[ends].all()
            and _holds(lowered.inputs, rows.numbers, rows.consumer, np.ones(num_rows, dtype=np.bool_))
            and _holds(lowered.outputs, rows.numbers, rows.producer, is_first)
            and _are_ends_there(lowered, rows)
            and _do_follow(rows, is_first)
        )
    )


def _holds(
    table: Mapping[Action, Iterable[int]], numbers: Mapping[Action, int], ends: Ints, wanted: Flags
) -> bool:
    """Whether a table has rows with this end alone, each once, and the wanted ones all."""
    of_each = list(map(tuple, table.values()))
    listed = np.fromiter(chain.from_iterable(of_each), np.int64)
    if len(listed) and not 0 <= listed.min() <= listed.max() < len(ends):
        return False
    times = np.bincount(listed, minlength=len(ends))
    owners = np.repeat(numbers_of(tuple(table), numbers), np.fromiter(map(len, of_each), np.int64))
    return bool(times.max() <= 1 and times[wanted].all() and (ends[listed] == owners).all())


def _are_ends_there(lowered: Lowered, rows: RowColumns) -> bool:
    """Whether the ranks of rows belong to the stages of their passes, one to one but for broadcasts."""
    stages = lowered.plan.stages
    places = {stage.id: place for place, stage in enumerate(stages)}
    stage = np.array([places.get(action.stage or 0, -1) for action in rows.numbers], dtype=np.int64)
    held = np.array(
        [rank * len(stages) + place for place, stage in enumerate(stages) for rank in stage.flat_ranks]
    )
    is_first, is_relay = rows.after < 0, rows.route == _RELAY
    starts = np.cumsum(rows.num_destinations) - rows.num_destinations
    if rows.num_destinations.min() < 1:
        return False
    is_own = rows.source == rows.destination[starts]
    received = np.repeat(~is_relay, rows.num_destinations)
    consumed = rows.destination * len(stages) + np.repeat(stage[rows.consumer], rows.num_destinations)
    produced = rows.source * len(stages) + stage[rows.producer]
    return bool(
        np.isin(consumed[received], held).all()
        and np.isin(produced[is_first], held).all()
        and (rows.num_destinations[is_first] == 1).all()
        and (is_own == (rows.route == _LOCAL))[is_first].all()
    )


def _do_follow(rows: RowColumns, is_first: Flags) -> bool:
    """Whether every row behind another, as each broadcast is, passes on what that brought to one rank."""
    follower = np.flatnonzero(~is_first)
    before = rows.after[follower]
    starts = np.cumsum(rows.num_destinations) - rows.num_destinations
    return bool(
        not (is_first & (rows.route == _BROADCAST)).any()
        and (before < follower).all()
        and (rows.num_destinations[before] == 1).all()
        and (rows.destination[starts[before]] == rows.source[follower]).all()
    )


def goes_forward(lowered: Lowered, rows: RowColumns) -> bool:
    """Whether all but sums of gradients and STEP surely goes in one order, in which nothing waits for later.

    The order is that of the passes' ticks, as `issue_ticks` has them, and behind the passes of a tick the
    rows that they make ready, by number. Then rows of a communicator are in it as they stand, so are those
    that are one as rendezvous, being of one tick, and no rank sends an earlier one later.

    Complexity: O(actions + rows).
    """
    graph, num_rows = lowered.tasks, len(rows.producer)
    ticks = ticks_of(lowered.plan, rows.numbers, rows.producer, rows.consumer)
    is_late = np.array([task.kind in _LATE for task in graph.tasks], dtype=np.bool_)
    if ticks is None or len(rows.numbers) + int(is_late.sum()) != graph.num_tasks:
        return False
    made = ticks[rows.producer]
    if (made[1:] < made[:-1]).any() or (rows.route[rows.after >= 0] != _BROADCAST).any():
        return False
    place = np.zeros(graph.num_nodes, dtype=np.int64)
    place[[graph.passes[action] for action in rows.numbers]] = ticks * (num_rows + 1)
    place[graph.num_tasks :] = made * (num_rows + 1) + 1 + np.arange(num_rows)
    place[: graph.num_tasks][is_late] = -1
    before, after = place[graph.before], place[graph.after]
    return bool(((after < 0) | ((before >= 0) & (before < after))).all())


_LATE = (TaskKind.ALL_REDUCE, TaskKind.STEP)
