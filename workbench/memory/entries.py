"""Who takes how much memory at which action, and gives it back at which: the lines of the account."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import numpy as np

from workbench.arrays import Ints
from workbench.memory.accounts import Accounts
from workbench.memory.boundary_rows import RowLines, row_lines
from workbench.memory.places import BACKWARDS
from workbench.memory.sizes import StageBytes, StageSplitBytes
from workbench.memory.stage import (
    GRADIENTS,
    StateKind,
    updated_elements,
)
from workbench.model.layer import Pointwise
from workbench.plan.kernels import Kernels
from workbench.plan.lru_cache import LruCache
from workbench.plan.plan import Plan, Stage
from workbench.schedule.action import STEP, Action, Pass

MOST_ACTIONS = 1_000_000  # of all ranks whose passes are remembered
_PASSES: LruCache[Ints] = LruCache(MOST_ACTIONS, lambda columns: columns.shape[1] + 1)
WEIGHTS = (Pass.B, Pass.W)  # these make gradients of matrices and tables


@dataclass(frozen=True, slots=True)
class Lines:
    """A rank's account, by place in its program: taken when an action starts, given back at its end."""

    acquired: list[int]
    released: list[int]


def rank_lines(accounts: Accounts) -> dict[int, Lines]:
    """Everything of the wanted ranks but what moves to and from a host or peers; equal ones share theirs."""
    of_shape: dict[Hashable, Ints] = {}
    passes = []
    for rank in accounts.ranks:
        shape = accounts.shape(rank)
        if shape not in of_shape:
            of_shape[shape] = _PASSES.get_or(accounts.decisive(rank), _PassAccount(accounts, rank).columns)
        passes.append(of_shape[shape])
    rows = row_lines(accounts)
    both = (
        np.stack(_with_rows(np.concatenate(passes, axis=1), rows)) if passes else np.zeros((2, 0), np.int64)
    )
    known: dict[bytes, Lines] = {}
    found: dict[int, Lines] = {}
    for (rank, first), columns in zip(rows.first.items(), passes, strict=True):
        own = both[:, first : first + columns.shape[1]]
        if (name := own.tobytes()) not in known:
            known[name] = Lines(*own.tolist())
        found[rank] = known[name]
    return found


def _with_rows(passes: Ints, rows: RowLines) -> tuple[Ints, Ints]:
    """What is acquired and released by cell, of the columns of `_PassAccount` end to end.

    A forward's inputs and what it keeps beyond them stay until its backward, its output also until
    consumers or sends are through with it.
    """
    acquired, released, kept, input_kept, output, joined, until = passes
    cells = np.arange(len(until))
    kept = kept + rows.held - np.minimum(input_kept, rows.held + rows.passed_on)
    during = np.where(rows.is_joined, joined, 0)
    acquired = acquired + rows.acquired + during + kept + output
    released = released + rows.released + during
    np.add.at(released, cells + until, kept)
    np.add.at(released, np.maximum(cells + until, rows.output_end), output)
    return acquired, released


def gradient_lines(accounts: Accounts, rank: int) -> dict[int, Counter[StateKind]]:
    """Of what a rank takes, the weights' gradients, by place in its program."""
    found: dict[int, Counter[StateKind]] = {}
    for first, kind, num_bytes in _PassAccount(accounts, rank).gradients():
        found.setdefault(first, Counter())[kind] += num_bytes
    return found


class _PassAccount:
    """What passes take on a rank. Positions are places in its program."""

    def __init__(self, accounts: Accounts, rank: int) -> None:
        self._accounts, self._plan, self._rank = accounts, accounts.plan, rank
        self._sizes = accounts.sizes
        self._program = self._plan.program.get(rank, ())
        self._last = len(self._program) - 1
        self._acquired, self._released = ([0] * len(self._program) for _ in range(2))

    @cached_property
    def _places(self) -> dict[Action, int]:
        return {action: place for place, action in enumerate(self._program)}

    def columns(self) -> Ints:
        """By place: bytes acquired and released beside what rows decide, and of this:

        what a forward keeps, the part of it that is its input, its output, what a backward joins to one
        tensor if it comes in several, and how many places behind a forward its backward stands.
        """
        self._add_gradients()
        of_passes = [self._add(*pair) for pair in enumerate(self._program)]
        columns = np.array([self._acquired, self._released], np.int64)
        return np.concatenate((columns, np.array(of_passes, np.int64).reshape(-1, 5).T))

    def _add(self, position: int, action: Action) -> tuple[int, int, int, int, int]:
        """Hold what an action takes whatever its rows are; the other columns."""
        if action.kind is Pass.F:
            return self._add_forward(position, action)
        if action.kind in BACKWARDS:
            return 0, 0, 0, self._add_backward(position, action), 0
        if action.kind is Pass.W:
            split = self._split(action)
            is_first = position == self._first_weights[action.stage]
            self._hold(position, position, split.first if is_first else split.adding)
        elif action.kind is Pass.REDUCE_SCATTER:
            self._add_scattered(position, action)
        elif action in self._accounts.lowered.reductions and action.stage not in self._accounts.units:
            self._add_bucket(position, action)  # parts of sharded weights are added up in place
        elif action == STEP:
            self._hold(position, position, self._step_working())
        return 0, 0, 0, 0, 0

    def _hold(self, first: int, last: int, num_bytes: int) -> None:
        """Taken at the start of one action, given back at the end of the same or a later one."""
        if num_bytes and first <= last:
            self._acquired[first] += num_bytes
            self._released[last] += num_bytes

    def _place(self, action: Action) -> int:
        return self._places[action]

    def _add_forward(self, position: int, action: Action) -> tuple[int, int, int, int, int]:
        backward = self._accounts.backwards.get((action.stage, action.microbatch))
        size = self._size(action, keeps=backward is not None)
        self._hold(position, position, size.forward)
        until = 0 if backward is None else self._place(backward) - position
        return size.kept, size.input_kept, size.output, 0, until

    def _add_backward(self, position: int, action: Action) -> int:
        """What it joins its gradients to."""
        size = self._size(action, keeps=True)
        if action.kind is Pass.I:
            self._hold(position, position, self._split(action).input_pass)
            self._add_left(position, action)
        else:
            is_first = position == self._first_weights[action.stage] or action.stage in self._accounts.units
            self._hold(position, position, size.first if is_first else size.accumulating)
        return size.output

    def _add_left(self, position: int, action: Action) -> None:
        """What an I leaves for its W, and, from a stage's first I on, gradients that only I makes."""
        weights = action._replace(kind=Pass.W)
        if weights in self._places:
            self._hold(position + 1, self._place(weights), self._split(action).left)
        if position == self._first_split[action.stage] and action.stage in self._first_weights:
            early = _early_gradient_bytes(self._plan, self._stage(action))
            self._hold(position, self._first_weights[action.stage], early)

    def _add_bucket(self, position: int, action: Action) -> None:
        """A reduction's copy of the gradients, until STEP makes it the gradients themselves.

        Where no backward made any, zeros stand in for those of one group at a time.
        """
        size = self._plan.settings.gradient_bytes
        total, largest = self._accounts.reduced.get(self._rank, {}).get(action, (0, 0))
        self._hold(position, max(position, self._last - 1), total * size)
        if action.stage not in self._first_weights:
            self._hold(position, position, largest * size)

    def _add_scattered(self, position: int, action: Action) -> None:
        """A round's gradients: whole from its backward on, end to end while they travel, and the own part."""
        assert action.stage is not None
        unit, settings = self._accounts.units[action.stage], self._plan.settings
        began = self._place(action._replace(kind=Pass.ALL_GATHER))
        passes = (place for place in range(began, position) if self._program[place].stage == action.stage)
        made = [place for place in passes if self._program[place].kind is Pass.B]
        if made:
            self._hold(made[0] + 1, position, sum(unit.trained) * settings.precision.num_bytes)
        later = self._scatters[bisect_right(self._scatters, position) :]
        travelling, own = sum(map(unit.padded, unit.trained)), sum(map(unit.part, unit.trained))
        is_first = self._first_round[action.stage] == action
        num_elements = travelling if is_first else travelling + own  # the first part becomes the sum
        self._hold(position, later[0] if later else self._last, num_elements * settings.gradient_bytes)

    @cached_property
    def _scatters(self) -> list[int]:
        """Places of reduce-scatters, ascending."""
        return [place for place, action in enumerate(self._program) if action.kind is Pass.REDUCE_SCATTER]

    def _add_gradients(self) -> None:
        """To the end of the step. What a first pass itself holds of them is part of its working set."""
        for first, _, num_bytes in self.gradients() if self._program else ():
            self._hold(first, self._last, num_bytes)

    def gradients(self) -> Iterator[tuple[int, StateKind, int]]:
        """(place from which on they exist, part, bytes): from a stage's first B or W, else from STEP.

        The parts of sharded weights exist from the first reduce-scatter.
        """
        for stage, kind, num_bytes in self._accounts.state(self._rank):
            if kind.part == GRADIENTS:
                first = self._first_weights.get(stage.id, self._last - 1) + 1
                if stage.id in self._first_round:
                    first = self._place(self._first_round[stage.id])
                yield first, kind, num_bytes

    @cached_property
    def _first_round(self) -> dict[int | None, Action]:
        """Stage -> its first reduce-scatter, where its weights are sharded."""
        scatters = [self._program[place] for place in reversed(self._scatters)]
        return {action.stage: action for action in scatters}

    @cached_property
    def _first_weights(self) -> dict[int | None, int]:
        """Stage -> position of the first pass that makes gradients of its weights."""
        return self._first_of(WEIGHTS)

    @cached_property
    def _first_split(self) -> dict[int | None, int]:
        """Stage -> position of its first I."""
        return self._first_of((Pass.I,))

    def _first_of(self, kinds: tuple[Pass, ...]) -> dict[int | None, int]:
        passes = [pair for pair in enumerate(self._program) if pair[1].kind in kinds]
        return {action.stage: position for position, action in reversed(passes)}

    def _step_working(self) -> int:
        """AdamW's two temporaries of the largest tensor that it updates; a fused one has none."""
        if self._plan.settings.kernels is not Kernels.EAGER:
            return 0
        sizes = [
            elements
            for stage in self._plan.stages
            if self._rank in stage.flat_ranks
            for elements in self._updated_elements(stage)
        ]
        return 2 * ceil(max(sizes, default=0)) * self._plan.settings.gradient_bytes

    def _updated_elements(self, stage: Stage) -> Iterator[float]:
        unit = self._accounts.units.get(stage.id)
        if unit is not None:
            yield from map(unit.part, unit.trained)
            return
        for layer in self._plan.model.module(stage.module).layers[slice(*stage.layers)]:
            if layer.trainable:
                yield from updated_elements(self._plan, stage, layer)

    def _size(self, action: Action, *, keeps: bool) -> StageBytes:
        return self._sizes.each(self._stage(action), keeps=keeps)[action.microbatch or 0]

    def _split(self, action: Action) -> StageSplitBytes:
        return self._sizes.each_split(self._stage(action))[action.microbatch or 0]

    def _stage(self, action: Action) -> Stage:
        assert action.stage is not None
        return self._plan.stage[action.stage]


def _early_gradient_bytes(plan: Plan, stage: Stage) -> int:
    """Gradients that I makes on one rank: of parameters that are no matrix and no table."""
    return sum(
        parameter.num_elements * plan.settings.gradient_bytes
        for layer in plan.model.module(stage.module).layers[slice(*stage.layers)]
        if layer.trainable
        for operator in layer.operators
        if isinstance(operator, Pointwise)
        for parameter in operator.parameters()
    )
