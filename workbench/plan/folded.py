"""Equal replicas folded into one: what is judged of one holds for all, and its sums are those of all."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

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
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.optimizer_shards import check_instances
from workbench.plan.parameter_shards import ShardUnit, shard_units
from workbench.plan.plan import Microbatch, Plan, Program, Settings, Sharding, Stage
from workbench.plan.rank_placement import by_port, node_kinds, relative_placement
from workbench.schedule.action import CLOSING, STEP, Action
from workbench.schedule.reductions import with_reductions

_EQUAL_PLACES: LruCache[bool] = LruCache(1024)
_EQUAL_BATCHES: LruCache[bool] = LruCache(64)
PlacementOf = Callable[[Cluster, tuple[int, ...]], tuple[object, ...]]  # of a component's ranks, by place


@cached_on_instance
def checked_part(plan: Plan) -> Plan:
    """The plan with the first of each set of equal components, in which all others break no other rule.

    Its gradient groups hold the ranks of all. Components are equal as `alike_replicas` says, on equal nodes.
    So rows, their order, bytes and refusals of one are those of its equals but for names, and the first has
    the lowest ranks; times are not, which ask for links. Replicas that shard weights wait for each other at
    every gather, so there each is one of every module, and all have to be equal. The plan itself where no
    two are, or where ranks share cores, and with them memory.

    Complexity: O(items + actions + ranks).
    """
    if _ports(plan) is None:
        return plan
    return _firsts(plan, _placed_alike(plan, alike_replicas(plan), node_kinds))


@cached_on_instance
def judged_part(plan: Plan) -> Plan:
    """As `checked_part`, of components that lie alike besides; those that send by one port count as one.

    Each takes part in its collectives as often as in the whole. So passes and messages of one begin and end
    when those of its equals do, and times of what is left are those of the whole plan, to the last bit.

    Complexity: O(items + actions + ranks).
    """
    ports = _ports(plan)
    if ports is None:
        return plan
    sets = alike_together(plan, ports) if ports else alike_replicas(plan)
    return _firsts(plan, _placed_alike(plan, sets, relative_placement))


def _firsts(plan: Plan, sets: Sequence[Sequence[Component]]) -> Plan:
    """The plan with the first of each set; itself where none has two, or their gathers are unlike."""
    units = shard_units(plan)
    if all(len(alike) == 1 for alike in sets) or (units and not _gather_alike(plan, units, sets)):
        return plan
    part = first_of_all(plan)
    if len(sets) > 1 or len(part.stages) != len(sets[0][0].stages):
        part = firsts_of(plan, sets)
    if units:
        set_cached(part, shard_units, _units_in(part, units))
    return _stands_for(part, gradient_groups(plan), num_replicas(plan))


def _gather_alike(plan: Plan, units: Iterable[ShardUnit], sets: Sequence[Sequence[Component]]) -> bool:
    """Whether the sharded weights of equal replicas are gathered in equal times, by all of them at once."""
    if len(sets) > 1 or len(sets[0][0].replicas) > len(plan.model.modules):
        return False
    ranks_of: dict[tuple[str, tuple[int, int]], set[tuple[int, ...]]] = {}
    for unit in units:
        stage = plan.stage[unit.stages[0]]
        ranks_of.setdefault((stage.module, stage.layers), set()).add(unit.ranks)
    return all(
        len({relative_placement(plan.cluster, ranks) for ranks in held}) == 1 for held in ranks_of.values()
    )


def _units_in(part: Plan, units: Iterable[ShardUnit]) -> tuple[ShardUnit, ...]:
    """The units of a part's stages, over the ranks of the whole."""
    held = ((unit, tuple(stage for stage in unit.stages if stage in part.stage)) for unit in units)
    return tuple(replace(unit, stages=stages) for unit, stages in held if stages)


def _stands_for(part: Plan, groups: tuple[GradientGroup, ...], replicas: dict[str, int]) -> Plan:
    set_cached(part, gradient_groups, groups)
    set_cached(part, num_replicas, replicas)
    return part


def _placed_alike(plan: Plan, sets: Iterable[Sequence[Component]], by: PlacementOf) -> list[list[Component]]:
    """Those of each set that also lie alike, behind a first one with lower ranks; none where one has not."""
    found: dict[tuple[object, ...], list[Component]] = {}
    for number, alike in enumerate(sets):
        for component in alike:
            place = number, by(plan.cluster, component.ranks)
            held = found.setdefault(place, [component])
            if component is not held[0]:
                if any(own >= other for own, other in zip(held[0].ranks, component.ranks, strict=True)):
                    return []
                held.append(component)
    return list(found.values())


@cached_on_instance
def _ports(plan: Plan) -> list[tuple[int, ...]] | None:
    """As `by_port`, of the plan's components."""
    return by_port(plan.cluster, [component.ranks for component in components(plan)])


@dataclass(frozen=True, kw_only=True)
class Folded:
    """A plan of equal replicas that is not written out: the plan of the first one, and who the others are.

    The d-th is d x (ranks of one) ranks further on. No `slots`: what it stands for is cached.

    Args:
        one: the whole cluster's plan of the first replica alone, with programs; its ranks are 0, 1, ...
        batches: samples of every replica, in equal places of equal sizes; the first are the plan's.
        settings: those of the whole, which may shard optimizer states among more ranks than one replica has.

    Raises:
        ValueError: replicas of unequal batches, weights that replicas share in parts, tokens that
            somebody owns, or more ranks than the cluster has.
    """

    one: Plan
    batches: tuple[tuple[Sample, ...], ...]
    settings: Settings

    def __post_init__(self) -> None:
        if not self.batches or self.batches[0] != self.one.batch or not equal_batches(self.batches):
            raise ValueError("folded replicas: want equal batches, the first that of the plan")
        if any(each.sharding is Sharding.PARAMETERS for each in self.settings.modules):
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
        """Ranks of a replica."""
        return len(self.one.ranks)

    @cached_property
    def judged(self) -> Plan:
        """As `judged_part` of the whole, without making that where replicas lie alike and share no port.

        Raises:
            ValueError: numbers of optimizer instances that do not divide the ranks.

        Complexity: O(actions + groups x replicas).
        """
        if not self._lies_alike:
            return judged_part(self.whole)
        part = self._reducing
        check_instances(part, gradient_groups(part))
        return part

    @property
    def checked(self) -> Plan:
        """As `checked_part` of the whole, likewise."""
        return self.judged if self._lies_alike else checked_part(self.whole)

    @cached_property
    def whole(self) -> Plan:
        """The plan of all replicas, as who builds it at once does."""
        copies = range(self.num_replicas)
        one = self._reducing
        return replace(
            one,
            batch=tuple(sorted((s for batch in self.batches for s in batch), key=lambda sample: sample.id)),
            stages=tuple(self._stage(stage, d) for d in copies for stage in one.stages),
            microbatches=tuple(
                self._microbatch(microbatch, d)
                for module in one.model.modules
                for d in copies
                for microbatch in one.microbatches_of.get((module.name, 0), ())
            ),
            programs=tuple(self._program(program, d) for d in copies for program in one.programs),
        )

    @cached_property
    def _reducing(self) -> Plan:
        """The first replica, which adds up gradients with the others."""
        groups = tuple(replace(group, ranks=self._all(group.ranks)) for group in gradient_groups(self.one))
        counts = dict.fromkeys(num_replicas(self.one), self.num_replicas)
        one = replace(self.one, settings=self.settings)
        order = reduction_order(_stands_for(one, groups, counts))
        stages_of = {program.ranks: _stages(self.one, program) for program in self.one.programs}
        passes = {stages_of[program.ranks]: _without_sums(program) for program in self.one.programs}
        orders = with_reductions(passes, order)
        programs = tuple(Program(ranks=ranks, actions=(*orders[of], STEP)) for ranks, of in stages_of.items())
        return _stands_for(replace(one, programs=programs), groups, counts)

    def _all(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """These of every replica."""
        if ranks not in self._known:
            stride = self.stride
            self._known[ranks] = tuple(
                sorted(r + d * stride for d in range(self.num_replicas) for r in ranks)
            )
        return self._known[ranks]

    @cached_property
    def _known(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        return {}  # by ranks of one replica, as groups of its layers mostly have the same; filled on use

    @cached_property
    def _lies_alike(self) -> bool:
        """Whether each replica lies as the first, and none sends by a port of another."""
        cluster, size = self.one.cluster, self.stride
        replicas = [range(d * size, (d + 1) * size) for d in range(self.num_replicas)]
        return _EQUAL_PLACES.get_or(
            (Identity(cluster), size, self.num_replicas),
            lambda: (
                by_port(cluster, replicas) == []
                and len({relative_placement(cluster, tuple(ranks)) for ranks in replicas}) == 1
            ),
        )

    def _stage(self, stage: Stage, d: int) -> Stage:
        ranks = tuple(tuple(rank + d * self.stride for rank in row) for row in stage.ranks)
        return replace(stage, id=stage.id + d * len(self.one.stages), replica=d, ranks=ranks)

    def _microbatch(self, microbatch: Microbatch, d: int) -> Microbatch:
        name = {own.id: other.id for own, other in zip(self.batches[0], self.batches[d], strict=True)}
        rows = tuple(tuple(Item(name[item.sample], item.k) for item in row) for row in microbatch.rows)
        return replace(microbatch, replica=d, rows=rows)

    def _program(self, program: Program, d: int) -> Program:
        first = d * len(self.one.stages)
        actions = tuple(a if a.stage is None else a._replace(stage=a.stage + first) for a in program.actions)
        return Program(ranks=tuple(rank + d * self.stride for rank in program.ranks), actions=actions)


def equal_batches(batches: Sequence[Sequence[Sample]]) -> bool:
    """Whether samples in equal places have equal sizes. O(samples), once for the same batches."""
    return _EQUAL_BATCHES.get_or(Identity(batches), lambda: len(set(map(_sizes, batches))) == 1)


def _sizes(batch: Sequence[Sample]) -> tuple[object, ...]:
    return tuple((sample.segments, sample.mask) for sample in batch)


def _stages(plan: Plan, program: Program) -> tuple[int, ...]:
    return tuple(stage.id for stage in plan.stages_on[program.ranks[0]])


def _without_sums(program: Program) -> tuple[Action, ...]:
    return tuple(action for action in program.actions if action.kind not in CLOSING)
