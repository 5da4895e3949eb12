"""What the accounts of ranks share: bytes of stages, places of actions, rows, gradients that are reduced."""

from collections import Counter
from collections.abc import Collection, Hashable
from functools import cached_property

from workbench.memory.places import BACKWARDS
from workbench.memory.sizes import Sizes
from workbench.memory.stage import StateKind, state_of
from workbench.plan.frame import frame_of
from workbench.plan.gradient_groups import num_replicas
from workbench.plan.lowered import GradientGroup, Lowered
from workbench.plan.optimizer_shards import state_shards
from workbench.plan.parameter_shards import sharded_stages
from workbench.plan.plan import Stage
from workbench.plan.routing import routing_of
from workbench.plan.tied import equal_stages, tied_on
from workbench.schedule.action import Action


class Accounts:
    """What the accounts of several ranks of a lowered plan look up.

    Args:
        lowered: the plan.
        ranks: whose accounts are wanted; None: any rank's.
    """

    def __init__(self, lowered: Lowered, ranks: Collection[int] | None = None) -> None:
        self.lowered, self.plan = lowered, lowered.plan
        self.ranks = lowered.plan.ranks if ranks is None else tuple(ranks)
        self.units = sharded_stages(self.plan)
        self.sizes = Sizes(self.plan, routing_of(self.plan))
        self._state: dict[tuple[object, ...], tuple[tuple[Stage, StateKind, int], ...]] = {}

    def shape(self, rank: int) -> Hashable:
        """What ranks have in common whose accounts differ in rows alone: stages, program, gradients."""
        return self._shapes[rank]

    @cached_property
    def _shapes(self) -> dict[int, Hashable]:
        reduced, program = self.reduced, self.plan.program
        return {
            rank: (self._state_key(rank), id(program.get(rank)), tuple(reduced.get(rank, {}).items()))
            for rank in self.ranks
        }

    def decisive(self, rank: int) -> Hashable:
        """All that decides a rank's account but its rows, in any plan."""
        settings, replicas = self.plan.settings, num_replicas(self.plan)
        own = tuple(
            (
                *(stage.layers, self.units.get(stage.id), settings.of(stage.module), replicas[stage.module]),
                tuple(state_shards(self.plan, stage).values()),
            )
            for stage in self.plan.stages_on.get(rank, ())
        )
        every = frame_of(self.plan), settings.kernels, settings.optimizer_precision
        return *every, rank, own, tuple(self.reduced.get(rank, {}).items())

    @cached_property
    def reduced(self) -> dict[int, dict[Action, tuple[int, int]]]:
        """Rank -> sum of gradients -> elements of all groups that the rank is in, and of the largest."""
        found: dict[int, dict[Action, tuple[int, int]]] = {}
        wanted = frozenset(self.ranks)
        for action, indices in self.lowered.reductions.items():
            if not (own := wanted.intersection(self.plan.ranks_of(action))):
                continue
            same: dict[tuple[int, ...], list[GradientGroup]] = {}  # of many weights
            for group in map(self.lowered.groups.__getitem__, indices):
                same.setdefault(group.ranks, []).append(group)
            for groups in same.values():
                sizes = [group.num_elements for group in groups]
                for rank in own.intersection(groups[0].members):
                    total, largest = found.setdefault(rank, {}).get(action, (0, 0))
                    found[rank][action] = total + sum(sizes), max(largest, *sizes)
        return found

    def _state_key(self, rank: int) -> tuple[object, ...]:
        """Ranks with the same stages hold the same."""
        return tuple(stage.id for stage in self.plan.stages_on.get(rank, ())), tied_on(self.plan, rank)

    def state(self, rank: int) -> tuple[tuple[Stage, StateKind, int], ...]:
        """(stage, part, bytes) of all that a rank's parameters hold."""
        key = self._state_key(rank)
        if key not in self._state:
            stages, (_, tied) = self.plan.stages_on.get(rank, ()), key
            if tied or any(equal_stages(self.plan, stage)[0] != stage.id for stage in stages):
                self._state[key] = self._shared_state(rank)
            else:
                each = ((stage, self.sizes.state(stage).items()) for stage in stages)
                self._state[key] = tuple((stage, kind, n) for stage, items in each for kind, n in items)
        return self._state[key]

    def _shared_state(self, rank: int) -> tuple[tuple[Stage, StateKind, int], ...]:
        """Where stages of the rank have weights in common, which count once."""
        sizes: Counter[tuple[int, StateKind]] = Counter()
        for stage, kind, num_bytes in state_of(self.plan, rank):
            sizes[stage.id, kind] += num_bytes
        return tuple((self.plan.stage[stage], kind, n) for (stage, kind), n in sizes.items())

    @cached_property
    def backwards(self) -> dict[tuple[int | None, int | None], Action]:
        """(stage, microbatch) -> its backward, the first pass of a split one."""
        actions = self.plan.program_actions
        return {(a.stage, a.microbatch): a for a in actions if a.kind in BACKWARDS}
