"""Computes what a plan does, independently of the planner: numbers are pushed through its rows.

The judge executes the lowered plan on the surrogate of `mutant_meaning` under its own model of communication:
messages matched by tag that never block their sender, passes that need all ranks of their stage and its
weights, collectives beside them that meet in order (`mutant_weights`). It also checks that messages meet in
order where they match by order. Where it stalls, the plan deadlocks; where loss or gradients are not those of
the job, it computes something else.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from experiments.fidelity.mutant_layers import Activations, Layers, position_of
from experiments.fidelity.mutant_meaning import Meaning, Tokens
from experiments.fidelity.mutant_verdict import Judgement, Stalled, Verdict, Wrong
from experiments.fidelity.mutant_weights import TOLERANCE, HeldWeights
from workbench.plan.lowered import Direction, Lowered, Route, Transfer
from workbench.plan.plan import Microbatch
from workbench.plan.stage import Stage
from workbench.schedule.action import COMPUTE, Action, Pass


def judge(lowered: Lowered, meaning: Meaning) -> Judgement:
    """Execute the plan and compare its meaning with the job's."""
    try:
        computed = _Execution(lowered).run()
    except Stalled as stalled:
        return Judgement(Verdict.DEADLOCK, str(stalled))
    except Wrong as wrong:
        return Judgement(Verdict.OTHER, str(wrong))
    except (LookupError, ValueError) as error:  # rows that fit no tensor
        return Judgement(Verdict.OTHER, f"{type(error).__name__}: {error}")
    if not math.isclose(computed.loss, meaning.loss, rel_tol=TOLERANCE):
        return Judgement(Verdict.OTHER, f"loss {computed.loss} instead of {meaning.loss}")
    for key, value in meaning.gradients.items():
        if not math.isclose(computed.gradients.get(key, 0.0), value, rel_tol=TOLERANCE):
            return Judgement(Verdict.OTHER, f"gradient of {key} is not the job's")
    return Judgement(Verdict.SAME)


class _Execution:
    """Execution of one step of a lowered plan, rank by rank, as far as possible."""

    def __init__(self, lowered: Lowered) -> None:
        self._lowered, self._plan = lowered, lowered.plan
        self._layers, self._weights = Layers(self._plan), HeldWeights(lowered)
        self._microbatch = {(m.module, m.replica, m.index): m for m in self._plan.microbatches}
        self._program = {r: p.actions for p in self._plan.programs for r in p.ranks}
        self._position = dict.fromkeys(self._program, 0)
        self._sent: dict[tuple[int, int], Tokens] = {}  # (row, rank)
        self._sends: dict[tuple[Route, int, int], list[int]] = {}
        self._takes: dict[tuple[Route, int, int], list[int]] = {}
        self._activations: dict[tuple[int, int, int], Activations] = {}  # (rank, stage, microbatch)
        self._loss = 0.0
        self._followers: dict[tuple[int, int], list[Transfer]] = {}
        for row in lowered.transfers:
            if row.after is not None:
                self._followers.setdefault((row.after, row.source_rank), []).append(row)

    def run(self) -> Meaning:
        """Run the step; raises Stalled or Wrong."""
        moved = True
        while moved:
            moved = self._weights.advance()
            for rank in self._program:
                while (action := self._next(rank)) is not None and self._try(rank, action):
                    moved = True
        if any(action is None or action.kind is not Pass.STEP for action in map(self._next, self._program)):
            waiting = [f"rank {r} before {a}" for r in self._program if (a := self._next(r)) is not None]
            raise Stalled("; ".join(waiting[:4]))
        for rank, program in self._program.items():
            if self._position[rank] + 1 != len(program):
                raise Wrong(f"rank {rank} steps before its program ends")
        self._check_order()
        if any(activations.terms for activations in self._activations.values()):
            raise Wrong("weight gradients that nobody added")
        if self._sent:
            raise Wrong(f"row {min(self._sent)[0]} was never consumed")
        return Meaning(self._loss, self._weights.gradients())

    def _next(self, rank: int) -> Action | None:
        program, position = self._program[rank], self._position[rank]
        return program[position] if position < len(program) else None

    def _try(self, rank: int, action: Action) -> bool:
        """Execute an action if its inputs are there; STEP stays in place and ends the program."""
        if action.kind is Pass.STEP:
            return False
        if action.kind not in COMPUTE:
            if not self._weights.is_free(rank, action):
                return False
            self._weights.do(rank, action)
            self._position[rank] += 1
            return True
        if action.stage not in self._plan.stage:
            raise Wrong(f"{action} of nothing")
        ranks = self._plan.stage[action.stage].flat_ranks
        if rank not in ranks or any(self._next(r) != action for r in ranks if r in self._program):
            return False
        if set(ranks) - set(self._program) or not all(self._is_ready(r, action) for r in ranks):
            return False
        rows_by_rank = self._received(ranks, action)
        for member in ranks:
            self._do(member, action, rows_by_rank[member])
            self._position[member] += 1
        return True

    def _is_ready(self, rank: int, action: Action) -> bool:
        return self._has_rows(rank, action) and self._weights.is_free(rank, action)

    def _rows(self, rank: int, action: Action) -> list[Transfer]:
        rows = (self._lowered.transfers[n] for n in self._lowered.inputs.get(action, ()))
        return [row for row in rows if rank in row.destination_ranks]

    def _has_rows(self, rank: int, action: Action) -> bool:
        """Whether all rows have arrived; a broadcast arrives when its leader takes the row it follows."""
        return all(
            (row.row, rank) in self._sent
            or (row.route is Route.BROADCAST and (row.after, row.source_rank) in self._sent)
            for row in self._rows(rank, action)
        )

    def _do(self, rank: int, action: Action, rows: Sequence[tuple[Transfer, Tokens]]) -> None:
        stage = self._plan.stage[action.stage or 0]
        microbatch = self._microbatch.get((stage.module, stage.replica, action.microbatch or 0))
        if microbatch is None:
            raise Wrong(f"{action} has no microbatch")
        self._weights.use(rank, stage)
        key = (rank, stage.id, microbatch.index)
        if action.kind is Pass.F:
            if key in self._activations:
                raise Wrong(f"{action} twice")
            self._forward(rank, stage, microbatch, action, rows)
        elif key not in self._activations:
            raise Wrong(f"{action} without its forward")
        elif action.kind is Pass.W:
            self._add_weights(stage, self._activations[key])
        else:
            self._backward(rank, stage, action, self._activations[key], rows)
            if action.kind is Pass.B:
                self._add_weights(stage, self._activations[key])

    def _received(self, ranks: Sequence[int], action: Action) -> dict[int, list[tuple[Transfer, Tokens]]]:
        """Rows that every rank receives; those that leaders pass on come before those others wait for."""
        rows_by_rank: dict[int, list[tuple[Transfer, Tokens]]] = {rank: [] for rank in ranks}
        rows = [(row, rank) for rank in ranks for row in self._rows(rank, action)]
        for row, rank in sorted(rows, key=lambda row_and_rank: row_and_rank[0].route is Route.BROADCAST):
            rows_by_rank[rank].append((row, self._take(row, rank)))
        return rows_by_rank

    def _take(self, row: Transfer, rank: int) -> Tokens:
        if (row.row, rank) not in self._sent:
            raise Wrong(f"row {row.row} is not there")
        tokens = self._sent.pop((row.row, rank))
        if row.route is not Route.LOCAL:
            self._takes.setdefault((row.route, row.source_rank, rank), []).append(row.row)
        for follower in self._followers.get((row.row, rank), ()):
            self._send(follower, tokens)
        return tokens

    def _send(self, row: Transfer, tokens: Tokens) -> None:
        for rank in row.destination_ranks:
            if (row.row, rank) in self._sent:
                raise Wrong(f"row {row.row} is sent twice")
            self._sent[row.row, rank] = tokens
            if row.route is not Route.LOCAL:
                self._sends.setdefault((row.route, row.source_rank, rank), []).append(row.row)

    def _give(self, rank: int, row: Transfer, tensor: Tokens) -> None:
        if row.source_rank != rank or row.route is Route.BROADCAST:
            return
        parts = [tensor[s.source_start : s.source_start + s.num_tokens] for s in row.slices]
        if [len(part) for part in parts] != [s.num_tokens for s in row.slices]:
            raise Wrong(f"row {row.row} reaches beyond its tensor")
        if any(s.source_start < 0 or s.num_tokens < 1 for s in row.slices):
            raise Wrong(f"row {row.row} has a bad slice")
        self._send(row, np.concatenate(parts))

    def _assemble(self, pieces: Sequence[tuple[Transfer, Tokens]], edge: str, size: int) -> Tokens:
        """Assemble one tensor from rows, which must cover it exactly once."""
        tensor = np.full(size, np.nan)
        for row, tokens in pieces:
            if row.edge != edge or row.direction is not Direction.FORWARD:
                continue
            start = 0
            for piece in row.slices:
                target = tensor[piece.destination_start : piece.destination_start + piece.num_tokens]
                if len(target) != piece.num_tokens or not np.isnan(target).all():
                    raise Wrong(f"row {row.row} does not fit where it goes")
                target[:] = tokens[start : start + piece.num_tokens]
                start += piece.num_tokens
        if np.isnan(tensor).any():
            raise Wrong(f"tokens of {edge} are missing")
        return tensor

    def _forward(
        self,
        rank: int,
        stage: Stage,
        microbatch: Microbatch,
        action: Action,
        rows: Sequence[tuple[Transfer, Tokens]],
    ) -> None:
        edges = {edge.name for edge in self._plan.model.edges_into(stage.module)} | {stage.module}
        if any(row.edge not in edges for row, _ in rows):
            raise Wrong(f"{action} gets a row of another edge")
        activations = self._layers.forward(
            rank, stage, microbatch, lambda edge, size: self._assemble(rows, edge, size)
        )
        if rank == stage.ranks[position_of(stage, rank)][0]:  # tensor-parallel ranks have the same tokens
            self._loss += activations.loss
        self._activations[rank, stage.id, microbatch.index] = activations
        for number in self._lowered.outputs.get(action, ()):
            self._give(rank, self._lowered.transfers[number], activations.output)

    def _backward(
        self,
        rank: int,
        stage: Stage,
        action: Action,
        activations: Activations,
        rows: Sequence[tuple[Transfer, Tokens]],
    ) -> None:
        gradient = activations.loss_weights
        if gradient is None:
            gradient = _summed(len(activations.output), rows)
        gradient, of_edge = self._layers.backward(rank, stage, activations, gradient)
        for number in self._lowered.outputs.get(action, ()):
            row = self._lowered.transfers[number]
            tensor = gradient if row.edge == stage.module else of_edge.get(row.edge)
            if tensor is None:
                raise Wrong(f"row {row.row} has no gradient to send")
            self._give(rank, row, tensor)

    def _add_weights(self, stage: Stage, activations: Activations) -> None:
        for (rank, key), value in activations.terms.items():
            self._weights.add(rank, stage, key, value)
        activations.terms = {}

    def _check_order(self) -> None:
        """Check that, in order per communicator, every message meets the receive posted for it."""
        for key, sends in self._sends.items():
            takes = self._takes.get(key, [])
            posted = sorted(takes) if key[0] is Route.P2P else takes
            if Counter(posted) == Counter(sends) and posted != sends:
                raise Wrong(f"rank {key[1]} sends to rank {key[2]} in another order than it receives")


def _summed(size: int, rows: Sequence[tuple[Transfer, Tokens]]) -> Tokens:
    """Sum the gradients that the readers of an output sent back."""
    gradient = np.zeros(size)
    for row, tokens in rows:
        start = 0
        for piece in row.slices:
            target = gradient[piece.destination_start : piece.destination_start + piece.num_tokens]
            if len(target) != piece.num_tokens:
                raise Wrong(f"row {row.row} reaches beyond its tensor")
            target += tokens[start : start + piece.num_tokens]
            start += piece.num_tokens
    return gradient
