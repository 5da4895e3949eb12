"""The actions of a plan's programs in columns, for who looks at all of them at once."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from workbench.arrays import Flags, Ints, ints
from workbench.plan.instance_cache import cached_on_instance
from workbench.plan.plan import Plan
from workbench.schedule.action import COMPUTE, Pass

NOWHERE = -1
KIND = {kind: number for number, kind in enumerate(Pass)}  # as in columns


@dataclass(frozen=True, eq=False)
class ActionColumns:
    """Actions by number, as `Plan.program_actions` has them, and programs as such numbers, end to end.

    No `slots`: look-up tables are cached.

    Args:
        stage, kind, microbatch: [actions] of each; -1: of no stage, no microbatch.
        number: [entries of all programs] actions.
        lengths: [programs] entries of each.
    """

    stage: Ints
    kind: Ints
    microbatch: Ints
    number: Ints
    lengths: Ints

    @cached_property
    def program(self) -> Ints:
        """[entries] number of the program."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @cached_property
    def place(self) -> Ints:
        """[entries] place in the program."""
        return np.arange(len(self.number)) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)

    @cached_property
    def is_compute(self) -> Flags:
        """[actions] whether it is a pass over a microbatch."""
        return self.are(COMPUTE)

    def are(self, kinds: Iterable[Pass]) -> Flags:
        """[actions] whether each is of one of these kinds."""
        is_one = np.zeros(len(KIND), np.bool_)
        is_one[[KIND[kind] for kind in kinds]] = True
        return is_one[self.kind]

    @cached_property
    def _sorted(self) -> tuple[Ints, Ints]:
        """Keys of (action, program), ascending, and the place of each."""
        key = self.number * len(self.lengths) + self.program
        order = np.argsort(key, kind="stable")
        return key[order], self.place[order]

    def place_in(self, program: Ints, action: Ints) -> Ints:
        """The place of each action in the program beside it, its last one there; NOWHERE where it is not."""
        keys, places = self._sorted
        key = action * len(self.lengths) + program
        found = np.searchsorted(keys, key, side="right") - 1
        is_there = (action >= 0) & (program >= 0) & (found >= 0)
        is_there &= keys[found] == key
        return np.where(is_there, places[found], NOWHERE)


@cached_on_instance
def action_columns(plan: Plan) -> ActionColumns:
    """The plan's. O(entries of its programs)."""
    numbers = plan.program_actions
    columns = [
        (-1 if stage is None else stage, KIND[kind], -1 if microbatch is None else microbatch)
        for stage, kind, microbatch in numbers
    ]
    stage, kind, microbatch = np.array(columns, np.int64).reshape(-1, 3).T
    every = chain.from_iterable(program.actions for program in plan.programs)
    return ActionColumns(
        stage=stage,
        kind=kind,
        microbatch=microbatch,
        number=ints(map(numbers.__getitem__, every)),
        lengths=ints(len(program.actions) for program in plan.programs),
    )
