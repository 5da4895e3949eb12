"""Memory that passes allocate on ranks, whatever rows come and go, in columns."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from math import ceil

import numpy as np

from workbench.arrays import Flags, Ints, ints, spans, starts
from workbench.memory.accounts import Accounts
from workbench.memory.holdings import Holding, Part
from workbench.memory.muon import muon_working
from workbench.memory.stage import GRADIENTS, StateKind, updated_elements
from workbench.memory.stage_bytes import StageBytes, StageSplitBytes
from workbench.model.layer import Layer, Pointwise, Recurrence
from workbench.model.trained import is_trained
from workbench.plan.action_columns import KIND, NOWHERE, action_columns
from workbench.plan.kernels import Kernels
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.parameter_shards import kept_stages, stages_reduced_once
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage
from workbench.schedule.action import MEANING, Pass, TaskKind, reduction_of

WEIGHTS = (Pass.B, Pass.W)  # these make gradients of matrices and tables
_EARLY_ELEMENTS: LruCache[int] = LruCache(65_536)
_WAITING = tuple(kind for kind in Pass if MEANING[kind].task in (TaskKind.PASS, TaskKind.STEP))


class PassLines:
    """The account of ranks by cell: a position in a rank's program, the programs end to end.

    Args:
        accounts: of their plan.
        ranks: whose cells they are, in their order.

    Attributes:
        lengths: [ranks] cells of each.
        stage: [cells] stage of the action; NOWHERE for none.
        holdings: what `columns` adds up, besides its inputs of the account of rows.
        makes_first: [cells] whether the pass makes gradients of its stage, which its `Moment` has.
    """

    def __init__(self, accounts: Accounts, ranks: Sequence[int]) -> None:
        self._accounts, self._plan, self._ranks = accounts, accounts.plan, ranks
        actions, plan = action_columns(self._plan), self._plan
        program_of = {rank: number for number, program in enumerate(plan.programs) for rank in program.ranks}
        program = ints(program_of.get(rank, NOWHERE) for rank in ranks)
        self.lengths: Ints = np.append(actions.lengths, 0)[program]  # none where there is no program
        entry = spans(np.append(starts(actions.lengths), 0)[program], self.lengths)
        number = actions.number[entry]
        self.stage, self._kind = actions.stage[number], actions.kind[number]
        self._microbatch = actions.microbatch[number]
        self._rank_index = np.repeat(np.arange(len(ranks)), self.lengths)
        self._last = np.cumsum(self.lengths) - 1
        self._num_stages = 1 + max((NOWHERE, *plan.stage, *actions.stage.tolist()))
        # Rank and stage as one number.
        self._rank_stage = self._rank_index * (self._num_stages + 1) + self.stage + 1
        self._acquired, self._released = np.zeros((2, len(number)), np.int64)
        self.holdings: list[Holding] = []
        self.makes_first: Flags = np.zeros(len(number), np.bool_)

    def columns(self) -> Ints:
        """Return columns by cell: bytes acquired and released, and inputs of the account of rows.

        These are what a forward keeps, the part of it that is its input, its output, what a backward joins in
        one tensor if it comes in several, and how many positions after a forward its backward is.
        """
        self._add_gradients()
        kept, input_kept, output, joined, distance = for_rows = np.zeros((5, len(self._kind)), np.int64)
        self._add_forwards(kept, input_kept, output, distance)
        self._add_backwards(joined)
        if len(split := self._cells(Pass.I)):
            self._add_split(split, joined)
        self._add_scattered()
        self._add_buckets()
        steps = self._cells(Pass.STEP)
        working = ints(map(self._step_working, self._rank_index[steps].tolist()))
        self._hold(Part.WORKING, self.stage[steps], steps, steps, working)
        return np.concatenate((self._acquired[None], self._released[None], for_rows))

    def gradients(self) -> Iterator[tuple[int, int, int, StateKind, int]]:
        """Yield (index of the rank, stage, first cell at which they exist, part, bytes) of gradients.

        They exist from a stage's first B or W on, else from STEP; shards of sharded weights from the first
        reduce-scatter.
        """
        for index, rank in enumerate(self._ranks):
            last = int(self._last[index])
            for stage, kind, num_bytes in self._accounts.state(rank) if self.lengths[index] else ():
                if kind.part == GRADIENTS:
                    rank_stage = index * (self._num_stages + 1) + stage.id + 1
                    computed = int(self._first_weights[rank_stage])
                    scattered = int(self._first_round[rank_stage])
                    after = last if computed == NOWHERE else 1 + computed
                    first = after if scattered == NOWHERE else scattered
                    yield index, stage.id, first, kind, num_bytes

    def _cells(self, *kinds: Pass) -> Ints:
        """Return the cells of actions of these kinds."""
        is_selected = np.zeros(len(KIND), np.bool_)
        is_selected[[KIND[kind] for kind in kinds]] = True
        return np.flatnonzero(is_selected[self._kind])

    def _hold(self, part: Part, stage: Ints, first: Ints, last: Ints, num_bytes: Ints) -> None:
        """Add bytes allocated at the start of one action and freed at the end of the same or a later one."""
        is_held = first <= last
        held = Holding(part, stage[is_held], first[is_held], last[is_held], num_bytes[is_held])
        np.add.at(self._acquired, held.first, held.num_bytes)
        np.add.at(self._released, held.last, held.num_bytes)
        self.holdings.append(held)

    @cached_property
    def _sorted(self) -> tuple[Ints, Ints]:
        """Keys of all cells, ascending, and the cells."""
        key = self._key(np.arange(len(self._kind)), self._kind)
        order = np.argsort(key)
        return key[order], order

    def _key(self, cells: Ints, kind: Ints | int) -> Ints:
        """Return the key of an action of that kind, of the rank, stage and microbatch of each cell."""
        num_microbatches = 2 + int(self._microbatch.max(initial=NOWHERE))
        of_pass = self._rank_stage[cells] * num_microbatches + self._microbatch[cells] + 1
        key: Ints = of_pass * len(KIND) + kind
        return key

    def _matching(self, kind: Pass, cells: Ints) -> Ints:
        """Return the cell of that kind with the rank, stage and microbatch of each cell; NOWHERE: none."""
        keys, sorted_cells = self._sorted
        key = self._key(cells, KIND[kind])
        index = np.minimum(np.searchsorted(keys, key), len(keys) - 1)
        matching: Ints = np.where(keys[index] == key, sorted_cells[index], NOWHERE)
        return matching

    def _first_of(self, *kinds: Pass) -> Ints:
        """Return, by rank and stage, the first cell of these kinds; NOWHERE where there is none."""
        cells = self._cells(*kinds)[::-1]
        first = np.full(len(self._ranks) * (self._num_stages + 1), NOWHERE, np.int64)
        first[self._rank_stage[cells]] = cells
        return first

    @cached_property
    def _first_weights(self) -> Ints:
        """By rank and stage, the first pass that makes gradients of weights."""
        return self._first_of(*WEIGHTS)

    @cached_property
    def _first_round(self) -> Ints:
        """By rank and stage, the first reduce-scatter, where weights are sharded."""
        return self._first_of(Pass.REDUCE_SCATTER)

    @cached_property
    def _is_sharded(self) -> Flags:
        """[cells] whether the weights of the action's stage are sharded."""
        is_sharded = np.zeros(self._num_stages + 1, np.bool_)
        is_sharded[[stage + 1 for stage in self._accounts.units]] = True
        return is_sharded[self.stage + 1]

    def _makes_first(self, cells: Ints) -> Flags:
        """Whether each is the first pass of its stage to make gradients of weights."""
        is_first: Flags = self._first_weights[self._rank_stage[cells]] == cells
        return is_first

    def _by_microbatch(self, cells: Ints, width: int, table_of: Callable[[Stage], Ints]) -> Ints:
        """[width, cells] values of the stage and microbatch of each cell.

        Args:
            cells: of passes.
            width: of the table.
            table_of: gives a stage's table, [microbatches, width].
        """
        stages, stage_index = np.unique(self.stage[cells], return_inverse=True)
        tables = [table_of(self._plan.stage[stage]) for stage in stages.tolist()]
        first = starts(ints(map(len, tables)))
        rows = np.concatenate((np.zeros((0, width), np.int64), *tables))
        by_cell: Ints = rows[first[stage_index] + self._microbatch[cells]]
        return by_cell.T

    def _sizes_of(self, cells: Ints, *, keeps: bool) -> StageBytes[Ints]:
        of_microbatches = self._accounts.sizes.of_microbatches
        width = len(StageBytes._fields)
        columns = self._by_microbatch(cells, width, lambda stage: of_microbatches(stage, keeps=keeps))
        return StageBytes(*columns)

    def _splits_of(self, cells: Ints) -> StageSplitBytes[Ints]:
        width = len(StageSplitBytes._fields)
        columns = self._by_microbatch(cells, width, self._accounts.sizes.splits_of_microbatches)
        return StageSplitBytes(*columns)

    def _add_forwards(self, kept: Ints, input_kept: Ints, output: Ints, distance: Ints) -> None:
        forwards = self._cells(Pass.F)
        backward = np.maximum(self._matching(Pass.B, forwards), self._matching(Pass.I, forwards))
        for keeps in (True, False):
            is_selected = (backward != NOWHERE) == keeps
            if not is_selected.any():
                continue
            cells, size = forwards[is_selected], self._sizes_of(forwards[is_selected], keeps=keeps)
            self._hold(Part.WORKING, self.stage[cells], cells, cells, size.forward)
            kept[cells], input_kept[cells], output[cells] = size.kept, size.input_kept, size.output
            distance[cells] = backward[is_selected] - cells if keeps else 0

    def _add_backwards(self, joined: Ints) -> None:
        """Add whole backwards."""
        cells = self._cells(Pass.B)
        size = self._sizes_of(cells, keeps=True)
        is_first = self._makes_first(cells) | self._is_sharded[cells] & ~self._is_accumulating(cells)
        self.makes_first[cells] = is_first
        working = np.where(is_first, size.first, size.accumulating)
        self._hold(Part.WORKING, self.stage[cells], cells, cells, working)
        joined[cells] = size.output

    def _is_accumulating(self, backwards: Ints) -> Flags:
        """Whether each adds to whole gradients that an earlier backward of its round has left."""
        in_place = self._is_sharded[backwards] & ~self._is_summed[backwards]
        if not in_place.any():
            return in_place
        scatters = self._cells(Pass.REDUCE_SCATTER)
        first = self._first_backward(scatters, self._matching(Pass.ALL_GATHER, scatters))
        return in_place & ~np.isin(backwards, first)

    @cached_property
    def _is_summed(self) -> Flags:
        """[cells] whether gradients of the action's stage are summed in the optimizer's wider type."""
        settings = self._plan.settings
        is_wider = settings.gradient_bytes > settings.precision.num_bytes
        return np.isin(self.stage, list(kept_stages(self._plan) if is_wider else ()))

    def _add_split(self, cells: Ints, joined: Ints) -> None:
        """Add split backwards: what I leaves for W, and, from the first I on, gradients that only I makes."""
        joined[cells] = self._sizes_of(cells, keeps=True).output
        split, weights = self._splits_of(cells), self._matching(Pass.W, cells)
        self._hold(Part.WORKING, self.stage[cells], cells, cells, split.input_pass)
        self._hold(Part.ACTIVATIONS, self.stage[cells], cells + 1, weights, split.left)
        early = cells[self._first_of(Pass.I)[self._rank_stage[cells]] == cells]
        early_bytes = [
            _early_gradient_bytes(self._plan, self._plan.stage[s]) for s in self.stage[early].tolist()
        ]
        made = self._first_weights[self._rank_stage[early]]
        self._hold(Part.GRADIENTS, self.stage[early], early, made, ints(early_bytes))
        weights = self._cells(Pass.W)
        split = self._splits_of(weights)
        self.makes_first[weights] = self._makes_first(weights)
        working = np.where(self.makes_first[weights], split.first, split.adding)
        self._hold(Part.WORKING, self.stage[weights], weights, weights, working)

    def _add_buckets(self) -> None:
        """Add a reduction's copy of the gradients, until STEP, which uses it as the gradients.

        Where no backward made any, zeros take their place, one group at a time. Shards of sharded weights
        are reduced in place.
        """
        cells = self._cells(Pass.REDUCE_GRAD)
        cells = cells[~self._is_sharded[cells]]
        size, reduced = self._plan.settings.gradient_bytes, self._accounts.reduced
        rank_indices, stages = self._rank_index[cells].tolist(), self.stage[cells].tolist()
        sizes = [
            reduced.get(self._ranks[index], {}).get(reduction_of(stage), (0, 0))
            for index, stage in zip(rank_indices, stages, strict=True)
        ]
        total, largest = np.array(sizes, np.int64).reshape(-1, 2).T * size
        stage, last = self.stage[cells], np.maximum(cells, self._last[self._rank_index[cells]] - 1)
        self._hold(Part.COLLECTIVES, stage, cells, last, total)
        is_idle = self._first_weights[self._rank_stage[cells]] == NOWHERE
        self._hold(Part.COLLECTIVES, stage[is_idle], cells[is_idle], cells[is_idle], largest[is_idle])

    def _add_scattered(self) -> None:
        """Add a round's gradients: whole from its backward on, flat while in flight, and the own shard.

        Gradients of weights with one holder are not in flight: they are added to those of earlier rounds.
        Weights that stay for several backwards add their gradients to the flat tensor where the optimizer's
        type is wider than theirs: at the end of the first one, which keeps nothing more, both are there.
        """
        cells = self._cells(Pass.REDUCE_SCATTER)
        if not len(cells):
            return
        settings, units = self._plan.settings, self._accounts.units
        sizes = [
            (
                sum(flat.num_elements for flat in unit.trained),
                sum(map(unit.padded, unit.scattered)),
                sum(map(unit.part, unit.scattered)),
                sum(flat.num_elements for flat in unit.scattered),
            )
            for unit in map(units.__getitem__, self.stage[cells].tolist())
        ]
        whole, in_flight, own_shard, scattered = np.array(sizes, np.int64).T
        computed = self._first_backward(cells, self._matching(Pass.ALL_GATHER, cells))
        is_computed = computed != NOWHERE
        is_summed = self._is_summed[cells]
        in_sum = in_flight + whole - scattered
        whole_bytes = whole * settings.precision.num_bytes
        whole_bytes = np.where(is_summed, in_sum * settings.gradient_bytes, whole_bytes)
        moving = is_computed & is_summed
        size = self._sizes_of(computed[moving], keeps=True)
        both_bytes = whole[moving] * settings.precision.num_bytes + whole_bytes[moving]
        stage, both = self.stage[cells], np.maximum(both_bytes - size.kept - size.first, 0)
        self._hold(Part.GRADIENTS, stage[moving], computed[moving], computed[moving], both)
        until = cells - is_summed  # then the sum is in flight
        after, until = 1 + computed[is_computed], until[is_computed]
        self._hold(Part.GRADIENTS, stage[is_computed], after, until, whole_bytes[is_computed])
        last = self._until_awaited(cells)
        is_first = self._first_round[self._rank_stage[cells]] == cells  # its shard becomes the sum
        num_elements = np.where(is_first, in_flight, in_flight + own_shard)
        self._hold(Part.COLLECTIVES, stage, cells, last, num_elements * settings.gradient_bytes)

    def _until_awaited(self, scatters: Ints) -> Ints:
        """Return the cell before the first action that waits for each, see `schedule.sharded.waits_of`.

        That is the first pass after the next scatter, else STEP, or the reduction of the stage's shards. Of
        stages that reduce once it is STEP: their reductions over replicas wait beside the passes.
        """
        end = self._last[self._rank_index[scatters]]
        waits = end + (self._kind[end] != KIND[Pass.STEP])
        holds_up = ~np.isin(self.stage[scatters], list(stages_reduced_once(self._plan)))
        waits[holds_up] = self._first_waiting(scatters[holds_up], waits[holds_up])
        before: Ints = waits - 1
        return before

    def _first_waiting(self, scatters: Ints, end: Ints) -> Ints:
        """Return the first cell that waits for each; `end` where it is the STEP."""
        rank_index, rank_stage = self._rank_index[scatters], self._rank_stage[scatters]
        waiting = np.append(self._cells(*_WAITING), len(self._kind))
        next_scatter = np.append(scatters[1:], 0)
        is_followed = np.append(rank_index[1:] == rank_index[:-1], False)[: len(scatters)]
        waits = np.where(is_followed, np.minimum(waiting[np.searchsorted(waiting, next_scatter)], end), end)
        latest = np.full(len(self._first_round), NOWHERE)
        latest[rank_stage] = scatters
        reduction = self._first_of(Pass.REDUCE_GRAD)[rank_stage]
        is_reduced = (latest[rank_stage] == scatters) & (reduction > scatters)
        first: Ints = np.where(is_reduced, np.minimum(reduction, waits), waits)
        return first

    def _first_backward(self, end: Ints, begin: Ints) -> Ints:
        """Return each cell's first B of its stage between two cells; NOWHERE where there is none."""
        num_cells, backwards = len(self._kind), self._cells(Pass.B)
        keys = np.append(np.sort(self._rank_stage[backwards] * num_cells + backwards), np.iinfo(np.int64).max)
        first = keys[np.searchsorted(keys, self._rank_stage[end] * num_cells + begin)]
        return np.where(first < self._rank_stage[end] * num_cells + end, first % num_cells, NOWHERE)

    def _add_gradients(self) -> None:
        """Add gradients, to the end of the step; what a first pass holds of them is in its working set."""
        entries = [
            (stage, first, self._last[index], size) for index, stage, first, _, size in self.gradients()
        ]
        self._hold(Part.GRADIENTS, *np.array(entries, np.int64).reshape(-1, 4).T)

    def _step_working(self, index: int) -> int:
        """Return the bytes of temporaries of the tensor with most of them.

        AdamW has two as large as the tensor, a fused AdamW none; Muon those of `muon_working`.
        """
        stages = self._plan.stages_on.get(self._ranks[index], ())
        of_matrices = muon_working(self._plan, self._ranks[index])
        if self._plan.settings.kernels is not Kernels.EAGER:
            return of_matrices
        sizes = [elements for stage in stages for elements in self._updated_elements(stage)]
        return max(of_matrices, 2 * ceil(max(sizes, default=0)) * self._plan.settings.gradient_bytes)

    def _updated_elements(self, stage: Stage) -> Iterator[float]:
        unit = self._accounts.units.get(stage.id)
        if unit is not None:
            yield from map(unit.part, unit.trained)
            return
        layers = self._plan.model.module(stage.module).layers
        for index in filter(lambda index: is_trained(layers[index]), range(*stage.layers)):
            yield from updated_elements(self._plan, stage, index)


def _early_gradient_bytes(plan: Plan, stage: Stage) -> int:
    """Return the gradients that I makes on one rank: of parameters other than matrices and tables."""
    layers = plan.model.module(stage.module).layers[slice(*stage.layers)]
    key = Identity(plan.model), stage.module, stage.layers
    return _EARLY_ELEMENTS.get_or(key, lambda: _early_elements(layers)) * plan.settings.gradient_bytes


def _early_elements(layers: Iterable[Layer]) -> int:
    return sum(
        parameter.num_elements
        for layer in layers
        if layer.trainable
        for operator in layer.operators
        if isinstance(operator, Recurrence | Pointwise)
        for parameter in operator.parameters()
    )
