"""Positions of actions in the programs of ranks, looked up for whole columns at a time."""

from collections.abc import Collection
from itertools import chain

import numpy as np

from workbench.arrays import Ints
from workbench.plan.action_columns import NOWHERE, action_columns
from workbench.plan.plan import Plan
from workbench.schedule.action import Pass

BACKWARDS = (Pass.B, Pass.I)  # at their end, what a forward keeps is freed


class ProgramPositions:
    """Actions by number, and cells: the positions in the programs of some ranks, end to end.

    Args:
        plan: whose programs they are.
        ranks: that have cells, in their order. The others have positions only.

    Attributes:
        number: action -> its number.
        is_forward, is_backward, is_compute: by number.
        first: rank -> its first cell.
        first_on, last_on: first and last cell by rank; NOWHERE for ranks without cells.
        start: by cell, the first cell of its rank.
    """

    def __init__(self, plan: Plan, ranks: Collection[int]) -> None:
        self.number = plan.program_actions
        self._columns = action_columns(plan)
        self.is_forward, self.is_backward = self._columns.are((Pass.F,)), self._columns.are(BACKWARDS)
        self.is_compute = self._columns.is_compute
        self.num_ranks = 1 + max(chain(*(program.ranks for program in plan.programs), plan.ranks), default=0)
        self.longest = int(self._columns.lengths.max(initial=0))
        self._program_on = np.full(self.num_ranks, NOWHERE, np.int64)
        for number, program in enumerate(plan.programs):
            self._program_on[list(program.ranks)] = number
        in_order, lengths = list(ranks), [len(plan.program.get(rank, ())) for rank in ranks]
        ends = np.cumsum(lengths, dtype=np.int64)
        self.first_on, self.last_on = np.full((2, self.num_ranks), NOWHERE, np.int64)
        self.first_on[in_order], self.last_on[in_order] = ends - lengths, ends - 1
        self.first = dict(zip(in_order, (ends - lengths).tolist(), strict=True))
        self.start: Ints = np.repeat(ends - lengths, lengths)

    def at(self, action: Ints, rank: Ints) -> Ints:
        """Return each action's position in the program of the rank given beside it; NOWHERE: not in it."""
        return self._columns.position_in(self._program_on[rank], action)
