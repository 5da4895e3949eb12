"""Says what a plan computes, by another way than the planner's: numbers pushed through its rows.

The judge executes the lowered plan on the surrogate of `mutant_meaning` under its own model of
communication: messages matched by tag that never block their sender, passes that need all ranks of
their stage, reductions on a lane beside them; and checks that messages meet in order where they
match by order. Where it stalls, the plan deadlocks; where loss or gradients are not those of the
job, it computes something else.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from experiments.fidelity.mutant_meaning import (
    Key,
    Meaning,
    Owners,
    Token,
    Tokens,
    coefficient,
    embedded,
    loss_weights,
    numbers,
    places,
)
from experiments.fidelity.mutant_verdict import Judgement, Stalled, Verdict, Wrong, check_lanes
from workbench.data.sample import Item
from workbench.graph.layer import TokenCount
from workbench.graph.model_graph import TEXT, Module
from workbench.plan.lowered import Direction, Lowered, Route, Transfer
from workbench.plan.plan import Microbatch, Stage
from workbench.schedule.action import COMPUTE, Action, Pass

TOLERANCE = 1e-9  # relative, of sums in another order


def judge(lowered: Lowered, meaning: Meaning) -> Judgement:
    """Execute the plan and compare."""
    try:
        found = _Execution(lowered).run()
    except Stalled as stalled:
        return Judgement(Verdict.DEADLOCK, str(stalled))
    except Wrong as wrong:
        return Judgement(Verdict.OTHER, str(wrong))
    except (LookupError, ValueError) as error:  # rows that fit no tensor
        return Judgement(Verdict.OTHER, f"{type(error).__name__}: {error}")
    if not math.isclose(found.loss, meaning.loss, rel_tol=TOLERANCE):
        return Judgement(Verdict.OTHER, f"loss {found.loss} instead of {meaning.loss}")
    for key, value in meaning.gradients.items():
        if not math.isclose(found.gradients.get(key, 0.0), value, rel_tol=TOLERANCE):
            return Judgement(Verdict.OTHER, f"gradient of {key} is not the job's")
    return Judgement(Verdict.SAME)


@dataclass(slots=True)
class _Kept:
    """What one rank keeps of a forward: every layer's input, the map to its output, owned tokens."""

    inputs: list[Tokens]
    maps: list[NDArray[np.int64]]
    edges: dict[str, tuple[int, NDArray[np.int64], NDArray[np.int64]]] = field(default_factory=dict)
    output: Tokens = field(default_factory=lambda: np.zeros(0))
    weight_terms: dict[Key, float] = field(default_factory=dict)
    loss_weights: Tokens | None = None


class _Execution:
    """One step of a lowered plan, rank by rank, as far as it gets."""

    def __init__(self, lowered: Lowered) -> None:
        self._lowered, self._plan = lowered, lowered.plan
        self._owners = Owners(self._plan)
        self._samples = {sample.id: sample for sample in self._plan.batch}
        self._microbatch = {(m.module, m.replica, m.index): m for m in self._plan.microbatches}
        self._program = {r: p.actions for p in self._plan.programs for r in p.ranks}
        self._position = dict.fromkeys(self._program, 0)
        self._sent: dict[tuple[int, int], Tokens] = {}  # (row, rank)
        self._sends: dict[tuple[Route, int, int], list[int]] = {}
        self._takes: dict[tuple[Route, int, int], list[int]] = {}
        self._kept: dict[tuple[int, int, int], _Kept] = {}  # (rank, stage, microbatch)
        self._gradients: dict[tuple[int, Key], float] = {}
        self._issued: dict[int, list[tuple[int, float]]] = {rank: [] for rank in self._program}
        self._loss = 0.0
        self._followers: dict[tuple[int, int], list[Transfer]] = {}
        for row in lowered.transfers:
            if row.after is not None:
                self._followers.setdefault((row.after, row.source_rank), []).append(row)

    def run(self) -> Meaning:
        """Raises Stalled or Wrong."""
        moved = True
        while moved:
            moved = False
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
        if self._kept and any(kept.weight_terms for kept in self._kept.values()):
            raise Wrong("weight gradients that nobody added")
        if self._sent:
            raise Wrong(f"row {min(self._sent)[0]} was never consumed")
        return Meaning(self._loss, self._reduced())

    def _next(self, rank: int) -> Action | None:
        program, position = self._program[rank], self._position[rank]
        return program[position] if position < len(program) else None

    def _try(self, rank: int, action: Action) -> bool:
        """Do an action if it can be done now; STEP stays where it is, and ends the program."""
        if action.kind is Pass.STEP:
            return False
        if action.kind is Pass.REDUCE_GRAD:
            for index in self._lowered.reductions.get(action, ()):
                group = self._lowered.groups[index]
                if rank in group.ranks:
                    held = [self._gradients.get((rank, (w.module, w.layer or 0)), 0.0) for w in group.weights]
                    self._issued[rank].append((index, sum(held)))
            self._position[rank] += 1
            return True
        if action.kind not in COMPUTE or action.stage not in self._plan.stage:
            raise Wrong(f"{action} of nothing")
        ranks = self._plan.stage[action.stage].flat_ranks
        if rank not in ranks or any(self._next(r) != action for r in ranks if r in self._program):
            return False
        if set(ranks) - set(self._program) or not all(self._has_rows(r, action) for r in ranks):
            return False
        for member in ranks:
            self._do(member, action)
            self._position[member] += 1
        return True

    def _rows(self, rank: int, action: Action) -> list[Transfer]:
        rows = (self._lowered.transfers[n] for n in self._lowered.inputs.get(action, ()))
        return [row for row in rows if rank in row.destination_ranks]

    def _has_rows(self, rank: int, action: Action) -> bool:
        """Whether all have arrived; a broadcast arrives when its leader takes what it follows."""
        return all(
            (row.row, rank) in self._sent
            or (row.route is Route.BROADCAST and (row.after, row.source_rank) in self._sent)
            for row in self._rows(rank, action)
        )

    def _do(self, rank: int, action: Action) -> None:
        stage = self._plan.stage[action.stage or 0]
        microbatch = self._microbatch.get((stage.module, stage.replica, action.microbatch or 0))
        if microbatch is None:
            raise Wrong(f"{action} has no microbatch")
        taken = [(row, self._take(row, rank)) for row in self._ordered(rank, action)]
        key = (rank, stage.id, microbatch.index)
        if action.kind is Pass.F:
            if key in self._kept:
                raise Wrong(f"{action} twice")
            self._forward(rank, stage, microbatch, action, taken)
        elif key not in self._kept:
            raise Wrong(f"{action} without its forward")
        elif action.kind is Pass.W:
            self._add_weights(rank, self._kept[key])
        else:
            self._backward(rank, stage, action, self._kept[key], taken)
            if action.kind is Pass.B:
                self._add_weights(rank, self._kept[key])

    def _ordered(self, rank: int, action: Action) -> list[Transfer]:
        """What a leader passes on comes before what others wait for."""
        return sorted(self._rows(rank, action), key=lambda row: row.route is Route.BROADCAST)

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

    def _assemble(self, taken: Sequence[tuple[Transfer, Tokens]], edge: str, size: int) -> Tokens:
        """One tensor out of rows, which must cover it exactly once."""
        tensor = np.full(size, np.nan)
        for row, tokens in taken:
            if row.edge != edge or row.direction is not Direction.FORWARD:
                continue
            start = 0
            for piece in row.slices:
                there = tensor[piece.destination_start : piece.destination_start + piece.num_tokens]
                if len(there) != piece.num_tokens or not np.isnan(there).all():
                    raise Wrong(f"row {row.row} does not fit where it goes")
                there[:] = tokens[start : start + piece.num_tokens]
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
        taken: Sequence[tuple[Transfer, Tokens]],
    ) -> None:
        module = self._plan.model.module(stage.module)
        first, last = stage.layers
        place = next(index for index, row in enumerate(stage.ranks) if rank in row)
        kept = _Kept([], [])
        count = module.layers[first - 1].emits if first else TokenCount.IN
        owned = self._owners.tokens(microbatch, count, stage.cp)[place]
        expected_edges = {edge.name for edge in self._plan.model.edges_into(module.name)} | {module.name}
        if any(row.edge not in expected_edges for row, _ in taken):
            raise Wrong(f"{action} gets a row of another edge")
        hidden = self._assemble(taken, module.name, len(owned)) if first else self._raw(module, owned)
        for index in range(first, last):
            hidden = self._place_features(module, microbatch, index, taken, (hidden, owned, kept))
            following = self._owners.tokens(microbatch, module.layers[index].emits, stage.cp)[place]
            mapped = self._mapped(module, owned, following)
            kept.inputs.append(hidden)
            kept.maps.append(mapped)
            hidden = hidden[mapped] * coefficient(module.name, index)
            owned = following
        kept.output = hidden
        if module.modality == TEXT and last == len(module.layers):
            weights = np.array([loss_weights(self._samples[item.sample])[t] for item, t in owned])
            kept.loss_weights = weights
            self._loss += float(weights @ hidden) if len(owned) else 0.0
        self._kept[rank, stage.id, microbatch.index] = kept
        for number in self._lowered.outputs.get(action, ()):
            self._give(rank, self._lowered.transfers[number], hidden)

    def _raw(self, module: Module, owned: Sequence[Token]) -> Tokens:
        values = np.zeros(len(owned))
        known: dict[Item, Tokens] = {}
        for index, (item, token) in enumerate(owned):
            if item not in known:
                num_in, _ = self._owners.counts(module, item)
                known[item] = (
                    embedded(self._plan, self._samples[item.sample])
                    if module.modality == TEXT
                    else numbers(num_in, "raw", module.name, *item)
                )
            values[index] = known[item][token]
        return values

    def _place_features(
        self,
        module: Module,
        microbatch: Microbatch,
        index: int,
        taken: Sequence[tuple[Transfer, Tokens]],
        at: tuple[Tokens, Sequence[Token], _Kept],
    ) -> Tokens:
        hidden, owned, kept = at
        where = {token: place for place, token in enumerate(owned)}
        for edge in self._plan.model.edges_into(module.name):
            if edge.before_layer != index:
                continue
            targets = [
                (Item(sample.id, 0), token)
                for sample in (self._samples[item.sample] for item in microbatch.items)
                for _, start, stop in places(self._plan, edge, sample)
                for token in range(start, stop)
            ]
            features = self._assemble(taken, edge.name, len(targets))
            mine = np.array([i for i, token in enumerate(targets) if token in where], dtype=np.int64)
            into = np.array([where[targets[i]] for i in mine], dtype=np.int64)
            hidden = hidden.copy()
            hidden[into] = features[mine] if index == 0 else hidden[into] + features[mine]
            kept.edges[edge.name] = (index, mine, into)
            kept.edges[edge.name + " size"] = (len(targets), mine, into)
        return hidden

    def _mapped(
        self, module: Module, owned: Sequence[Token], following: Sequence[Token]
    ) -> NDArray[np.int64]:
        """Which of the tokens before a layer every token behind it comes from."""
        if list(owned) == list(following):
            return np.arange(len(owned))
        where = {token: place for place, token in enumerate(owned)}
        found = []
        for item, token in following:
            num_in, num_out = self._owners.counts(module, item)
            found.append(where[item, token * num_in // num_out])
        return np.array(found, dtype=np.int64)

    def _backward(
        self,
        rank: int,
        stage: Stage,
        action: Action,
        kept: _Kept,
        taken: Sequence[tuple[Transfer, Tokens]],
    ) -> None:
        module = self._plan.model.module(stage.module)
        gradient = kept.loss_weights if kept.loss_weights is not None else _summed(kept.output, taken)
        of_edge: dict[str, Tokens] = {}
        for index in reversed(range(*stage.layers)):
            at = index - stage.layers[0]
            if module.layers[index].trainable:
                term = float(gradient @ kept.inputs[at][kept.maps[at]])
                kept.weight_terms[module.name, index] = term
            back = np.zeros_like(kept.inputs[at])
            np.add.at(back, kept.maps[at], gradient * coefficient(module.name, index))
            for name, (before, mine, into) in kept.edges.items():
                if before == index and not name.endswith(" size"):
                    of_edge[name] = np.zeros(kept.edges[name + " size"][0])
                    of_edge[name][mine] = back[into]
            gradient = back
        for number in self._lowered.outputs.get(action, ()):
            row = self._lowered.transfers[number]
            tensor = gradient if row.edge == module.name else of_edge.get(row.edge)
            if tensor is None:
                raise Wrong(f"row {row.row} has no gradient to send")
            self._give(rank, row, tensor)

    def _add_weights(self, rank: int, kept: _Kept) -> None:
        for key, term in kept.weight_terms.items():
            self._gradients[rank, key] = self._gradients.get((rank, key), 0.0) + term
        kept.weight_terms = {}

    def _check_order(self) -> None:
        """In order per communicator, every message meets the receive that is posted for it."""
        for key, sends in self._sends.items():
            takes = self._takes.get(key, [])
            posted = sorted(takes) if key[0] is Route.P2P else takes
            if Counter(posted) == Counter(sends) and posted != sends:
                raise Wrong(f"rank {key[1]} sends to rank {key[2]} in another order than it receives")

    def _reduced(self) -> dict[Key, float]:
        """Gradients after the reductions; Wrong where ranks that hold a layer disagree."""
        held = self._held()
        check_lanes(self._issued, self._lowered.groups)
        for index, group in enumerate(self._lowered.groups):
            if len(group.ranks) > 1:
                parts = {rank: [v for i, v in self._issued[rank] if i == index] for rank in group.ranks}
                if any(len(values) != 1 for values in parts.values()):
                    raise Stalled(f"gradient group {index}: a rank does not come, or comes twice")
                total = sum(values[0] for values in parts.values())
                for weights in group.weights:
                    held[weights.module, weights.layer or 0] |= dict.fromkeys(group.ranks, total)
        for key, by_rank in held.items():
            values = list(by_rank.values())
            if not all(math.isclose(value, values[0], rel_tol=TOLERANCE) for value in values):
                raise Wrong(f"ranks {list(by_rank)} step with different gradients of {key}")
        return {key: next(iter(by_rank.values())) for key, by_rank in held.items()}

    def _held(self) -> dict[Key, dict[int, float]]:
        """Trainable layer -> rank that holds it -> its gradient there."""
        held: dict[Key, dict[int, float]] = {}
        for stage in self._plan.stages:
            for layer in range(*stage.layers):
                key = (stage.module, layer)
                if self._plan.model.module(stage.module).layers[layer].trainable:
                    own = {rank: self._gradients.get((rank, key), 0.0) for rank in stage.flat_ranks}
                    held.setdefault(key, {}).update(own)
        return held


def _summed(like: Tokens, taken: Sequence[tuple[Transfer, Tokens]]) -> Tokens:
    """The gradient of an output: what all its readers sent back."""
    gradient = np.zeros_like(like)
    for row, tokens in taken:
        start = 0
        for piece in row.slices:
            there = gradient[piece.destination_start : piece.destination_start + piece.num_tokens]
            if len(there) != piece.num_tokens:
                raise Wrong(f"row {row.row} reaches beyond its tensor")
            there += tokens[start : start + piece.num_tokens]
            start += piece.num_tokens
    return gradient
