"""What passes take on ranks, whatever rows come and go, in columns."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import ceil

import numpy as np

from workbench.arrays import Flags, Ints, ints, spans, starts
from workbench.memory.accounts import Accounts
from workbench.memory.sizes import StageBytes, StageSplitBytes
from workbench.memory.stage import GRADIENTS, StateKind, updated_elements
from workbench.model.layer import Pointwise
from workbench.plan.action_columns import KIND, NOWHERE, action_columns
from workbench.plan.kernels import Kernels
from workbench.plan.plan import Plan, Stage
from workbench.schedule.action import MEANING, Pass, TaskKind, reduction_of

WEIGHTS = (Pass.B, Pass.W)  # these make gradients of matrices and tables
_WAITING = tuple(kind for kind in Pass if MEANING[kind].task in (TaskKind.PASS, TaskKind.STEP))


class PassLines:
    """The account of ranks by cell: a place in a rank's program, those of all ranks end to end.

    Args:
        accounts: of their plan.
        ranks: whose cells they are, in their order.

    Attributes:
        lengths: [ranks] cells of each.
    """

    def __init__(self, accounts: Accounts, ranks: Sequence[int]) -> None:
        self._accounts, self._plan, self._ranks = accounts, accounts.plan, ranks
        of, plan = action_columns(self._plan), self._plan
        program_of = {rank: number for number, program in enumerate(plan.programs) for rank in program.ranks}
        program = ints(program_of.get(rank, NOWHERE) for rank in ranks)
        self.lengths: Ints = np.append(of.lengths, 0)[program]  # none where there is no program
        entry = spans(np.append(starts(of.lengths), 0)[program], self.lengths)
        number = of.number[entry]
        self._stage, self._kind, self._microbatch = of.stage[number], of.kind[number], of.microbatch[number]
        self._owner = np.repeat(np.arange(len(ranks)), self.lengths)
        self._last = np.cumsum(self.lengths) - 1
        self._num_stages = 1 + max((NOWHERE, *plan.stage, *of.stage.tolist()))
        self._held = self._owner * (self._num_stages + 1) + self._stage + 1  # rank and stage, as one number
        self._acquired, self._released = np.zeros((2, len(number)), np.int64)

    def columns(self) -> Ints:
        """By cell: bytes acquired and released beside what rows decide, and of this:

        what a forward keeps, the part of it that is its input, its output, what a backward joins to one
        tensor if it comes in several, and how many places behind a forward its backward stands.
        """
        self._add_gradients()
        kept, input_kept, output, joined, until = of_passes = np.zeros((5, len(self._kind)), np.int64)
        self._add_forwards(kept, input_kept, output, until)
        self._add_backwards(joined)
        if len(split := self._cells(Pass.I)):
            self._add_split(split, joined)
        self._add_scattered()
        self._add_buckets()
        steps = self._cells(Pass.STEP)
        self._hold(steps, steps, ints(map(self._step_working, self._owner[steps].tolist())))
        return np.concatenate((self._acquired[None], self._released[None], of_passes))

    def gradients(self) -> Iterator[tuple[int, int, StateKind, int]]:
        """(place of the rank, cell from which on they exist, part, bytes).

        They exist from a stage's first B or W on, else from STEP; parts of sharded weights from the first
        reduce-scatter.
        """
        for owner, rank in enumerate(self._ranks):
            last = int(self._last[owner])
            for stage, kind, num_bytes in self._accounts.state(rank) if self.lengths[owner] else ():
                if kind.part == GRADIENTS:
                    held = owner * (self._num_stages + 1) + stage.id + 1
                    made, scattered = int(self._first_weights[held]), int(self._first_round[held])
                    first = scattered if scattered != NOWHERE else 1 + (last - 1 if made == NOWHERE else made)
                    yield owner, first, kind, num_bytes

    def _cells(self, *kinds: Pass) -> Ints:
        """Of actions of these kinds."""
        is_one = np.zeros(len(KIND), np.bool_)
        is_one[[KIND[kind] for kind in kinds]] = True
        return np.flatnonzero(is_one[self._kind])

    def _hold(self, first: Ints, last: Ints, num_bytes: Ints) -> None:
        """Taken at the start of one action, given back at the end of the same or a later one."""
        is_held = first <= last
        np.add.at(self._acquired, first[is_held], num_bytes[is_held])
        np.add.at(self._released, last[is_held], num_bytes[is_held])

    @cached_property
    def _sorted(self) -> tuple[Ints, Ints]:
        """Keys of all cells, ascending, and the cells."""
        key = self._key(np.arange(len(self._kind)), self._kind)
        order = np.argsort(key)
        return key[order], order

    def _key(self, cells: Ints, kind: Ints | int) -> Ints:
        """By which an action of that kind is found, of the rank, stage and microbatch of each cell."""
        num_microbatches = 2 + int(self._microbatch.max(initial=NOWHERE))
        of_pass = self._held[cells] * num_microbatches + self._microbatch[cells] + 1
        key: Ints = of_pass * len(KIND) + kind
        return key

    def _beside(self, kind: Pass, cells: Ints) -> Ints:
        """The cell of an action of that kind, of the rank, stage and microbatch of each; NOWHERE: none."""
        keys, found = self._sorted
        key = self._key(cells, KIND[kind])
        at = np.minimum(np.searchsorted(keys, key), len(keys) - 1)
        beside: Ints = np.where(keys[at] == key, found[at], NOWHERE)
        return beside

    def _first_of(self, *kinds: Pass) -> Ints:
        """By rank and stage, the first cell of these kinds; NOWHERE where there is none."""
        cells = self._cells(*kinds)[::-1]
        found = np.full(len(self._ranks) * (self._num_stages + 1), NOWHERE, np.int64)
        found[self._held[cells]] = cells
        return found

    @cached_property
    def _first_weights(self) -> Ints:
        """By rank and stage, its first pass that makes gradients of weights."""
        return self._first_of(*WEIGHTS)

    @cached_property
    def _first_round(self) -> Ints:
        """By rank and stage, its first reduce-scatter, where weights are sharded."""
        return self._first_of(Pass.REDUCE_SCATTER)

    @cached_property
    def _is_sharded(self) -> Flags:
        """[cells] whether the weights of the action's stage are."""
        is_sharded = np.zeros(self._num_stages + 1, np.bool_)
        is_sharded[[stage + 1 for stage in self._accounts.units]] = True
        return is_sharded[self._stage + 1]

    def _makes_first(self, cells: Ints) -> Flags:
        """Whether each is the first of its stage to make gradients of weights."""
        is_first: Flags = self._first_weights[self._held[cells]] == cells
        return is_first

    def _by_microbatch(self, cells: Ints, width: int, of: Callable[[Stage], Ints]) -> Ints:
        """[width, cells] what is said of the stage and microbatch of each.

        Args:
            of: [microbatches, width] of a stage.
        """
        stages, at = np.unique(self._stage[cells], return_inverse=True)
        each = [of(self._plan.stage[stage]) for stage in stages.tolist()]
        first = starts(ints(map(len, each)))
        found = np.concatenate((np.zeros((0, width), np.int64), *each))
        by_cell: Ints = found[first[at] + self._microbatch[cells]]
        return by_cell.T

    def _sizes_of(self, cells: Ints, *, keeps: bool) -> StageBytes[Ints]:
        each = self._accounts.sizes.each
        width = len(StageBytes._fields)
        return StageBytes(*self._by_microbatch(cells, width, lambda stage: each(stage, keeps=keeps)))

    def _splits_of(self, cells: Ints) -> StageSplitBytes[Ints]:
        width = len(StageSplitBytes._fields)
        return StageSplitBytes(*self._by_microbatch(cells, width, self._accounts.sizes.each_split))

    def _add_forwards(self, kept: Ints, input_kept: Ints, output: Ints, until: Ints) -> None:
        forwards = self._cells(Pass.F)
        backward = np.maximum(self._beside(Pass.B, forwards), self._beside(Pass.I, forwards))
        for keeps in (True, False):
            has = (backward != NOWHERE) == keeps
            cells, size = forwards[has], self._sizes_of(forwards[has], keeps=keeps)
            self._hold(cells, cells, size.forward)
            kept[cells], input_kept[cells], output[cells] = size.kept, size.input_kept, size.output
            until[cells] = backward[has] - cells if keeps else 0

    def _add_backwards(self, joined: Ints) -> None:
        """Whole ones."""
        cells = self._cells(Pass.B)
        size = self._sizes_of(cells, keeps=True)
        is_first = self._makes_first(cells) | self._is_sharded[cells]
        self._hold(cells, cells, np.where(is_first, size.first, size.accumulating))
        joined[cells] = size.output

    def _add_split(self, cells: Ints, joined: Ints) -> None:
        """What an I leaves for its W, and, from a stage's first I on, gradients that only I makes."""
        joined[cells] = self._sizes_of(cells, keeps=True).output
        split, weights = self._splits_of(cells), self._beside(Pass.W, cells)
        self._hold(cells, cells, split.input_pass)
        self._hold(cells + 1, weights, split.left)
        early = cells[self._first_of(Pass.I)[self._held[cells]] == cells]
        early_bytes = [
            _early_gradient_bytes(self._plan, self._plan.stage[s]) for s in self._stage[early].tolist()
        ]
        self._hold(early, self._first_weights[self._held[early]], ints(early_bytes))
        weights = self._cells(Pass.W)
        split = self._splits_of(weights)
        self._hold(weights, weights, np.where(self._makes_first(weights), split.first, split.adding))

    def _add_buckets(self) -> None:
        """A reduction's copy of the gradients, until STEP makes it the gradients themselves.

        Where no backward made any, zeros stand in for those of one group at a time. Parts of sharded weights
        are added up in place.
        """
        cells = self._cells(Pass.REDUCE_GRAD)
        cells = cells[~self._is_sharded[cells]]
        size, reduced = self._plan.settings.gradient_bytes, self._accounts.reduced
        each = [
            reduced.get(self._ranks[owner], {}).get(reduction_of(stage), (0, 0))
            for owner, stage in zip(self._owner[cells].tolist(), self._stage[cells].tolist(), strict=True)
        ]
        total, largest = np.array(each, np.int64).reshape(-1, 2).T * size
        self._hold(cells, np.maximum(cells, self._last[self._owner[cells]] - 1), total)
        is_idle = self._first_weights[self._held[cells]] == NOWHERE
        self._hold(cells[is_idle], cells[is_idle], largest[is_idle])

    def _add_scattered(self) -> None:
        """A round's gradients: whole from its backward on, end to end while they travel, and the own part."""
        cells = self._cells(Pass.REDUCE_SCATTER)
        if not len(cells):
            return
        settings, units = self._plan.settings, self._accounts.units
        each = [
            (sum(unit.trained), sum(map(unit.padded, unit.trained)), sum(map(unit.part, unit.trained)))
            for unit in map(units.__getitem__, self._stage[cells].tolist())
        ]
        whole, travelling, own = np.array(each, np.int64).T
        made = self._first_backward(cells, self._beside(Pass.ALL_GATHER, cells))
        is_made = made != NOWHERE
        whole_bytes = whole[is_made] * settings.precision.num_bytes
        self._hold(made[is_made] + 1, cells[is_made], whole_bytes)
        until = self._until_awaited(cells)
        is_first = self._first_round[self._held[cells]] == cells  # whose part becomes the sum
        self._hold(cells, until, np.where(is_first, travelling, travelling + own) * settings.gradient_bytes)

    def _until_awaited(self, scatters: Ints) -> Ints:
        """The cell in front of the first action that waits for each, as `schedule.sharded.waits_of` has it.

        That is what comes next behind the one that follows it, else STEP, or the sum of the stage's parts.
        """
        owner, held = self._owner[scatters], self._held[scatters]
        waiting = np.append(self._cells(*_WAITING), len(self._kind))
        follows = np.append(scatters[1:], 0)
        is_followed = np.append(owner[1:] == owner[:-1], False)
        end = self._last[owner]
        end = end + (self._kind[end] != KIND[Pass.STEP])
        waits = np.where(is_followed, np.minimum(waiting[np.searchsorted(waiting, follows)], end), end)
        latest = np.full(len(self._first_round), NOWHERE)
        latest[held] = scatters
        summed = self._first_of(Pass.REDUCE_GRAD)[held]
        is_summed = (latest[held] == scatters) & (summed > scatters)
        found: Ints = np.where(is_summed, np.minimum(summed, waits), waits) - 1
        return found

    def _first_backward(self, until: Ints, since: Ints) -> Ints:
        """The first B of the stage of each cell from a cell up to that one; NOWHERE where there is none."""
        num_cells, backwards = len(self._kind), self._cells(Pass.B)
        keys = np.append(np.sort(self._held[backwards] * num_cells + backwards), np.iinfo(np.int64).max)
        found = keys[np.searchsorted(keys, self._held[until] * num_cells + since)]
        return np.where(found < self._held[until] * num_cells + until, found % num_cells, NOWHERE)

    def _add_gradients(self) -> None:
        """To the end of the step. What a first pass itself holds of them is part of its working set."""
        each = [(first, self._last[owner], size) for owner, first, _, size in self.gradients()]
        self._hold(*np.array(each, np.int64).reshape(-1, 3).T)

    def _step_working(self, owner: int) -> int:
        """AdamW's two temporaries of the largest tensor that it updates; a fused one has none."""
        if self._plan.settings.kernels is not Kernels.EAGER:
            return 0
        stages = self._plan.stages_on.get(self._ranks[owner], ())
        sizes = [elements for stage in stages for elements in self._updated_elements(stage)]
        return 2 * ceil(max(sizes, default=0)) * self._plan.settings.gradient_bytes

    def _updated_elements(self, stage: Stage) -> Iterator[float]:
        unit = self._accounts.units.get(stage.id)
        if unit is not None:
            yield from map(unit.part, unit.trained)
            return
        layers = self._plan.model.module(stage.module).layers
        for index in filter(lambda index: layers[index].trainable, range(*stage.layers)):
            yield from updated_elements(self._plan, stage, index)


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
