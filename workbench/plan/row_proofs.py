"""Vectorised proofs that rows break no rule; where one fails, rows are checked one by one."""

from collections.abc import Iterable, Mapping
from itertools import chain

import numpy as np

from workbench.arrays import Flags, Ints, ints, starts
from workbench.plan.lowered import ROUTES, Lowered, Route, Rows, RowsByAction
from workbench.plan.order import issue_ticks
from workbench.schedule.action import COMPUTE, Action, Pass, TaskKind

TALKS = (Pass.F, Pass.B, Pass.I)  # passes that send and receive


def are_rows_sound(lowered: Lowered) -> bool:
    """Whether every row has both ends on ranks that run them, and a sender that holds its tokens.

    Assumes that every action is on all ranks of its stage. False may mean that the proof found no answer.
    """
    rows, numbers = lowered.rows, lowered.plan.program_actions
    num_rows, is_first = len(rows), rows.after < 0
    return bool(
        (rows.number == np.arange(num_rows)).all()
        and all(action in numbers and action.kind in TALKS for action in rows.actions)
        and _lists_each_once(lowered.inputs, rows, rows.consumer, np.ones(num_rows, dtype=np.bool_))
        and _lists_each_once(lowered.outputs, rows, rows.producer, is_first)
        and (num_rows == 0 or (_are_ends_on_stages(lowered) and _are_relays_sound(rows, is_first)))
    )


def _lists_each_once(table: Mapping[Action, Iterable[int]], rows: Rows, ends: Ints, required: Flags) -> bool:
    """Whether a table lists only rows with this end, each once, and all required ones."""
    if isinstance(table, RowsByAction) and table.end is ends:
        return True
    rows_of = list(map(tuple, table.values()))
    listed = ints(chain.from_iterable(rows_of))
    if len(listed) and not 0 <= listed.min() <= listed.max() < len(ends):
        return False
    times = np.bincount(listed, minlength=len(ends))
    numbers = {action: number for number, action in enumerate(rows.actions)}
    owners = np.repeat(ints(numbers.get(action, -1) for action in table), ints(map(len, rows_of)))
    return bool(max(times, default=0) <= 1 and times[required].all() and (ends[listed] == owners).all())


def _are_ends_on_stages(lowered: Lowered) -> bool:
    """Whether rows' ranks belong to the stages of their passes, one to one except for broadcasts."""
    rows, stages = lowered.rows, lowered.plan.stages
    stage_index = {stage.id: index for index, stage in enumerate(stages)}
    stage = ints(stage_index.get(action.stage or 0, -1) for action in rows.actions)
    stage_ranks = np.array(
        [rank * len(stages) + index for index, stage in enumerate(stages) for rank in stage.flat_ranks]
    )
    is_first, is_relay = rows.after < 0, rows.route == ROUTES[Route.RELAY]
    if rows.num_destinations.min() < 1:
        return False
    is_own = rows.source == rows.destination[starts(rows.num_destinations)]
    received = np.repeat(~is_relay, rows.num_destinations)
    consumed = rows.destination * len(stages) + np.repeat(stage[rows.consumer], rows.num_destinations)
    produced = rows.source * len(stages) + stage[rows.producer]
    return bool(
        np.isin(consumed[received], stage_ranks).all()
        and np.isin(produced[is_first], stage_ranks).all()
        and (rows.num_destinations[is_first] == 1).all()
        and (is_own == (rows.route == ROUTES[Route.LOCAL]))[is_first].all()
    )


def _are_relays_sound(rows: Rows, is_first: Flags) -> bool:
    """Whether every row with an `after`, as each broadcast is, passes on what one rank received by that."""
    follower = np.flatnonzero(~is_first)
    previous = rows.after[follower]
    first = rows.destination[starts(rows.num_destinations)]
    return bool(
        not (is_first & (rows.route == ROUTES[Route.BROADCAST])).any()
        and (previous < follower).all()
        and (rows.num_destinations[previous] == 1).all()
        and (first[previous] == rows.source[follower]).all()
    )


def goes_forward(lowered: Lowered) -> bool:
    """Whether all tasks but reductions and STEP fit one order in which nothing waits for something later.

    The order is by tick of the passes, see `issue_ticks`; after the passes of a tick comes what follows them
    in programs and is no pass, then the rows that they make ready, by number. Rows of a communicator are in
    that order, so are rows matched together in a rendezvous, being of one tick, and no rank sends an earlier
    row later.

    Complexity: O(actions + rows).
    """
    graph, rows = lowered.tasks, lowered.rows
    numbers = lowered.plan.program_actions
    passes = {action: number for action, number in numbers.items() if action.kind in COMPUTE}
    ticks = row_ticks(lowered)
    is_late = np.array([task.kind in _LATE for task in graph.tasks], dtype=np.bool_)
    pass_ticks = ticks[ints(passes.values())]
    if (pass_ticks == ticks[-1]).any():
        return False
    ready = ticks[rows.numbers(numbers)][rows.producer]
    if (ready[1:] < ready[:-1]).any() or (rows.route[rows.after >= 0] != ROUTES[Route.BROADCAST]).any():
        return False
    position = np.zeros(graph.num_nodes, dtype=np.int64)
    position[[graph.passes[action] for action in passes]] = pass_ticks * (len(rows) + 1)
    position[graph.num_tasks :] = ready * (len(rows) + 1) + 1 + np.arange(len(rows))
    num_others = graph.num_tasks - len(passes) - int(is_late.sum())
    if num_others:
        position *= num_others + 1
        position[: graph.num_tasks] = _behind_passes(lowered, position[: graph.num_tasks].tolist())
    position[: graph.num_tasks][is_late] = -1
    before, after = position[graph.before], position[graph.after]
    return bool(((after < 0) | ((before >= 0) & (before < after))).all())


def _behind_passes(lowered: Lowered, position: list[int]) -> list[int]:
    """Return the positions with those of copies, gathers and scatters of weights, and FREE.

    Each is behind all that precedes it in its programs.

    Args:
        lowered: the plan.
        position: [tasks] of passes over microbatches, with room for all others between any two of them.
    """
    graph = lowered.tasks
    for program, lane in zip(lowered.plan.programs, graph.fsdp, strict=True):
        task_of = {joined.action: joined.tasks[0] for joined in lane}
        last = 0
        for action in program.actions:
            task = graph.passes.get(action, task_of.get(action))
            if task is None:  # a reduction or STEP
                continue
            if action.kind not in COMPUTE:
                position[task] = max(position[task], last + 1)
            last = max(last, position[task])
    return position


def row_ticks(lowered: Lowered) -> Ints:
    """Return `issue_ticks` of the plan with its rows."""
    numbers = lowered.rows.numbers(lowered.plan.program_actions)
    return issue_ticks(lowered.plan, numbers[lowered.rows.producer], numbers[lowered.rows.consumer])


_LATE = (TaskKind.ALL_REDUCE, TaskKind.STEP)
