"""Equal replicas folded into one: what is simulated for one holds for all."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from workbench.cost.hardware import Cluster
from workbench.data.sample import Item, Sample
from workbench.plan.alike import (
    Component,
    alike_replicas,
    alike_together,
    components,
    first_of_all,
    firsts_of,
)
from workbench.plan.gradient_groups import gradient_groups, num_replicas, reduction_order
from workbench.plan.instance_cache import cached_on_instance, set_cached
from workbench.plan.lowered import GradientGroup
from workbench.plan.lru_cache import Identity, LruCache, value_key
from workbench.plan.optimizer_shards import check_instances
from workbench.plan.parameter_shards import shard_units
from workbench.plan.plan import Microbatch, Plan, Program, Settings
from workbench.plan.rank_placement import by_port, node_kinds, relative_placement
from workbench.plan.shard_unit import RankGroups, ShardUnit
from workbench.plan.stage import Stage
from workbench.schedule.action import CLOSING, STEP, Action, with_stages
from workbench.schedule.reductions import with_reductions

_EQUAL_PLACES: LruCache[bool] = LruCache(1024)
_EQUAL_BATCHES: LruCache[bool] = LruCache(64)
_RESTRICTED: LruCache[tuple[ShardUnit, ...]] = LruCache(1_000_000, lambda units: len(units) + 1)
PlacementOf = Callable[[Cluster, tuple[int, ...]], tuple[object, ...]]  # placement of each of the ranks


@cached_on_instance
def checked_part(plan: Plan) -> Plan:
    """Return the first component of each set of equal ones: where it breaks no rule, neither do the others.

    Gradient groups of the part hold the ranks of all. Components are equal as in `alike_replicas`, and on
    equal nodes; so rows, their order, bytes and errors of one are those of its equals but for names, and the
    first has the lowest ranks. Times may differ, since they depend on links. Replicas that shard weights wait
    for each other at every gather, so there a component is one replica of every module, and all must be
    equal. The plan itself is returned where no two are equal, or where ranks share CPU cores, and with them
    memory.

    Complexity: O(items + actions + ranks).
    """
    if _shared_ports(plan) is None:
        return plan
    return _first_components(plan, _equally_placed(plan, alike_replicas(plan), node_kinds))


@cached_on_instance
def judged_part(plan: Plan) -> Plan:
    """As `checked_part`, for components of equal placement; those that share a port count as one.

    Each takes part in its collectives as often as in the whole plan. So passes and messages of one begin and
    end when those of its equals do, and times in the part are those of the whole plan, to the last bit.

    Complexity: O(items + actions + ranks).
    """
    ports = _shared_ports(plan)
    if ports is None:
        return plan
    sets = alike_together(plan, ports) if ports else alike_replicas(plan)
    return _first_components(plan, _equally_placed(plan, sets, relative_placement))


def _first_components(plan: Plan, sets: Sequence[Sequence[Component]]) -> Plan:
    """Return the first component of each set; the plan itself if no set has two, or gathers differ."""
    units = shard_units(plan)
    if all(len(alike) == 1 for alike in sets) or (units and not _are_gathers_alike(plan, units, sets)):
        return plan
    part = first_of_all(plan)
    if len(sets) > 1 or len(part.stages) != len(sets[0][0].stages):
        part = firsts_of(plan, sets)
    if units:
        set_cached(part, shard_units, _restricted_units(part, units))
    return _with_cached_groups(part, gradient_groups(plan), num_replicas(plan))


def _are_gathers_alike(plan: Plan, units: Iterable[ShardUnit], sets: Sequence[Sequence[Component]]) -> bool:
    """Whether sharded weights of equal replicas are gathered in equal times, by all of them at once."""
    if len(sets) > 1 or len(sets[0][0].replicas) > len(plan.model.modules):
        return False
    holders_of: dict[tuple[str, tuple[int, int]], set[RankGroups]] = {}
    for unit in units:
        stage = plan.stage[unit.stages[0]]
        holders_of.setdefault((stage.module, stage.layers), set()).add((*unit.holders, *unit.expert_holders))
    return all(
        len({relative_placement(plan.cluster, tuple(chain(*groups))) for groups in of_layers}) == 1
        for of_layers in set(map(frozenset, holders_of.values()))  # most layers are on the same ranks
    )


def _restricted_units(part: Plan, units: tuple[ShardUnit, ...]) -> tuple[ShardUnit, ...]:
    """Return the shard units restricted to a part's stages, over the ranks of the whole plan."""

    def derive() -> tuple[ShardUnit, ...]:
        own = part.stage.keys()
        stages_of = ((unit, tuple([stage for stage in unit.stages if stage in own])) for unit in units)
        return tuple(replace(unit, stages=stages) for unit, stages in stages_of if stages)

    return _RESTRICTED.get_or((Identity(units), value_key(part.stages)), derive)


def _with_cached_groups(part: Plan, groups: tuple[GradientGroup, ...], replicas: dict[str, int]) -> Plan:
    set_cached(part, gradient_groups, groups)
    set_cached(part, num_replicas, replicas)
    return part


def _equally_placed(
    plan: Plan, sets: Iterable[Sequence[Component]], placement_of: PlacementOf
) -> list[list[Component]]:
    """Split each set by placement; empty where a group's first component has not the lowest ranks."""
    groups: dict[tuple[object, ...], list[Component]] = {}
    for set_index, alike in enumerate(sets):
        for component in alike:
            key = set_index, placement_of(plan.cluster, component.ranks)
            group = groups.setdefault(key, [component])
            if component is not group[0]:
                if any(rank >= other for rank, other in zip(group[0].ranks, component.ranks, strict=True)):
                    return []
                group.append(component)
    return list(groups.values())


@cached_on_instance
def _shared_ports(plan: Plan) -> list[tuple[int, ...]] | None:
    """Return the sets of the plan's components that share a port, as `by_port` does."""
    return by_port(plan.cluster, [component.ranks for component in components(plan)])


@dataclass(frozen=True, kw_only=True)
class Folded:
    """A plan of equal replicas that is not written out: the plan of the first, and the batches of all.

    Replica d is on the ranks of the first plus d x `stride`. No `slots`: derived plans are cached.

    Args:
        one: a plan of the first replica alone, on the whole cluster, with programs; its ranks are 0, 1, ...
        batches: samples of every replica, equal in size position by position; the first are the plan's.
        settings: of the whole plan, which may shard optimizer states among more ranks than one replica has.

    Raises:
        ValueError: replicas of unequal batches, sharded parameters, token shards, or more ranks than the
            cluster has.
    """

    one: Plan
    batches: tuple[tuple[Sample, ...], ...]
    settings: Settings

    def __post_init__(self) -> None:
        if not self.batches or self.batches[0] != self.one.batch or not equal_batches(self.batches):
            raise ValueError("folded replicas: want equal batches, the first that of the plan")
        if any(settings.shards_parameters for settings in self.settings.modules):
            raise ValueError("folded replicas: want each to have its weights whole, got sharded parameters")
        if self.one.token_shards:
            raise ValueError("folded replicas: want tokens without owners of their own, got token shards")
        if self.one.ranks != tuple(range(self.stride)) or set(self._numbers) != {(0,)}:
            raise ValueError(f"folded replicas: want replica 0 on ranks 0..{self.stride - 1}, without gaps")
        if self.num_replicas * self.stride > self.one.cluster.num_ranks:
            raise ValueError(
                f"{self.num_replicas} replicas of {self.stride} ranks: cluster {self.one.cluster.name!r} has "
                f"{self.one.cluster.num_ranks}"
            )

    @property
    def _numbers(self) -> list[tuple[int, ...]]:
        return [self.one.replicas(module.name) for module in self.one.model.modules]

    @property
    def num_replicas(self) -> int:
        return len(self.batches)

    @cached_property
    def stride(self) -> int:
        """Number of ranks of a replica."""
        return len(self.one.ranks)

    @cached_property
    def judged(self) -> Plan:
        """`judged_part` of the whole plan, not built where replicas have equal placement and no common port.

        Raises:
            ValueError: a number of optimizer instances that does not divide the ranks.

        Complexity: O(actions + groups x replicas).
        """
        if not self._lies_alike:
            return judged_part(self.whole)
        part = self._reducing
        check_instances(part, gradient_groups(part))
        return part

    @property
    def checked(self) -> Plan:
        """`checked_part` of the whole plan, likewise."""
        return self.judged if self._lies_alike else checked_part(self.whole)

    @cached_property
    def whole(self) -> Plan:
        """The plan of all replicas, written out."""
        replicas = range(self.num_replicas)
        first = self._reducing
        return replace(
            first,
            batch=tuple(sorted((s for batch in self.batches for s in batch), key=lambda sample: sample.id)),
            stages=tuple(self._stage(stage, replica) for replica in replicas for stage in first.stages),
            microbatches=tuple(
                self._microbatch(microbatch, replica)
                for module in first.model.modules
                for replica in replicas
                for microbatch in first.microbatches_of.get((module.name, 0), ())
            ),
            programs=tuple(
                self._program(program, replica) for replica in replicas for program in first.programs
            ),
        )

    @cached_property
    def _reducing(self) -> Plan:
        """The plan of the first replica, which reduces gradients with the others."""
        groups = tuple(replace(group, ranks=self._all(group.ranks)) for group in gradient_groups(self.one))
        counts = dict.fromkeys(num_replicas(self.one), self.num_replicas)
        first = replace(self.one, settings=self.settings)
        order = reduction_order(_with_cached_groups(first, groups, counts))
        stages_of = {program.ranks: _stage_ids(self.one, program) for program in self.one.programs}
        passes = {stages_of[program.ranks]: _without_reductions(program) for program in self.one.programs}
        orders = with_reductions(passes, order)
        programs = tuple(
            Program(ranks=ranks, actions=(*orders[stages], STEP)) for ranks, stages in stages_of.items()
        )
        return _with_cached_groups(replace(first, programs=programs), groups, counts)

    def _all(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return the corresponding ranks of every replica."""
        if ranks not in self._all_ranks:
            stride = self.stride
            self._all_ranks[ranks] = tuple(
                sorted(r + d * stride for d in range(self.num_replicas) for r in ranks)
            )
        return self._all_ranks[ranks]

    @cached_property
    def _all_ranks(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        return {}  # by ranks of one replica: most groups of layers share them; filled on use

    @cached_property
    def _lies_alike(self) -> bool:
        """Whether all replicas have equal placement, and none sends through a port of another."""
        cluster, size = self.one.cluster, self.stride
        replicas = [range(d * size, (d + 1) * size) for d in range(self.num_replicas)]
        return _EQUAL_PLACES.get_or(
            (Identity(cluster), size, self.num_replicas),
            lambda: (
                by_port(cluster, replicas) == []
                and len({relative_placement(cluster, tuple(ranks)) for ranks in replicas}) == 1
            ),
        )

    def _stage(self, stage: Stage, replica: int) -> Stage:
        ranks = tuple(tuple(rank + replica * self.stride for rank in row) for row in stage.ranks)
        return replace(stage, id=stage.id + replica * len(self.one.stages), replica=replica, ranks=ranks)

    def _microbatch(self, microbatch: Microbatch, replica: int) -> Microbatch:
        new_id = {
            sample.id: other.id for sample, other in zip(self.batches[0], self.batches[replica], strict=True)
        }
        rows = tuple(tuple(Item(new_id[item.sample], item.k) for item in row) for row in microbatch.rows)
        return replace(microbatch, replica=replica, rows=rows)

    def _program(self, program: Program, replica: int) -> Program:
        first = replica * len(self.one.stages)
        actions = with_stages(program.actions, lambda stage: None if stage is None else stage + first)
        return Program(ranks=tuple(rank + replica * self.stride for rank in program.ranks), actions=actions)


def equal_batches(batches: Sequence[Sequence[Sample]]) -> bool:
    """Whether samples at equal positions have equal sizes. O(samples), cached for the same batches."""
    return _EQUAL_BATCHES.get_or(Identity(batches), lambda: len(set(map(_sizes, batches))) == 1)


def _sizes(batch: Sequence[Sample]) -> tuple[object, ...]:
    return tuple((sample.segments, sample.mask) for sample in batch)


def _stage_ids(plan: Plan, program: Program) -> tuple[int, ...]:
    return tuple(stage.id for stage in plan.stages_on[program.ranks[0]])


def _without_reductions(program: Program) -> tuple[Action, ...]:
    return tuple(action for action in program.actions if action.kind not in CLOSING)
