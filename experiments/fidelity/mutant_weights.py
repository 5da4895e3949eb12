"""Weights and gradients on every rank during a step: whole, sharded or offloaded; gradients summed."""

import math
from collections import Counter, deque
from collections.abc import Sequence

from experiments.fidelity.mutant_lanes import Ended, LaneKind, Lanes, Subject
from experiments.fidelity.mutant_meaning import Key, keys_of
from experiments.fidelity.mutant_verdict import Stalled, Wrong
from workbench.float_sum import float_sum
from workbench.model.experts import num_experts
from workbench.plan.lowered import Lowered, Weights
from workbench.plan.plan import Plan, Sharding
from workbench.plan.stage import Stage
from workbench.schedule.action import Action, Pass
from workbench.schedule.sharded import ReshardAfter

TOLERANCE = 1e-9  # relative, of sums in another order
EXCHANGES = (Pass.ALL_GATHER, Pass.REDUCE_SCATTER)
OF_SHARDED = (*EXCHANGES, Pass.FREE)


class HeldWeights:
    """Weights and gradients of all ranks.

    A stage with sharded weights is empty until its ranks have gathered them, and after a FREE; its
    gradients are those of this rank's microbatches until its ranks have reduce-scattered them. Any other
    stage is present until an OFFLOAD moves it to the host.
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
        self._in_flight: Counter[tuple[int, Subject]] = Counter()
        self._due: dict[int, deque[Action]] = {}  # sums that wait beside the passes, by rank
        self._once = {stage for stage in self._unit if self._reduces_once(self._plan.stage[stage])}

    def add(self, rank: int, stage: Stage, key: Key, value: float) -> None:
        """Add a backward's term to a gradient."""
        self._added[rank, stage.id, key] = self._added.get((rank, stage.id, key), 0.0) + value

    def use(self, rank: int, stage: Stage) -> None:
        """Raise Wrong unless the weights of a pass are present."""
        key = (rank, stage.id)
        if key in self._away or (stage.id in self._unit and key not in self._ready):
            raise Wrong(f"rank {rank} has no weights of stage {stage.id}")

    def is_free(self, rank: int, action: Action) -> bool:
        """Whether everything an action waits for has finished; starting an exchange waits for nothing.

        A rank with two reduce-scatters in flight waits for the first before it does anything else, so that
        no more whole gradients accumulate. Of modules that reduce once a step all accumulate anyway: nothing
        waits for their reduce-scatters but STEP, and sums over instances, beside the passes.
        """
        if action.stage is None or action.kind in EXCHANGES:
            return True
        dealings = (
            n
            for (r, subject), n in self._in_flight.items()
            if r == rank and subject.kind is LaneKind.DEAL and not self._is_dealt_once(subject)
        )
        if action.kind is Pass.REDUCE_GRAD:
            return action.stage in self._once or not self._is_dealing(rank, action)
        is_gathered = (
            action.stage not in self._unit
            or not self._in_flight[rank, self._subject(LaneKind.GATHER, action)]
        )
        return is_gathered and sum(dealings) < 2

    def do(self, rank: int, action: Action) -> None:
        """Execute an action that is neither a pass nor STEP."""
        stage = self._plan.stage.get(action.stage if action.stage is not None else -1)
        if stage is None or (action.kind is not Pass.REDUCE_GRAD and rank not in stage.flat_ranks):
            raise Wrong(f"{action} of nothing on rank {rank}")
        if action.kind is Pass.REDUCE_GRAD:
            self._due.setdefault(rank, deque()).append(action)
            self._sum_due(rank)
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
        """Finish the collectives that all their ranks have joined; returns whether there were any."""
        ended_collectives = self._lanes.advance()
        for ended in ended_collectives:
            self._end(ended)
        for rank in self._due:
            self._sum_due(rank)
        return bool(ended_collectives)

    def gradients(self) -> dict[Key, float]:
        """The gradients that all ranks step with.

        Raises:
            Stalled: a collective that some rank never joined.
            Wrong: weights missing, gradients not reduce-scattered, or ranks that disagree.
        """
        if stuck := self._lanes.stuck():
            raise Stalled(stuck)
        if self._away:
            rank, missing = min(self._away)
            raise Wrong(f"rank {rank} steps without stage {missing}")
        values: dict[Key, float] = {}
        for stage in self._plan.stages:
            for rank in stage.flat_ranks:
                for key in keys_on_rank(self._plan, stage, rank):
                    value = self._value(rank, key, stage)
                    if not math.isclose(value, values.setdefault(key, value), rel_tol=TOLERANCE):
                        raise Wrong(f"ranks step with different gradients of {key}, rank {rank} is one")
        return values

    def _subject(self, kind: LaneKind, action: Action) -> Subject:
        stage = self._plan.stage[action.stage or 0]
        return Subject(kind, (stage.module, *stage.layers))

    def _exchange(self, rank: int, stage: Stage, action: Action) -> None:
        subject = self._subject(LaneKind.GATHER if action.kind is Pass.ALL_GATHER else LaneKind.DEAL, action)
        contribution: dict[Key, float] = {}
        if subject.kind is LaneKind.DEAL:
            mine = keys_on_rank(self._plan, stage, rank)
            contribution = {key: self._added.pop((rank, stage.id, key), 0.0) for key in mine}
            if not contribution:  # nothing of it trains
                return
        self._in_flight[rank, subject] += 1
        self._lanes.begin(rank, subject, self._unit[stage.id], contribution)

    def _reduces_once(self, stage: Stage) -> bool:
        return self._plan.settings.of(stage.module).reshard_after is ReshardAfter.STEP

    def _is_dealt_once(self, subject: Subject) -> bool:
        return any(self._is_of(self._plan.stage[stage], subject) for stage in self._once)

    def _is_dealing(self, rank: int, action: Action) -> bool:
        """Whether the reduce-scatter of an action's stage is in flight."""
        return action.stage in self._unit and self._in_flight[rank, self._subject(LaneKind.DEAL, action)] > 0

    def _sum_due(self, rank: int) -> None:
        """Begin a rank's sums in their order, up to one whose reduce-scatter is in flight."""
        due = self._due[rank]
        while due and not self._is_dealing(rank, due[0]):
            self._sum(rank, due.popleft())

    def _sum(self, rank: int, action: Action) -> None:
        for index in self._lowered.reductions.get(action, ()):
            group = self._lowered.groups[index]
            if rank in group.ranks and len(group.ranks) > 1:
                keys = [key for weights in group.weights for key in self._keys(weights, rank)]
                contribution = {key: self._own(rank, key) for key in keys}
                self._lanes.begin(rank, Subject(LaneKind.SUM, index), group.ranks, contribution)

    def _own(self, rank: int, key: Key) -> float:
        """A rank's gradient before reductions, summed over its stages."""
        added = (self._added.get((rank, s.id, key), 0.0) for s in self._plan.stages_on.get(rank, ()))
        return self._parts.get((rank, key), 0.0) + float_sum(added)

    def _keys(self, weights: Weights, rank: int) -> list[Key]:
        """Keys of a group's weights that a rank holds."""
        stages = [stage for stage in self._plan.stages_on.get(rank, ()) if stage.module == weights.module]
        keys = {key: stage.ep for stage in stages for key in keys_on_rank(self._plan, stage, rank)}
        return [
            key
            for key, ep in keys.items()
            if (key.layer, key.shared) == (weights.layer, weights.shared)
            and weights.experts == (key.expert is not None and ep > 1)
        ]

    def _end(self, ended: Ended) -> None:
        groups: dict[object, list[int]] = {}
        for rank in ended.contributions:
            groups.setdefault(self._copy(rank, ended.subject), []).append(rank)
        for ranks in groups.values():
            self._add_up(ended, ranks)
        for rank in ended.contributions if ended.subject.kind is not LaneKind.SUM else ():
            self._in_flight[rank, ended.subject] -= 1
            if ended.subject.kind is LaneKind.GATHER:
                mine = (s.id for s in self._plan.stages_on[rank] if self._is_of(s, ended.subject))
                self._ready.update((rank, stage) for stage in mine)

    def _copy(self, rank: int, subject: Subject) -> object:
        """Which of the collectives of a subject a rank is in: that of its tensor-parallel index."""
        if subject.kind is LaneKind.SUM:
            return None
        stage = next(stage for stage in self._plan.stages_on[rank] if self._is_of(stage, subject))
        return stage.flat_ranks.index(rank) % stage.tp

    def _add_up(self, ended: Ended, ranks: Sequence[int]) -> None:
        """Sum contributions of ranks that hold the same weights; of distributed experts, of all that do."""
        contributions = {rank: ended.contributions[rank] for rank in ranks}
        keys = {key for contribution in contributions.values() for key in contribution}
        for key in keys:
            spread = ended.subject.kind is not LaneKind.SUM and self._is_distributed(ranks[0], key)
            if not spread and any(key not in contribution for contribution in contributions.values()):
                raise Wrong(f"{ended.subject} adds up gradients of different weights")
            source = ended.contributions if spread else contributions
            total = float_sum(contribution.get(key, 0.0) for contribution in source.values())
            for rank in (rank for rank in ranks if key in contributions[rank]):
                if ended.subject.kind is LaneKind.SUM:
                    self._sums[rank, key] = total
                else:
                    self._parts[rank, key] = self._parts.get((rank, key), 0.0) + total

    def _is_distributed(self, rank: int, key: Key) -> bool:
        stages = self._plan.stages_on.get(rank, ())
        return key.expert is not None and any(s.ep > 1 for s in stages if s.module == key.module)

    def _is_of(self, stage: Stage, subject: Subject) -> bool:
        return stage.id in self._unit and (stage.module, *stage.layers) == subject.of

    def _value(self, rank: int, key: Key, stage: Stage) -> float:
        if stage.id in self._unit and (rank, stage.id, key) in self._added:
            raise Wrong(f"rank {rank} steps without having reduce-scattered its gradient of {key}")
        return self._sums.get((rank, key), self._own(rank, key))


def units_of(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Return stage with sharded weights -> the ranks that hold its layers in the same instance, ascending.

    Instances consist of equally many neighbouring replicas.
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


def keys_on_rank(plan: Plan, stage: Stage, rank: int) -> list[Key]:
    """Keys of the trained weights of a stage that one of its ranks holds; of distributed experts its own."""
    keys = []
    layers = plan.model.module(stage.module).layers
    for layer in range(*stage.layers):
        if layers[layer].trainable:
            own = own_experts(stage, rank, num_experts(layers[layer]))
            keys += [key for key in keys_of(plan.model.module(stage.module), layer) if key.expert in own]
    return list(dict.fromkeys(keys))


def own_experts(stage: Stage, rank: int, count: int) -> frozenset[int | None]:
    """Experts of a layer that a rank of the stage holds, and None for its other weights."""
    if stage.ep < 1 or len(stage.flat_ranks) % stage.ep or count % stage.ep:
        raise Wrong(f"stage {stage.id} cannot divide {count} experts among {stage.ep} ranks")
    index, each = stage.flat_ranks.index(rank) % stage.ep, count // stage.ep
    return frozenset((None, *range(index * each, (index + 1) * each)))
