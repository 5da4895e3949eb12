"""The compiled core of list scheduling: one time-ordered loop over arrays. No fast-math."""

from collections.abc import Sequence, Sized
from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple

import numpy as np

from workbench.arrays import Flags, Floats, Ints
from workbench.compiled import compiled

FORWARD, BACKWARD, WEIGHT = 0, 1, 2  # B and I are one kind here: a W follows or does not
ROUNDING = 1e-9  # shares of a microbatch are fractions


class Rows(NamedTuple):
    """Lists of unequal lengths, end to end: list r is `values[offsets[r] : offsets[r + 1]]`."""

    offsets: Ints
    values: Ints


def offsets(lists: Sequence[Sized]) -> Ints:
    """[n + 1] start of each list if they are laid end to end."""
    starts = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(items) for items in lists], out=starts[1:])
    return starts


def rows(lists: Sequence[Sequence[int]]) -> Rows:
    """Lay lists end to end."""
    starts = offsets(lists)
    return Rows(starts, np.fromiter(chain.from_iterable(lists), np.int64, count=int(starts[-1])))


class Passes(NamedTuple):
    """[A] passes and [S] stages of a graph by index; the forwards of a stage are consecutive.

    Args:
        stage, kind, microbatch: [A] of every pass.
        is_last: [A] whether the stage holds nothing of the microbatch after it.
        reads: [A] number of forwards that read a forward without a backward; else -1.
        inputs, followers: by pass.
        first, num_forwards: [S] a stage's first forward, and how many it has.
        group, position: [S] see `PassGraph`.
    """

    stage: Ints
    kind: Ints
    microbatch: Ints
    is_last: Flags
    reads: Ints
    inputs: Rows
    followers: Rows
    first: Ints
    num_forwards: Ints
    group: Ints
    position: Ints


class Rules(NamedTuple):
    """How stages are to be scheduled.

    Args:
        pool: [S] number of the pool; stages of one chain in one group hold microbatches together.
        share, room: [S] weight of a microbatch on the stage, and on it and the later stages of its pool.
        limit: [S] of the stage's pool; inf where there is none.
        waits_turn: [S] whether a forward waits until a reader is at the forward before the one that needs it.
        reader: [P] the stages that read a stage; `wanted` has a row for each.
        wanted: [P] how many own forwards the reader's first j + 1 forwards need.
        readers: [S + 1] where the readers of a stage begin.
        is_ordered: [S] whether the stage's passes have a given order.
        orders, orders_of: the passes of each order, and where the orders of a group begin.
    """

    pool: Ints
    share: Floats
    room: Floats
    limit: Floats
    waits_turn: Flags
    reader: Ints
    wanted: Rows
    readers: Ints
    is_ordered: Flags
    orders: Rows
    orders_of: Ints


@compiled
def play(
    passes: Passes, rules: Rules, free: Rows, duration: Floats, patience: float
) -> tuple[Ints, float, Ints]:
    """Simulate time: each free group starts the first possible pass, see `list_schedule`.

    Args:
        free: by group, the stages without a given order, in the order in which their forwards are tried.
        patience: see `Policy`.

    Returns:
        passes in the order of their starts, fewer than all where orders wait for each other; when the last
        one ends if each starts as soon as its group is free and its inputs are ready; by pool, the most
        microbatches with a backward that are held at once.
    """
    order = _starts(passes, rules, free, duration, patience)
    return order, _finish_time(order, passes, duration), _peak_held(order, passes, rules)


@compiled
def _starts(  # noqa: C901, PLR0912, PLR0915  (one loop: its parts share a dozen arrays)
    passes: Passes, rules: Rules, free: Rows, duration: Floats, patience: float
) -> Ints:
    """Return passes in the order of their starts; fewer than all where orders wait for each other."""
    num_passes, num_stages, num_groups = len(passes.stage), len(passes.first), len(free.offsets) - 1
    stage_of, kind, inputs, followers = passes.stage, passes.kind, passes.inputs, passes.followers
    missing = np.diff(inputs.offsets)
    unread = passes.reads.copy()
    begun = np.zeros(num_stages, np.int64)  # forwards of every stage
    held = np.zeros(num_stages)  # by pool
    done = np.zeros(len(rules.orders.offsets), np.int64)  # of each order
    is_busy = np.zeros(num_groups, np.bool_)
    backwards = [[(0.0, 0, 0)] for _ in range(num_groups)]  # (ready, microbatch, number)
    weights = [[(0, 0)] for _ in range(num_groups)]
    arrivals = [[(0.0, 0)] for _ in range(num_groups)]  # (end of its last running input, number)
    for group in range(num_groups):
        backwards[group].clear()
        weights[group].clear()
        arrivals[group].clear()
    ends = [(0.0, 0)]
    ends.clear()
    touched = list(range(num_groups))
    started = np.empty(num_passes, np.int64)
    num_started = 0
    now = 0.0
    while True:
        chosen = -1
        while touched and chosen < 0:
            group = heappop(touched)
            if not is_busy[group]:
                chosen = _choose(
                    group, now, passes, rules, free, duration, patience, missing, begun, held, done,
                    backwards[group], weights[group], arrivals[group],
                )  # fmt: skip
        if chosen < 0 and not ends:  # nothing runs and nothing may start: a forward exceeds its limit
            chosen = _deepest_ready(passes, free, missing, begun)
            if chosen < 0:
                return started[:num_started]
        if chosen >= 0:
            stage = stage_of[chosen]
            is_busy[passes.group[stage]] = True
            started[num_started] = chosen
            num_started += 1
            end = now + duration[chosen]
            heappush(ends, (end, chosen))
            for index in range(followers.offsets[chosen], followers.offsets[chosen + 1]):
                later = followers.values[index]
                if patience > 0 and missing[later] == 1:
                    heappush(arrivals[passes.group[stage_of[later]]], (end, later))
            if kind[chosen] == FORWARD:
                begun[stage] += 1
                held[rules.pool[stage]] += rules.share[stage]
                for index in range(inputs.offsets[chosen], inputs.offsets[chosen + 1]):
                    # Its next forward may wait for its turn.
                    heappush(touched, passes.group[stage_of[inputs.values[index]]])
            continue
        now = ends[0][0]
        while ends and ends[0][0] == now:
            _, number = heappop(ends)
            stage = stage_of[number]
            is_busy[passes.group[stage]] = False
            heappush(touched, passes.group[stage])
            if kind[number] == FORWARD:
                if unread[number] == 0:
                    held[rules.pool[stage]] -= rules.share[stage]
                for index in range(inputs.offsets[number], inputs.offsets[number + 1]):
                    earlier = inputs.values[index]
                    unread[earlier] -= 1
                    if unread[earlier] == 0:
                        producer = stage_of[earlier]
                        held[rules.pool[producer]] -= rules.share[producer]
                        heappush(touched, passes.group[producer])
            elif passes.is_last[number]:
                held[rules.pool[stage]] -= rules.share[stage]
            for index in range(followers.offsets[number], followers.offsets[number + 1]):
                later = followers.values[index]
                missing[later] -= 1
                if missing[later] == 0:
                    stage = stage_of[later]
                    group = passes.group[stage]
                    heappush(touched, group)
                    if rules.is_ordered[stage] or kind[later] == FORWARD:
                        continue
                    if kind[later] == WEIGHT:
                        heappush(weights[group], (passes.microbatch[later], later))
                    else:
                        heappush(backwards[group], (now, passes.microbatch[later], later))


@compiled
def _choose(  # noqa: C901, PLR0911, PLR0912, PLR0913, PLR0917  (what the loop above has in arrays)
    group: int,
    now: float,
    passes: Passes,
    rules: Rules,
    free: Rows,
    duration: Floats,
    patience: float,
    missing: Ints,
    begun: Ints,
    held: Floats,
    done: Ints,
    backwards: list[tuple[float, int, int]],
    weights: list[tuple[int, int]],
    arrivals: list[tuple[float, int]],
) -> int:
    """Return the pass that a free group starts; -1: none."""
    for order in range(rules.orders_of[group], rules.orders_of[group + 1]):
        index = rules.orders.offsets[order] + done[order]
        if index < rules.orders.offsets[order + 1] and missing[rules.orders.values[index]] == 0:
            done[order] += 1
            return int(rules.orders.values[index])
    if backwards:
        return heappop(backwards)[2]
    forward = -1  # the first possible one with a follower, else any possible one
    for index in range(free.offsets[group], free.offsets[group + 1]):
        stage = free.values[index]
        number = _next_forward(stage, passes, missing, begun)
        if number < 0 or not _may_start(stage, rules, begun, held):
            continue
        if passes.followers.offsets[number] < passes.followers.offsets[number + 1]:
            return number
        if forward < 0:
            forward = number
    if weights:
        limit = now + patience * duration[weights[0][1]]
        while arrivals and arrivals[0][0] <= now:
            heappop(arrivals)
        for end, number in arrivals:
            stage = passes.stage[number]
            if end >= limit or passes.kind[number] == WEIGHT:
                continue
            if passes.kind[number] != FORWARD or rules.is_ordered[stage]:
                return -1  # a better pass arrives soon, and wakes the group
            if passes.microbatch[number] == begun[stage] and _may_start(stage, rules, begun, held):
                return -1
        return heappop(weights)[1]
    return forward


@compiled
def _next_forward(stage: int, passes: Passes, missing: Ints, begun: Ints) -> int:
    """Return the stage's next forward if its inputs are ready; else -1."""
    number = passes.first[stage] + begun[stage]
    return number if begun[stage] < passes.num_forwards[stage] and missing[number] == 0 else -1


@compiled
def _may_start(stage: int, rules: Rules, begun: Ints, held: Floats) -> bool:
    """Whether the next forward is within its limit and its turn has come."""
    if held[rules.pool[stage]] + rules.room[stage] > rules.limit[stage] + ROUNDING:
        return False
    if not rules.waits_turn[stage]:
        return True
    num_begun, num_needed = begun[stage], 0
    for row in range(rules.readers[stage], rules.readers[stage + 1]):
        first, end = rules.wanted.offsets[row], rules.wanted.offsets[row + 1]
        if first == end:
            continue
        if num_begun < rules.wanted.values[min(first + begun[rules.reader[row]], end - 1)]:
            return True
        num_needed = max(num_needed, rules.wanted.values[end - 1])
    return bool(num_begun >= num_needed)


@compiled
def _deepest_ready(passes: Passes, free: Rows, missing: Ints, begun: Ints) -> int:
    """Return the last, in forward order, of the ready forwards without a given order; else -1."""
    deepest, position = -1, -1
    for stage in free.values:
        number = _next_forward(stage, passes, missing, begun)
        if number >= 0 and passes.position[stage] > position:
            deepest, position = number, passes.position[stage]
    return deepest


@compiled
def _finish_time(order: Ints, passes: Passes, duration: Floats) -> float:
    """Return when the last pass ends if each starts as soon as its group is free and its inputs are ready."""
    inputs, finish = passes.inputs, 0.0
    end = np.zeros(len(passes.stage))
    group_end = np.zeros(passes.group.max() + 1 if len(passes.group) else 0)
    for number in order:
        group = passes.group[passes.stage[number]]
        start = group_end[group]
        for index in range(inputs.offsets[number], inputs.offsets[number + 1]):
            start = max(start, end[inputs.values[index]])
        end[number] = group_end[group] = start + duration[number]
        finish = max(finish, group_end[group])
    return finish


@compiled
def _peak_held(order: Ints, passes: Passes, rules: Rules) -> Ints:
    """[S] by pool, the most microbatches with a backward that are held at once."""
    held, peak = np.zeros(len(passes.first), np.int64), np.zeros(len(passes.first), np.int64)
    for number in order:
        pool = rules.pool[passes.stage[number]]
        if passes.kind[number] == FORWARD:
            if passes.reads[number] < 0:
                held[pool] += 1
                peak[pool] = max(peak[pool], held[pool])
        elif passes.is_last[number]:
            held[pool] -= 1
    return peak
