"""The actions of a plan's programs as NumPy columns, for code that works on all of them at once."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from workbench.arrays import Flags, Ints, ints
from workbench.plan.instance_cache import cached_on_instance
from workbench.plan.plan import Plan
from workbench.schedule.action import COMPUTE, MOVES, Pass

NOWHERE = -1
KIND = {kind: number for number, kind in enumerate(Pass)}  # as in columns


@dataclass(frozen=True, eq=False)
class ActionColumns:
    """All actions by number, as in `Plan.program_actions`, and the programs as such numbers, end to end.

    No `slots`: look-up tables are cached on the instance.

    Args:
        stage, kind, microbatch: [actions] of each action; -1: it has no stage or no microbatch.
        number: [entries of all programs] number of the action.
        lengths: [programs] entries of each program.
    """

    stage: Ints
    kind: Ints
    microbatch: Ints
    number: Ints
    lengths: Ints

    @cached_property
    def program(self) -> Ints:
        """[entries] number of the program that holds each entry."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @cached_property
    def position(self) -> Ints:
        """[entries] position in its program."""
        return np.arange(len(self.number)) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)

    @cached_property
    def is_compute(self) -> Flags:
        """[actions] whether it is a pass over a microbatch (F, B, I or W)."""
        return self.are(COMPUTE)

    @cached_property
    def moves_weights(self) -> bool:
        """Whether any action brings weights to a device or removes them."""
        return bool(self.are(MOVES).any())

    def are(self, kinds: Iterable[Pass]) -> Flags:
        """[actions] whether each is of one of these kinds."""
        is_selected = np.zeros(len(KIND), np.bool_)
        is_selected[[KIND[kind] for kind in kinds]] = True
        return is_selected[self.kind]

    @cached_property
    def _sorted(self) -> tuple[Ints, Ints]:
        """Keys of (action, program) in ascending order, and the position of each entry in its program."""
        key = self.number * len(self.lengths) + self.program
        order = np.argsort(key, kind="stable")
        return key[order], self.position[order]

    def position_in(self, program: Ints, action: Ints) -> Ints:
        """Position of each action's last entry in the program given beside it; NOWHERE where it has none."""
        keys, positions = self._sorted
        key = action * len(self.lengths) + program
        index = np.searchsorted(keys, key, side="right") - 1
        is_present = (action >= 0) & (program >= 0) & (index >= 0)
        is_present &= keys[index] == key
        return np.where(is_present, positions[index], NOWHERE)


@cached_on_instance
def action_columns(plan: Plan) -> ActionColumns:
    """Return the plan's actions in columns. O(entries of its programs)."""
    number_of = plan.program_actions
    stages, kinds, microbatches = zip(*number_of, strict=True) if number_of else ((), (), ())
    entries = chain.from_iterable(program.actions for program in plan.programs)
    return ActionColumns(
        stage=ints([NOWHERE if stage is None else stage for stage in stages]),
        kind=ints(map(KIND.__getitem__, kinds)),
        microbatch=ints([NOWHERE if microbatch is None else microbatch for microbatch in microbatches]),
        number=ints(map(number_of.__getitem__, entries)),
        lengths=ints(len(program.actions) for program in plan.programs),
    )
