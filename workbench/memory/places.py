"""Where actions stand in the programs of ranks, looked up for whole columns at a time."""

from collections.abc import Collection
from itertools import chain

import numpy as np

from workbench.arrays import Ints
from workbench.plan.plan import Plan
from workbench.schedule.action import COMPUTE, Pass

BACKWARDS = (Pass.B, Pass.I)  # what a forward keeps is given back at their end
NOWHERE = -1


class Places:
    """Actions by number, and cells: the places in the programs of some ranks, end to end.

    Args:
        plan: whose programs they are.
        ranks: that have cells, in their order. The others have places only.

    Attributes:
        number: action -> its number.
        is_forward, is_backward, is_compute: by number.
        first: rank -> its first cell.
        first_on, last_on: the same by rank, and its last cell; NOWHERE for ranks without cells.
        start: by cell, the first cell of its rank.
    """

    def __init__(self, plan: Plan, ranks: Collection[int]) -> None:
        self.number = plan.program_actions
        kinds = [action.kind for action in self.number]
        self.is_forward = np.array([kind is Pass.F for kind in kinds], np.bool_)
        self.is_backward = np.array([kind in BACKWARDS for kind in kinds], np.bool_)
        self.is_compute = np.array([kind in COMPUTE for kind in kinds], np.bool_)
        self.num_ranks = 1 + max(chain(*(program.ranks for program in plan.programs), plan.ranks), default=0)
        self._number_places(plan)
        in_order, lengths = list(ranks), [len(plan.program.get(rank, ())) for rank in ranks]
        ends = np.cumsum(lengths, dtype=np.int64)
        self.first_on, self.last_on = np.full((2, self.num_ranks), NOWHERE, np.int64)
        self.first_on[in_order], self.last_on[in_order] = ends - lengths, ends - 1
        self.first = dict(zip(in_order, (ends - lengths).tolist(), strict=True))
        self.start: Ints = np.repeat(ends - lengths, lengths)

    def _number_places(self, plan: Plan) -> None:
        """Sort (action, program) with the place, the last where it stands there twice."""
        programs = plan.programs
        lengths = [len(program.actions) for program in programs]
        actions = list(map(self.number.__getitem__, chain(*(program.actions for program in programs))))
        owner = np.repeat(np.arange(len(programs)), lengths)
        place = np.arange(len(actions)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        keys = np.array(actions, np.int64) * len(programs) + owner
        order = np.argsort(keys, kind="stable")
        self._keys, self._place_of = keys[order], place[order]
        self.longest, self._num_programs = max(lengths, default=0), len(programs)
        self._program_on = np.full(self.num_ranks, NOWHERE, np.int64)
        for number, program in enumerate(programs):
            self._program_on[list(program.ranks)] = number

    def at(self, action: Ints, rank: Ints) -> Ints:
        """The place of each action in the program of the rank beside it; NOWHERE where it is not in it."""
        program = self._program_on[rank]
        key = action * self._num_programs + program
        found = np.searchsorted(self._keys, key, side="right") - 1
        is_there = (action >= 0) & (program >= 0) & (found >= 0)
        is_there &= self._keys[found] == key
        return np.where(is_there, self._place_of[found], NOWHERE)
