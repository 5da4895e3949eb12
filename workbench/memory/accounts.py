"""Look-ups that the memory accounts of ranks share: stage bytes, rows, reduced gradients."""

from collections import Counter
from collections.abc import Collection, Hashable
from functools import cached_property

from workbench.memory.program_positions import BACKWARDS
from workbench.memory.sizes import Sizes
from workbench.memory.stage import StateKind, state_of
from workbench.plan.frame import frame_of
from workbench.plan.gradient_groups import num_replicas
from workbench.plan.lowered import Lowered
from workbench.plan.matrix_pools import pools_by_rank
from workbench.plan.optimizer_shards import state_shards
from workbench.plan.parameter_shards import sharded_stages
from workbench.plan.routing import routing_of
from workbench.plan.stage import Stage
from workbench.plan.tied import equal_stages, tied_on
from workbench.schedule.action import Action


class Accounts:
    """Look-ups shared by the memory accounts of several ranks of a lowered plan.

    Args:
        lowered: the plan.
        ranks: whose accounts are needed; None: any rank's.
    """

    def __init__(self, lowered: Lowered, ranks: Collection[int] | None = None) -> None:
        self.lowered, self.plan = lowered, lowered.plan
        self.ranks = lowered.plan.ranks if ranks is None else tuple(ranks)
        self.units = sharded_stages(self.plan)
        self.sizes = Sizes(self.plan, routing_of(self.plan))
        self._state: dict[tuple[object, ...], tuple[tuple[Stage, StateKind, int], ...]] = {}

    def shape(self, rank: int) -> Hashable:
        """Return a key of stages, program and gradients; ranks of one shape differ in rows alone."""
        return self._shapes[rank]

    @cached_property
    def _shapes(self) -> dict[int, Hashable]:
        reduced, program = self.reduced, self.plan.program
        return {
            rank: (self._state_key(rank), id(program.get(rank)), tuple(reduced.get(rank, {}).items()))
            for rank in self.ranks
        }

    def decisive(self, rank: int) -> Hashable:
        """Return a key of everything but rows that decides a rank's account, valid for any plan."""
        settings, replicas = self.plan.settings, num_replicas(self.plan)
        per_stage = tuple(
            (
                *(stage.layers, self.units.get(stage.id), settings.of(stage.module), replicas[stage.module]),
                tuple(state_shards(self.plan, stage).values()),
            )
            for stage in self.plan.stages_on.get(rank, ())
        )
        pools = tuple([(len(ranks), pooled) for ranks, pooled in pools_by_rank(self.plan).get(rank, ())])
        rule = settings.optimizer, settings.optimizer_precision, pools
        per_plan = frame_of(self.plan), settings.kernels, *rule
        return *per_plan, rank, per_stage, tuple(self.reduced.get(rank, {}).items())

    @cached_property
    def reduced(self) -> dict[int, dict[Action, tuple[int, int]]]:
        """Rank -> gradient reduction -> elements of all groups that the rank is in, and of the largest."""
        elements_of: dict[int, dict[Action, tuple[int, int]]] = {}
        ranks = frozenset(self.ranks)
        for action, reducers in self.lowered.reducers.items():
            for each in reducers:
                sizes = [self.lowered.groups[index].num_elements for index in each.groups]
                for rank in ranks.intersection(each.ranks):
                    elements_of.setdefault(rank, {})[action] = sum(sizes), max(sizes)
        return elements_of

    def _state_key(self, rank: int) -> tuple[object, ...]:
        """Return a key of a rank's parameter state: its stages and their tied weights."""
        return tuple(stage.id for stage in self.plan.stages_on.get(rank, ())), tied_on(self.plan, rank)

    def state(self, rank: int) -> tuple[tuple[Stage, StateKind, int], ...]:
        """Return (stage, part, bytes) of the state of a rank's parameters."""
        key = self._state_key(rank)
        if key not in self._state:
            stages, (_, tied) = self.plan.stages_on.get(rank, ()), key
            if tied or any(equal_stages(self.plan, stage)[0] != stage.id for stage in stages):
                self._state[key] = self._shared_state(rank)
            else:
                by_stage = ((stage, self.sizes.state(stage).items()) for stage in stages)
                self._state[key] = tuple((stage, kind, n) for stage, items in by_stage for kind, n in items)
        return self._state[key]

    def _shared_state(self, rank: int) -> tuple[tuple[Stage, StateKind, int], ...]:
        """Return the state where stages of the rank have weights in common, which count once."""
        sizes: Counter[tuple[int, StateKind]] = Counter()
        for stage, kind, num_bytes in state_of(self.plan, rank):
            sizes[stage.id, kind] += num_bytes
        return tuple((self.plan.stage[stage], kind, n) for (stage, kind), n in sizes.items())

    @cached_property
    def backwards(self) -> dict[tuple[int | None, int | None], Action]:
        """(stage, microbatch) -> its backward, the first pass of a split one."""
        actions = self.plan.program_actions
        return {(a.stage, a.microbatch): a for a in actions if a.kind in BACKWARDS}
