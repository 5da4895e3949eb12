"""Who takes how much memory at which action, and gives it back at which: the lines of the account."""

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from workbench.memory.accounts import BACKWARDS, Accounts
from workbench.memory.stage import (
    GRADIENTS,
    StateKind,
    updated_elements,
)
from workbench.model.layer import Pointwise
from workbench.plan.kernels import Kernels
from workbench.plan.lowered import Route, Slice, Transfer
from workbench.plan.plan import Microbatch, Plan, Stage
from workbench.schedule.action import COMPUTE, STEP, Action, Pass

WEIGHTS = (Pass.B, Pass.W)  # these make gradients of matrices and tables


@dataclass(frozen=True, slots=True)
class Lines:
    """One rank's account, by place in its program.

    Args:
        acquired, released: bytes taken when the action starts, given back when it ends.
        gradients: of those acquired, the weights' gradients.
    """

    acquired: list[int]
    released: list[int]
    gradients: dict[int, Counter[StateKind]]


def rank_lines(accounts: Accounts, rank: int) -> Lines:
    """Everything of one rank but what moves to and from a host or its peers."""
    account = _RankAccount(accounts, rank)
    account.fill()
    return account.lines


class _RankAccount:
    """One rank's lines. Positions are places in its program."""

    def __init__(self, accounts: Accounts, rank: int) -> None:
        self._accounts, self._lowered, self._plan = accounts, accounts.lowered, accounts.plan
        self._rank, self._sizes = rank, accounts.sizes
        self._program = self._plan.program.get(rank, ())
        self._last = len(self._program) - 1
        self._inputs_of: dict[Action, list[Transfer]] = {}  # that come to this rank; filled on use
        self._places = accounts.place.get(rank, {})
        nothing = [0] * len(self._program)
        self.lines = Lines(nothing, nothing.copy(), {})

    def fill(self) -> None:
        if not self._program:
            return
        self._add_receive_buffers()
        self._add_gradients()
        for position, action in enumerate(self._program):
            if action.kind is Pass.F:
                self._add_forward(position, action)
            elif action.kind in BACKWARDS:
                self._add_backward(position, action)
            elif action.kind is Pass.W:
                split = self._sizes.split(*self._of(action))
                is_first = position == self._first_weights[action.stage]
                self._hold(position, position, split.first if is_first else split.adding)
            elif action.kind is Pass.REDUCE_SCATTER:
                self._add_scattered(position, action)
            elif action in self._lowered.reductions and action.stage not in self._accounts.units:
                self._add_bucket(position, action)  # parts of sharded weights are added up in place
            elif action == STEP:
                self._hold(position, position, self._step_working())

    def _hold(self, first: int, last: int, num_bytes: int) -> None:
        """Taken at the start of one action, given back at the end of the same or a later one."""
        if num_bytes and first <= last:
            self.lines.acquired[first] += num_bytes
            self.lines.released[last] += num_bytes

    def _place(self, action: Action) -> int:
        return self._places[action]

    def _add_forward(self, position: int, action: Action) -> None:
        stage, microbatch = self._of(action)
        backward = self._accounts.backwards.get((action.stage, action.microbatch))
        size = self._sizes.of(stage, microbatch, keeps=backward is not None)
        end = position if backward is None else self._place(backward)
        self._hold(position, position, size.forward)
        held, passed_on = self._input_bytes(action)
        self._hold(position, end, held)
        kept = size.kept
        if held or passed_on:
            kept -= min(size.input_kept, held + passed_on)
        self._hold(position, end, kept)
        self._hold(position, max(end, self._output_end(position, action)), size.output)

    def _input_bytes(self, action: Action) -> tuple[int, int]:
        """(bytes of the inputs' own tensors, bytes that a producer on this rank holds for them)."""
        held = passed_on = 0
        by_edge: dict[str, list[Transfer]] = {}
        for row in self._inputs(action):
            by_edge.setdefault(row.edge, []).append(row)
        for rows in by_edge.values():
            num_bytes = sum(row.num_bytes for row in rows)
            if _is_whole(rows) and rows[0].route is Route.LOCAL and _is_view(rows[0]):
                passed_on += num_bytes
            else:
                held += num_bytes
                if not _is_whole(rows):  # joined: the rows live beside the joined tensor
                    away = sum(row.num_bytes for row in rows if row.route is not Route.LOCAL)
                    self._hold(self._place(action), self._place(action), away)
        return held, passed_on

    def _output_end(self, position: int, action: Action) -> int:
        """Position up to which consumers or sends keep the output's storage."""
        end = position
        for row in self._outputs(action):
            if row.route is Route.LOCAL:
                end = max(end, self._local_end(row))
                if not _is_view(row):
                    self._hold(position, self._place(row.consumer), row.num_bytes)
            elif _is_view(row):
                end = max(end, self._sent_end(row))
            else:
                self._hold(position, self._sent_end(row), row.num_bytes)
        return end

    def _local_end(self, row: Transfer) -> int:
        """A consumer on this rank reads the very storage, until its backward where it has one."""
        consumer = row.consumer
        backward = self._accounts.backwards.get((consumer.stage, consumer.microbatch))
        whole = _is_whole([r for r in self._inputs(consumer) if r.edge == row.edge])
        if consumer.kind is Pass.F and backward is not None and whole and _is_view(row):
            return self._place(backward)
        return self._place(consumer)

    def _sent_end(self, row: Transfer) -> int:
        """The last action before one that proves the row received, else the last of the program.

        A consumer that has started had taken the row; any row that comes back from that rank,
        made then or later, tells this rank so.
        """
        end = self._place(row.producer)
        for rank in row.destination_ranks:
            if rank == self._rank:
                continue
            taken = self._accounts.place[rank].get(row.consumer)
            if taken is None:  # it only hands the row on
                return self._last
            sent_at, answered_at = self._accounts.answers.get((rank, self._rank), ([], []))
            first = bisect_left(sent_at, taken)
            end = max(end, (answered_at[first] if first < len(answered_at) else self._last + 1) - 1)
        return min(end, self._last)

    def _add_backward(self, position: int, action: Action) -> None:
        stage, microbatch = self._of(action)
        size = self._sizes.of(stage, microbatch, keeps=True)
        if action.kind is Pass.I:
            self._hold(position, position, self._sizes.split(stage, microbatch).input_pass)
            self._add_left(position, action)
        else:
            is_first = position == self._first_weights[stage.id] or stage.id in self._accounts.units
            self._hold(position, position, size.first if is_first else size.accumulating)
        rows = self._inputs(action)
        received = sum(row.num_bytes for row in rows if row.route is not Route.LOCAL)
        whole = len(rows) == 1 and _is_whole(rows)
        self._hold(position, position, received + (0 if whole or not rows else size.output))
        for row in self._outputs(action):
            if row.route is Route.LOCAL:
                self._hold(position + 1, self._place(row.consumer), row.num_bytes)
            else:
                self._hold(position + 1, self._sent_end(row), row.num_bytes)

    def _add_left(self, position: int, action: Action) -> None:
        """What an I leaves for its W, and, from a stage's first I on, gradients that only I makes."""
        weights = action._replace(kind=Pass.W)
        if weights in self._places:
            left = self._sizes.split(*self._of(action)).left
            self._hold(position + 1, self._place(weights), left)
        stage, _ = self._of(action)
        if position == self._first_split[stage.id] and stage.id in self._first_weights:
            self._hold(position, self._first_weights[stage.id], _early_gradient_bytes(self._plan, stage))

    def _add_bucket(self, position: int, action: Action) -> None:
        """A reduction's copy of the gradients, until STEP makes it the gradients themselves.

        Where no backward made any, zeros stand in for those of one group at a time.
        """
        size = self._plan.settings.gradient_bytes
        groups = [self._lowered.groups[index] for index in self._lowered.reductions.get(action, ())]
        elements = [group.num_elements for group in groups if self._rank in group.members]
        self._hold(position, max(position, self._last - 1), sum(elements) * size)
        if action.stage not in self._first_weights:
            self._hold(position, position, max(elements, default=0) * size)

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
        """Gradients exist from a stage's first B or W, else from STEP, to the end of the step.

        What that pass itself holds of them is part of its working set. The parts of sharded weights
        exist from the first reduce-scatter.
        """
        for stage, kind, num_bytes in self._accounts.state(self._rank):
            if kind.part == GRADIENTS:
                first = self._first_weights.get(stage.id, self._last - 1) + 1
                if stage.id in self._first_round:
                    first = self._place(self._first_round[stage.id])
                self._hold(first, self._last, num_bytes)
                self.lines.gradients.setdefault(first, Counter())[kind] += num_bytes

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

    def _add_receive_buffers(self) -> None:
        """Buffers wait for their rows from when they are posted until their consumer starts.

        Posted are, while an action runs, the rows of the next pass that receives any, and
        before each of them whatever the same sender sends earlier (but for broadcasts).
        """
        unposted: dict[int, deque[Transfer]] = {}
        for row in self._accounts.arriving.get(self._rank, ()):
            unposted.setdefault(row.source_rank, deque()).append(row)
        self._hold(0, self._last, self._accounts.handed_on_bytes.get(self._rank, 0))
        posting = 0
        for position, action in enumerate(self._program):
            if action.kind not in COMPUTE:
                continue
            rows = [row for row in self._inputs(action) if row.route is not Route.LOCAL]
            if not rows:
                continue
            for wanted in rows:
                if wanted.route is Route.BROADCAST:
                    self._hold(posting, position - 1, wanted.num_bytes)
                    continue
                waiting = unposted.get(wanted.source_rank)
                while waiting and waiting[0].row <= wanted.row:
                    row = waiting.popleft()
                    self._hold(posting, self._place(row.consumer) - 1, row.num_bytes)
            posting = position

    def _inputs(self, action: Action) -> list[Transfer]:
        if action not in self._inputs_of:
            rows = map(self._lowered.transfers.__getitem__, self._lowered.inputs.get(action, ()))
            self._inputs_of[action] = [row for row in rows if self._rank in row.destination_ranks]
        return self._inputs_of[action]

    def _outputs(self, action: Action) -> list[Transfer]:
        rows = map(self._lowered.transfers.__getitem__, self._lowered.outputs.get(action, ()))
        return [row for row in rows if row.source_rank == self._rank]

    def _of(self, action: Action) -> tuple[Stage, Microbatch]:
        assert action.stage is not None
        assert action.microbatch is not None
        stage = self._plan.stage[action.stage]
        return stage, self._plan.microbatches_of[stage.module, stage.replica][action.microbatch]


def _is_view(row: Transfer) -> bool:
    """Whether the row's tokens lie side by side in its producer's tensor, so that nothing is copied."""
    return _side_by_side([piece.source_start for piece in row.slices], row.slices)


def _is_whole(rows: list[Transfer]) -> bool:
    """Whether one row brings all of a tensor, in order."""
    starts = [piece.destination_start for piece in rows[0].slices]
    return len(rows) == 1 and starts[0] == 0 and _side_by_side(starts, rows[0].slices)


def _side_by_side(starts: list[int], slices: tuple[Slice, ...]) -> bool:
    ends = [start + piece.num_tokens for start, piece in zip(starts, slices, strict=True)]
    return ends[:-1] == starts[1:]


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
