"""Reorders microbatches over time where every rank holds several stages of the chain."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from workbench.balance.microbatches.pipeline_time import Seconds
from workbench.balance.microbatches.reorder import time_matrices
from workbench.schedule.action import Action, Pass

Programs = Sequence[Sequence[Action]]


def reorder_in_programs(
    forward_s: ArrayLike, backward_s: ArrayLike, programs: Programs, rank: int = 0
) -> tuple[int, ...]:
    """Order the smallest first, the p - 1 next smallest last, and fill several intervals at a time between.

    Source: DistTrain, section 5.3, its last paragraph: under virtual pipeline parallelism GETINTERVAL gives
    as many intervals as a rank has stages, which the forwards of a single microbatch fill. The text
    is all there is.
    Differs: an interval is the time between the actions around a forward on the rank when that forward
    takes none. It is simulated with the microbatches placed so far, the mean of those left at all later
    positions, and those kept for the end at theirs. The first p - 1 are chosen one by one like the others.
    The best fit has the smallest sum of absolute differences; equal ones: the lower index. Any programs
    of a chain's ranks will do; some ranks may hold one stage and others several.

    Args:
        forward_s, backward_s: [l, stages] seconds of every microbatch on every stage along the chain.
        programs: of the chain's ranks in its order; microbatches are positions, stages are columns.
        rank: whose intervals are filled; p counts the ranks from this one on.

    Returns:
        [l] microbatches in execution order.

    Raises:
        ValueError: as `reorder_microbatches`.

    Complexity: O(l^2 stages).
    """
    forward, backward = time_matrices(forward_s, backward_s)
    columns = sorted({action.stage or 0 for action in programs[rank]})
    p = len(programs) - rank
    smallest_first = [int(index) for index in np.argsort(forward[:, columns].sum(axis=1), kind="stable")]
    order, rear, rest = smallest_first[:1], smallest_first[1:p], smallest_first[p:]
    while rest:
        times = _with_mean(forward, backward, order, rest, rear)
        gaps_s = intervals(*times, programs, len(order), rank)
        chosen = min(rest, key=lambda index: (float(np.abs(forward[index, columns] - gaps_s).sum()), index))
        rest.remove(chosen)
        order.append(chosen)
    return (*order, *rear)


def _with_mean(
    forward: Seconds, backward: Seconds, order: Sequence[int], rest: Sequence[int], rear: Sequence[int]
) -> tuple[Seconds, Seconds]:
    """[l, p v] times by position: those placed, the mean of the rest, those kept for the end."""
    tables = []
    for table in (forward, backward):
        mean = table[list(rest)].mean(axis=0, keepdims=True).repeat(len(rest), axis=0)
        tables.append(np.vstack([table[list(order)], mean, table[list(rear)]]))
    return tables[0], tables[1]


def intervals(
    forward: Seconds, backward: Seconds, programs: Programs, position: int, rank: int = 0
) -> Seconds:
    """[v] seconds on a rank between the actions around each forward of a position, if it took no time.

    Args:
        forward, backward: [l, stages] seconds by position and stage.
        programs: of the chain's ranks.
        position: of the forwards.
        rank: whose intervals they are.
    """
    without_forwards = forward.copy()
    forwards = [
        action for action in programs[rank] if action.kind is Pass.F and action.microbatch == position
    ]
    for action in forwards:
        without_forwards[position, action.stage or 0] = 0.0
    starts = play(without_forwards, backward, programs)
    program = list(programs[rank])
    seconds = []
    for action in sorted(forwards, key=lambda forward_action: forward_action.stage or 0):
        index = program.index(action)
        before, after = program[index - 1] if index else None, program[index + 1]
        end_s = 0.0 if before is None else starts[before] + _seconds(without_forwards, backward, before)
        seconds.append(starts[after] - end_s)
    return np.array(seconds)


def play(forward: Seconds, backward: Seconds, programs: Programs) -> dict[Action, float]:
    """Return when every action starts if it waits for its rank and its input alone."""
    last = forward.shape[1] - 1
    starts: dict[Action, float] = {}
    free_s, num_done = [0.0] * len(programs), [0] * len(programs)
    progressed = True
    while progressed:
        progressed = False
        for rank, program in enumerate(programs):
            while num_done[rank] < len(program):
                action = program[num_done[rank]]
                needed = _input(action, last)
                if needed is not None and needed not in starts:
                    break
                ready_s = 0.0 if needed is None else starts[needed] + _seconds(forward, backward, needed)
                starts[action] = max(free_s[rank], ready_s)
                free_s[rank] = starts[action] + _seconds(forward, backward, action)
                num_done[rank] += 1
                progressed = True
    assert all(done == len(program) for done, program in zip(num_done, programs, strict=True))
    return starts


def _seconds(forward: Seconds, backward: Seconds, action: Action) -> float:
    table = forward if action.kind is Pass.F else backward
    return float(table[action.microbatch or 0, action.stage or 0])


def _input(action: Action, last: int) -> Action | None:
    stage = action.stage or 0
    if action.kind is Pass.F:
        return action._replace(stage=stage - 1) if stage else None
    return action._replace(stage=stage + 1) if stage < last else action._replace(kind=Pass.F)
