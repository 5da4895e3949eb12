"""Reorders microbatches over time where every rank holds several stages of the chain."""

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise

import numpy as np
from numpy.typing import ArrayLike

from workbench.balance.microbatches.pipeline_time import Order, Seconds
from workbench.balance.microbatches.reorder import time_matrices
from workbench.compiled import compiled
from workbench.schedule.action import Action, Pass
from workbench.schedule.precedence import in_order

Programs = Sequence[Sequence[Action]]
NOTHING = -1  # in place of an action


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

    Complexity: O(l^2 stages), in compiled code.
    """
    forward, backward = time_matrices(forward_s, backward_s)
    columns = sorted({action.stage or 0 for action in programs[rank]})
    p, walk = len(programs) - rank, Walk(programs, forward.shape[1])
    smallest_first = [int(index) for index in np.argsort(forward[:, columns].sum(axis=1), kind="stable")]
    order, rear, rest = smallest_first[:1], smallest_first[1:p], smallest_first[p:]
    while rest:
        gaps_s = walk.intervals(*_with_mean(forward, backward, order, rest, rear), len(order), rank)
        misfit_s = np.abs(forward[np.ix_(rest, columns)] - gaps_s).sum(axis=1)
        chosen = min(rest[index] for index in np.flatnonzero(misfit_s == misfit_s.min()))
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


class Walk:
    """The programs of a chain's ranks, to play with different times.

    An action starts when the one before it on its rank and its input have ended.

    Args:
        programs: of the ranks.
        num_stages: of the chain.
    """

    def __init__(self, programs: Programs, num_stages: int) -> None:
        self._programs = programs
        actions = list(chain.from_iterable(programs))
        index_of = {action: index for index, action in enumerate(actions)}
        before = {later: earlier for program in programs for earlier, later in pairwise(program)}
        followers: list[list[int]] = [[] for _ in actions]
        for action, index in index_of.items():
            for earlier in (before.get(action), _input(action, num_stages - 1)):
                if earlier is not None:
                    followers[index_of[earlier]].append(index)
        ordered = [actions[index] for index in in_order(followers)]
        assert len(ordered) == len(actions), "programs of a schedule do not deadlock"
        self.number = {action: number for number, action in enumerate(ordered)}
        """Of every action, in an order in which all can be played."""
        self._before = self._numbers(before.get(action) for action in ordered)
        self._needed = self._numbers(_input(action, num_stages - 1) for action in ordered)
        self._is_forward = np.array([action.kind is Pass.F for action in ordered], np.bool_)
        cells = [(action.microbatch or 0, action.stage or 0) for action in ordered]
        self._cells = tuple(np.array(cells, np.int64).reshape(-1, 2).T)

    def _numbers(self, actions: Iterable[Action | None]) -> Order:
        return np.array([NOTHING if each is None else self.number[each] for each in actions], np.int64)

    def starts_s(self, forward: Seconds, backward: Seconds) -> tuple[Seconds, Seconds]:
        """Return ([actions] start, [actions] end) by number, of [l, stages] seconds by position and stage."""
        seconds = np.where(self._is_forward, forward[self._cells], backward[self._cells])
        return played(seconds, self._before, self._needed)

    def intervals(self, forward: Seconds, backward: Seconds, position: int, rank: int = 0) -> Seconds:
        """[v] seconds on a rank between the actions around each forward of a position, if it took no time.

        Args:
            forward, backward: [l, stages] seconds by position and stage.
            position: of the forwards.
            rank: whose intervals they are.
        """
        program = self._programs[rank]
        indices = [
            index
            for index, action in enumerate(program)
            if action.kind is Pass.F and action.microbatch == position
        ]
        indices.sort(key=lambda index: program[index].stage or 0)
        without_forwards = forward.copy()
        without_forwards[position, [program[index].stage or 0 for index in indices]] = 0.0
        start_s, end_s = self.starts_s(without_forwards, backward)
        number = self.number
        return np.array(
            [
                start_s[number[program[index + 1]]] - (end_s[number[program[index - 1]]] if index else 0.0)
                for index in indices
            ]
        )


@compiled
def played(seconds: Seconds, before: Order, needed: Order) -> tuple[Seconds, Seconds]:
    """Return start and end of every action.

    Args:
        seconds: [actions] duration of each.
        before, needed: [actions] the actions that it waits for, which have lower numbers; -1: none.
    """
    num = len(seconds)
    start_s, end_s = np.zeros(num), np.zeros(num + 1)  # the last: of no action
    for action in range(num):
        start_s[action] = max(end_s[before[action]], end_s[needed[action]])
        end_s[action] = start_s[action] + seconds[action]
    return start_s, end_s[:num]


def _input(action: Action, last: int) -> Action | None:
    stage = action.stage or 0
    if action.kind is Pass.F:
        return action._replace(stage=stage - 1) if stage else None
    return action._replace(stage=stage + 1) if stage < last else action._replace(kind=Pass.F)
