"""Stages whose weights are sharded among their replicas and gathered for use (FSDP, HSDP)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from workbench.plan.instance_cache import cached_on_instance
from workbench.plan.lru_cache import Identity, LruCache, value_key
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage
from workbench.schedule.action import COMPUTE, FSDP, ROUND, Action, Order, Pass, by_stage

_IN_ROUNDS = frozenset((*COMPUTE, *ROUND))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardUnit:
    """What is gathered at once: stages of all replicas of an instance that hold the same layers.

    Args:
        stages: one per replica.
        ranks: of all stages, ascending; each keeps one shard of every weight.
        trained: elements of each tensor whose gradient is reduce-scattered: the stage's own trained weights
            as one flat tensor, then each tied one.
        frozen: likewise for frozen weights.
    """

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    trained: tuple[int, ...]
    frozen: tuple[int, ...]

    @property
    def gathered(self) -> tuple[int, ...]:
        """Elements of each tensor that a round gathers."""
        return (*self.trained, *self.frozen)

    def part(self, num_elements: int) -> int:
        """Return how many elements of such a tensor one rank keeps, padding included."""
        return -(-num_elements // len(self.ranks))

    def padded(self, num_elements: int) -> int:
        """Return the elements of such a tensor while it is gathered, padding included."""
        return self.part(num_elements) * len(self.ranks)


_UNITS: LruCache[tuple[ShardUnit, ...]] = LruCache(
    1_000_000, lambda units: sum(len(u.ranks) for u in units) + 1
)


class _Contents(NamedTuple):
    """Element counts of a range of layers, as in `ShardUnit`, and the names of its tied weights."""

    trained: tuple[int, ...]
    frozen: tuple[int, ...]
    tied: tuple[str, ...]


_Layers = tuple[str, tuple[int, int]]  # of a module
_CONTENTS: LruCache[dict[_Layers, _Contents]] = LruCache(16)  # of models; filled on use
_SPLIT_STAGES: LruCache[tuple[Stage, ...]] = LruCache(1_000_000, len)


def _shards_any(plan: Plan) -> bool:
    return any(settings.shards_parameters for settings in plan.settings.modules)


def is_sharded(plan: Plan, stage: Stage) -> bool:
    """Whether the stage's ranks keep only shards of its weights."""
    return plan.settings.of(stage.module).shards_parameters


@cached_on_instance
def shard_units(plan: Plan) -> tuple[ShardUnit, ...]:
    """Return the shard units of a plan, in the order of its stages. Programs are ignored.

    An instance is consecutive replicas that hold every weight once between them. Instances may be cut unlike
    each other, so they reduce their shards of gradients layer by layer.

    Source: Rajbhandari et al. 2020, "ZeRO", section 5.3 (stage 3); Zhao et al. 2023, "PyTorch FSDP",
    sections 3.2.1 (flat parameters) and 3.2.2 (hybrid sharding).

    Raises:
        ValueError: replicas of an instance that are cut unlike each other, stages of tensor- or
            expert-parallel ranks, one rank that has nobody to share with, instances of unequal sizes, or
            several of them with stages of several layers.

    Complexity: O(stages + parameters).
    """
    if not _shards_any(plan):
        return ()
    key = Identity(plan.model), value_key(plan.stages), plan.settings.shardings
    return _UNITS.get_or(key, lambda: _units(plan))


def _units(plan: Plan) -> tuple[ShardUnit, ...]:
    stages_of: dict[tuple[str, int, tuple[int, int]], list[Stage]] = {}
    instances: dict[str, dict[int, int]] = {}
    sound: set[tuple[object, ...]] = set()
    for stage in plan.stages:
        if is_sharded(plan, stage):
            if stage.module not in instances:
                instances[stage.module] = _instances(plan, stage.module)
            shape = stage.module, stage.ranks, stage.ep, stage.layers[1] - stage.layers[0]
            if shape not in sound:
                _check_stage(plan, stage)
                sound.add(shape)
            key = stage.module, instances[stage.module][stage.replica], stage.layers
            stages_of.setdefault(key, []).append(stage)
    for (module, instance, layers), stages in stages_of.items():
        replicas = [replica for replica, number in instances[module].items() if number == instance]
        if len(stages) != len(replicas):
            raise ValueError(
                f"module {module!r} shards its weights, so all {len(replicas)} replicas of an instance "
                f"are cut alike; layers [{layers[0]}, {layers[1]}) are a stage in {len(stages)} of them"
            )
    contents = _CONTENTS.get_or(Identity(plan.model), dict)
    ranks_of: dict[tuple[object, ...], tuple[int, ...]] = {}  # by grids: most layers share them
    units = []
    for stages in stages_of.values():
        grids = tuple([stage.ranks for stage in stages])
        if grids not in ranks_of:
            ranks_of[grids] = _unit_ranks(stages)
        layers_key = stages[0].module, stages[0].layers
        if layers_key not in contents:
            contents[layers_key] = _contents(plan, stages[0])
        trained, frozen, _ = contents[layers_key]
        ids = tuple([stage.id for stage in stages])
        units.append(ShardUnit(stages=ids, ranks=ranks_of[grids], trained=trained, frozen=frozen))
    _check_equal_sizes(plan, units)
    _check_ties(plan, units, contents)
    return tuple(units)


def _instances(plan: Plan, module: str) -> dict[int, int]:
    """Map each replica to the instance that it is part of."""
    replicas, num_instances = sorted(plan.replicas(module)), plan.settings.of(module).instances
    if len(replicas) % num_instances:
        valid = [count for count in range(1, len(replicas) + 1) if len(replicas) % count == 0]
        nearest = min(valid, key=lambda count: (abs(count - num_instances), count))
        raise ValueError(
            f"module {module!r}: instances of sharded weights must divide its {len(replicas)} replicas, "
            f"got {num_instances}; nearest: {nearest}"
        )
    return {replica: index * num_instances // len(replicas) for index, replica in enumerate(replicas)}


def sharded_stages(plan: Plan) -> dict[int, ShardUnit]:
    """Map each sharded stage to its unit."""
    return {stage: unit for unit in shard_units(plan) for stage in unit.stages}


def unit_of(units: Mapping[int, ShardUnit], action: Action) -> ShardUnit:
    """Return the unit that a round's action is about; ValueError if its stage has none."""
    if action.stage is None or action.stage not in units:
        raise ValueError(f"action {action}: the weights of stage {action.stage} are not sharded")
    return units[action.stage]


def in_units(draft: Plan) -> Plan:
    """Return the draft with every layer of a sharded module as a stage of its own, on the same ranks.

    So ranks gather layer by layer. Stages are renumbered in their order.
    """
    if not _shards_any(draft) and [stage.id for stage in draft.stages] == list(range(len(draft.stages))):
        return draft
    sharded = tuple(settings.module for settings in draft.settings.modules if settings.shards_parameters)
    key = value_key(draft.stages), sharded
    return replace(draft, stages=_SPLIT_STAGES.get_or(key, lambda: _split_by_layer(draft.stages, sharded)))


def _split_by_layer(stages: tuple[Stage, ...], sharded: tuple[str, ...]) -> tuple[Stage, ...]:
    split: list[Stage] = []
    for stage in stages:
        first, last = stage.layers
        cuts = [(i, i + 1) for i in range(first, last)] if stage.module in sharded else [stage.layers]
        split += [stage.holding(layers, number) for number, layers in enumerate(cuts, len(split))]
    return tuple(split)


def _check_stage(plan: Plan, stage: Stage) -> None:
    settings, where = plan.settings.of(stage.module), f"stage {stage.id} of {stage.module!r}"
    for name, degree in (("tp", stage.tp), ("ep", stage.ep)):
        if degree > 1:
            raise ValueError(
                f"{where}: parameters are sharded among data- and context-parallel ranks, want {name} 1, "
                f"got {degree}; nearest: sharding 'optimizer'"
            )
    if stage.num_shares * len(plan.replicas(stage.module)) == settings.instances:
        raise ValueError(
            f"{where}: parameters are sharded among the ranks that hold the same layers, and one rank "
            "holds them alone; nearest: sharding 'none'"
        )
    if settings.instances > 1 and stage.layers[1] - stage.layers[0] > 1:
        raise ValueError(
            f"{where}: its {settings.instances} instances add up gradients layer by layer, want one layer a "
            f"stage, got [{stage.layers[0]}, {stage.layers[1]})"
        )


def _unit_ranks(stages: Iterable[Stage]) -> tuple[int, ...]:
    """Return all ranks of a stage's replicas, ascending."""
    ranks = sorted(rank for stage in stages for rank in stage.flat_ranks)
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"stages {[stage.id for stage in stages]}: replicas of sharded weights share a rank")
    return tuple(ranks)


def _contents(plan: Plan, stage: Stage) -> _Contents:
    num_elements = {True: 0, False: 0}
    tied: dict[bool, dict[str, int]] = {True: {}, False: {}}
    layers = plan.model.module(stage.module).layers[slice(*stage.layers)]
    for layer in layers:
        shared = {name for _, name in layer.tied}
        for parameter in layer.parameters():
            if parameter.name in shared:
                tied[layer.trainable][parameter.name] = parameter.num_elements
            else:
                num_elements[layer.trainable] += parameter.num_elements
    trained, frozen = (
        tuple(size for size in (num_elements[is_trained], *tied[is_trained].values()) if size)
        for is_trained in (True, False)
    )
    return _Contents(trained, frozen, tuple(sorted({name for layer in layers for _, name in layer.tied})))


def _check_equal_sizes(plan: Plan, units: Iterable[ShardUnit]) -> None:
    """Check that the i-th shard of a weight is the same in every instance."""
    sizes: dict[str, int] = {}
    for unit in units:
        module = plan.stage[unit.stages[0]].module
        size = sizes.setdefault(module, len(unit.ranks))
        if len(unit.ranks) != size:
            raise ValueError(
                f"module {module!r}: stages {list(unit.stages)} shard their weights among "
                f"{len(unit.ranks)} ranks, others among {size}; want one number"
            )


def _check_ties(plan: Plan, units: Iterable[ShardUnit], contents: Mapping[_Layers, _Contents]) -> None:
    """Check that holders of a tied weight share all ranks or none, so that a rank has one shard of it."""
    holders: dict[tuple[str, str], list[tuple[int, ShardUnit]]] = {}
    for unit in units:
        stage = plan.stage[unit.stages[0]]
        for name in contents[stage.module, stage.layers].tied:
            others = holders.setdefault((stage.module, name), [])
            for other, first in others:
                if first.ranks != unit.ranks and set(first.ranks) & set(unit.ranks):
                    raise ValueError(
                        f"module {stage.module!r} shards its weights, but {name!r} is tied between "
                        f"stages {other} and {stage.id}, which have some of their ranks in common; want all "
                        "or none; nearest: sharding 'optimizer'"
                    )
            others.append((stage.id, unit))


def check_rounds(plan: Plan, units: tuple[ShardUnit, ...], twins: Mapping[int, int]) -> None:
    """Raise ValueError where programs of sharded stages do not gather, free and reduce as they must.

    The rounds of every stage are ALL_GATHER n, passes, FREE n, and REDUCE_SCATTER n after a backward that
    trains; all stages of a unit have the same rounds. `waits_of` says what waits for what.

    Args:
        plan: with programs.
        units: its shard units.
        twins: stage -> another one with the same rounds; of a unit, one of them is checked.
    """
    rounds_of: dict[tuple[Order, bool], Order] = {}  # most layers are alike
    ranks_of: dict[tuple[tuple[int, ...], ...], list[int]] = {}  # one rank per program, by grid
    for unit in units:
        expected: Order | None = None
        distinct: dict[int, int] = {}
        for stage in unit.stages:
            distinct.setdefault(twins.get(stage, stage), stage)
        for stage in distinct.values():
            grid = plan.stage[stage].ranks
            if grid not in ranks_of:
                first: dict[int, int] = {}  # ranks of one program break the same rules
                for rank in plan.stage[stage].flat_ranks:
                    first.setdefault(id(plan.program.get(rank)), rank)
                ranks_of[grid] = [*first.values()]
            for rank in ranks_of[grid]:
                key = _by_stage(plan, rank).get(stage, ()), bool(unit.trained)
                if key not in rounds_of:
                    rounds_of[key] = tuple(_rounds(rank, stage, *key))
                if expected is not None and rounds_of[key] != expected:
                    raise ValueError(
                        f"stages {unit.stages[0]} and {stage} shard their weights but differ in their "
                        f"rounds: {_spell(unit.stages[0], expected)} and "
                        f"{_spell(unit.stages[0], rounds_of[key])}"
                    )
                expected = rounds_of[key]


def _spell(stage: int, order: Order) -> str:
    return " ".join(str(Action(stage, *entry)) for entry in order)


def _rounds(rank: int, stage: int, order: Order, is_trained: bool) -> Iterator[tuple[Pass, int | None]]:  # noqa: FBT001  (part of a cache key)
    """Yield the collectives of a stage's rounds, in order."""
    state = _RoundState()
    for kind, number in order:
        if kind in _IN_ROUNDS:
            state.do(rank, Action(stage, kind, number), is_trained=is_trained)
        if kind in FSDP:
            yield kind, number
    if state.is_whole or state.owes:
        kind = Pass.FREE if state.is_whole else Pass.REDUCE_SCATTER
        raise ValueError(f"rank {rank}: {Action(stage, kind, state.number)} is missing from the program")


@cached_on_instance
def _by_stage(plan: Plan, rank: int) -> Mapping[int | None, Order]:
    return by_stage(plan.program.get(rank, ()))


@dataclass(slots=True)
class _RoundState:
    """A stage's state in its program: current round, weights gathered or not, gradients to reduce or not."""

    number: int = -1
    is_whole: bool = False
    owes: bool = False

    def do(self, rank: int, action: Action, *, is_trained: bool) -> None:
        rule = {
            Pass.ALL_GATHER: self._gather,
            Pass.FREE: self._free,
            Pass.REDUCE_SCATTER: self._scatter,
        }.get(action.kind, self._use)(action, is_trained=is_trained)
        if rule is not None:
            raise ValueError(
                f"rank {rank}: action {action} of a stage whose weights are sharded: want {rule}"
            )

    def _gather(self, action: Action, *, is_trained: bool) -> str | None:
        if self.is_whole or self.owes or action.microbatch != self.number + 1:
            return f"round {self.number + 1} here, behind all of the one before"
        self.number, self.is_whole = self.number + 1, True
        return None

    def _free(self, action: Action, *, is_trained: bool) -> str | None:
        if not self.is_whole or action.microbatch != self.number:
            return "it once, behind the ALL_GATHER of its round"
        self.is_whole = False
        return None

    def _scatter(self, action: Action, *, is_trained: bool) -> str | None:
        if self.is_whole or action.microbatch != self.number or not is_trained:
            return "it behind the FREE of its round, where weights train"
        self.owes = False
        return None

    def _use(self, action: Action, *, is_trained: bool) -> str | None:
        if not self.is_whole or action.kind in (Pass.I, Pass.W):
            return "F or B, between ALL_GATHER and FREE"
        self.owes = self.owes or (action.kind is Pass.B and is_trained)
        return None
