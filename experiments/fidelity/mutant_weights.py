"""Where weights and gradients are on every rank of a step: whole, sharded or away; gradients summed."""

import math
from collections import Counter

from experiments.fidelity.mutant_lanes import Ended, LaneKind, Lanes, What
from experiments.fidelity.mutant_meaning import Key, keys_of
from experiments.fidelity.mutant_verdict import Stalled, Wrong
from workbench.model.experts import num_experts
from workbench.plan.lowered import Lowered, Weights
from workbench.plan.plan import Plan, Sharding, Stage
from workbench.schedule.action import Action, Pass

TOLERANCE = 1e-9  # relative, of sums in another order
EXCHANGES = (Pass.ALL_GATHER, Pass.REDUCE_SCATTER)
OF_SHARDED = (*EXCHANGES, Pass.FREE)


class HeldWeights:
    """Weights and gradients of all ranks.

    A stage whose weights are sharded is empty until its ranks have gathered them, and after a FREE;
    its gradients are those of this rank's microbatches until its ranks have scattered them. Any other
    stage is there until an OFFLOAD takes it to the host.
    """

    def __init__(self, lowered: Lowered) -> None:
        self._lowered, self._plan = lowered, lowered.plan
        self._unit = units_of(self._plan)
        self._ready: set[tuple[int, int]] = set()  # (rank, stage), of sharded weights
        self._away: set[tuple[int, int]] = set()
        self._added: dict[tuple[int, int, Key], float] = {}  # (rank, stage, key)
        self._parts: dict[tuple[int, Key], float] = {}
        self._sums: dict[tuple[int, Key], float] = {}
        self._lanes = Lanes()
        self._travelling: Counter[tuple[int, What]] = Counter()

    def add(self, rank: int, stage: Stage, key: Key, value: float) -> None:
        """A backward's term of a gradient."""
        self._added[rank, stage.id, key] = self._added.get((rank, stage.id, key), 0.0) + value

    def use(self, rank: int, stage: Stage) -> None:
        """Raises Wrong where the weights of a pass are not there."""
        here = (rank, stage.id)
        if here in self._away or (stage.id in self._unit and here not in self._ready):
            raise Wrong(f"rank {rank} has no weights of stage {stage.id}")

    def is_free(self, rank: int, action: Action) -> bool:
        """Whether all that an action waits for has ended; what begins an exchange waits for nothing.

        A rank with two dealings under way waits for the first before it does anything else, so that no
        more whole gradients pile up.
        """
        if action.stage is None or action.kind in EXCHANGES:
            return True
        dealings = (
            n for (r, what), n in self._travelling.items() if r == rank and what.kind is LaneKind.DEAL
        )
        if action.kind is Pass.REDUCE_GRAD:
            return not (
                action.stage in self._unit and self._travelling[rank, self._what(LaneKind.DEAL, action)]
            )
        is_gathered = (
            action.stage not in self._unit or not self._travelling[rank, self._what(LaneKind.GATHER, action)]
        )
        return is_gathered and sum(dealings) < 2

    def do(self, rank: int, action: Action) -> None:
        """Whatever is neither a pass nor STEP."""
        stage = self._plan.stage.get(action.stage if action.stage is not None else -1)
        if stage is None or (action.kind is not Pass.REDUCE_GRAD and rank not in stage.flat_ranks):
            raise Wrong(f"{action} of nothing on rank {rank}")
        if action.kind is Pass.REDUCE_GRAD:
            self._sum(rank, action)
        elif (action.kind in OF_SHARDED) != (stage.id in self._unit):
            raise Wrong(f"{action}: whether the stage's weights are sharded does not go with it")
        elif action.kind in EXCHANGES:
            self._exchange(rank, stage, action)
        elif action.kind is Pass.FREE:
            self._ready.discard((rank, stage.id))
        elif (action.kind is Pass.OFFLOAD) == ((rank, stage.id) in self._away):
            raise Wrong(f"{action} of a stage that is there already, on rank {rank}")
        else:
            self._away ^= {(rank, stage.id)}

    def advance(self) -> bool:
        """End collectives that all their ranks have come to; whether there were any."""
        found = self._lanes.advance()
        for ended in found:
            self._end(ended)
        return bool(found)

    def gradients(self) -> dict[Key, float]:
        """What all ranks step with.

        Raises:
            Stalled: a collective that somebody never came to.
            Wrong: weights away, gradients that nobody reduce-scattered, or ranks that disagree.
        """
        if stuck := self._lanes.stuck():
            raise Stalled(stuck)
        if self._away:
            rank, missing = min(self._away)
            raise Wrong(f"rank {rank} steps without stage {missing}")
        found: dict[Key, float] = {}
        for stage in self._plan.stages:
            for rank in stage.flat_ranks:
                for key in held_keys(self._plan, stage, rank):
                    value = self._value(rank, key, stage)
                    if not math.isclose(value, found.setdefault(key, value), rel_tol=TOLERANCE):
                        raise Wrong(f"ranks step with different gradients of {key}, rank {rank} is one")
        return found

    def _what(self, kind: LaneKind, action: Action) -> What:
        stage = self._plan.stage[action.stage or 0]
        return What(kind, (stage.module, *stage.layers))

    def _exchange(self, rank: int, stage: Stage, action: Action) -> None:
        what = self._what(LaneKind.GATHER if action.kind is Pass.ALL_GATHER else LaneKind.DEAL, action)
        brought: dict[Key, float] = {}
        if what.kind is LaneKind.DEAL:
            mine = held_keys(self._plan, stage, rank)
            brought = {key: self._added.pop((rank, stage.id, key), 0.0) for key in mine}
            if not brought:  # nothing of it trains
                return
        self._travelling[rank, what] += 1
        self._lanes.begin(rank, what, self._unit[stage.id], brought)

    def _sum(self, rank: int, action: Action) -> None:
        for index in self._lowered.reductions.get(action, ()):
            group = self._lowered.groups[index]
            if rank in group.ranks and len(group.ranks) > 1:
                keys = [key for weights in group.weights for key in self._keys(weights, rank)]
                brought = {key: self._own(rank, key) for key in keys}
                self._lanes.begin(rank, What(LaneKind.SUM, index), group.ranks, brought)

    def _own(self, rank: int, key: Key) -> float:
        """Of a gradient, before sums: all that the rank's stages know of it."""
        added = (self._added.get((rank, s.id, key), 0.0) for s in self._plan.stages_on.get(rank, ()))
        return self._parts.get((rank, key), 0.0) + sum(added)

    def _keys(self, weights: Weights, rank: int) -> list[Key]:
        """Those of a group's weights that a rank holds."""
        stages = [stage for stage in self._plan.stages_on.get(rank, ()) if stage.module == weights.module]
        keys = {key: stage.ep for stage in stages for key in held_keys(self._plan, stage, rank)}
        return [
            key
            for key, ep in keys.items()
            if (key.layer, key.shared) == (weights.layer, weights.shared)
            and weights.experts == (key.expert is not None and ep > 1)
        ]

    def _end(self, ended: Ended) -> None:
        keys = {key for brought in ended.brought.values() for key in brought}
        if any(keys != set(brought) for brought in ended.brought.values()):
            raise Wrong(f"{ended.what} adds up gradients of different weights")
        total = {key: sum(brought[key] for brought in ended.brought.values()) for key in keys}
        for rank in ended.brought:
            if ended.what.kind is LaneKind.SUM:
                self._sums.update({(rank, key): value for key, value in total.items()})
                continue
            self._travelling[rank, ended.what] -= 1
            if ended.what.kind is LaneKind.GATHER:
                mine = (s.id for s in self._plan.stages_on[rank] if self._is_of(s, ended.what))
                self._ready.update((rank, stage) for stage in mine)
            for key, value in total.items():
                self._parts[rank, key] = self._parts.get((rank, key), 0.0) + value

    def _is_of(self, stage: Stage, what: What) -> bool:
        return stage.id in self._unit and (stage.module, *stage.layers) == what.of

    def _value(self, rank: int, key: Key, stage: Stage) -> float:
        if stage.id in self._unit and (rank, stage.id, key) in self._added:
            raise Wrong(f"rank {rank} steps without having reduce-scattered its gradient of {key}")
        return self._sums.get((rank, key), self._own(rank, key))


def units_of(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Stage whose weights are sharded -> the ranks that hold its layers in the same instance, ascending.

    Instances are equally many replicas each, neighbours together.
    """
    ranks: dict[tuple[str, int, tuple[int, int]], set[int]] = {}
    keys = {}
    for stage in plan.stages:
        settings = plan.settings.of(stage.module)
        if settings.sharding is Sharding.PARAMETERS:
            replicas = sorted({s.replica for s in plan.stages if s.module == stage.module})
            instance = replicas.index(stage.replica) // max(1, len(replicas) // settings.instances)
            keys[stage.id] = stage.module, instance, stage.layers
            ranks.setdefault(keys[stage.id], set()).update(stage.flat_ranks)
    return {stage: tuple(sorted(ranks[key])) for stage, key in keys.items()}


def held_keys(plan: Plan, stage: Stage, rank: int) -> list[Key]:
    """Trained weights of a stage that one of its ranks holds: of divided experts its own alone."""
    found = []
    layers = plan.model.module(stage.module).layers
    for layer in range(*stage.layers):
        if layers[layer].trainable:
            mine = own_experts(stage, rank, num_experts(layers[layer]))
            found += [key for key in keys_of(plan.model.module(stage.module), layer) if key.expert in mine]
    return list(dict.fromkeys(found))


def own_experts(stage: Stage, rank: int, count: int) -> frozenset[int | None]:
    """Experts of a layer that a rank of the stage holds, and None for its other weights."""
    if stage.ep < 1 or len(stage.flat_ranks) % stage.ep or count % stage.ep:
        raise Wrong(f"stage {stage.id} cannot divide {count} experts among {stage.ep} ranks")
    index, each = stage.flat_ranks.index(rank) % stage.ep, count // stage.ep
    return frozenset((None, *range(index * each, (index + 1) * each)))
