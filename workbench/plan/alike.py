"""Replicas of a plan that are equal but for names: what is derived for one of them holds for the others."""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import NamedTuple, TypeVar

from workbench.plan.boundaries import Boundaries
from workbench.plan.instance_cache import cached_on_instance, set_cached
from workbench.plan.lru_cache import Identity, LruCache, value_key
from workbench.plan.paths import num_senders
from workbench.plan.plan import Microbatch, Plan, Program
from workbench.plan.rank_placement import relative_placement
from workbench.plan.routing import routing_of
from workbench.plan.stage import Stage
from workbench.plan.work import sample_kinds

MOST_REPLICAS = 500_000  # in all cached component lists together
Thing = TypeVar("Thing", bound=Hashable)
ModuleReplica = tuple[str, int]  # a module and one of its replicas
Owners = tuple[int, int, int, tuple[int, ...]]  # microbatch, row, tokens per block, owner of each block


class Component(NamedTuple):
    """A connected set of module replicas: those that have samples or ranks in common.

    Equal components have equal entries at equal positions.

    Args:
        replicas: (module, replica), in the plan's order.
        stages: ids, in the plan's order.
        ranks: ascending.
        samples: in the order in which the component's microbatches first use them.
        programs: of its ranks, in the plan's order.
    """

    replicas: tuple[ModuleReplica, ...]
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    samples: tuple[int, ...]
    programs: tuple[Program, ...]


_COMPONENTS: LruCache[tuple[Component, ...]] = LruCache(MOST_REPLICAS, lambda entries: len(entries) + 1)
_ALIKE: LruCache[tuple[tuple[Component, ...], ...]] = LruCache(
    MOST_REPLICAS, lambda sets: sum(map(len, sets)) + 1
)
_SENDERS: LruCache[tuple[int, ...]] = LruCache(2_000_000, lambda entries: len(entries) + 1)


@cached_on_instance
def alike_replicas(plan: Plan) -> tuple[tuple[Component, ...], ...]:
    """Return sets of equal components, each in ascending order, the sets in the order of their first members.

    Two components are equal if stages, ranks, samples, programs and token owners of one become those of the
    other when each name is replaced by its position, and stages and ranks keep their order, which breaks
    ties. No two components share ranks or samples, so no row leaves a component; its rows, their order and
    its memory follow from these alone. Every rank holds a part of one size of sharded weights. Where all
    modules have equally many replicas, a component is one replica of each, or several of each where samples
    pass between them; otherwise it is the replicas that feed each other. The result is empty where a program
    spans two components, or where there are no two. Links and devices are compared only as far as they decide
    how many ranks send what crosses an edge.

    Complexity: O(items + actions + ranks + blocks of token shards).
    """
    return _ALIKE.get_or(_component_key(plan), lambda: _equal_sets(plan, components(plan)))


def alike_together(plan: Plan, links: Iterable[Sequence[int]]) -> tuple[tuple[Component, ...], ...]:
    """As `alike_replicas`, with linked components merged into one.

    Args:
        plan: any plan.
        links: sets of indices into `components(plan)`; components that share a set are merged.
    """
    parts = components(plan)
    groups = {index: [index] for index in range(len(parts))}
    for linked in links:
        for index in linked[1:]:
            _join(groups, linked[0], index)
    distinct = {id(group): group for group in groups.values()}.values()
    if len(distinct) < 2:
        return ()
    joined = [[replica for index in group for replica in parts[index].replicas] for group in distinct]
    return _equal_sets(plan, _build_components(plan, joined) or ())


@cached_on_instance
def components(plan: Plan) -> tuple[Component, ...]:
    """Split the plan's module replicas by common samples or ranks; empty where they cannot be separated."""
    is_brokered = plan.settings.boundaries is Boundaries.BROKERS  # rows pass through ranks of others
    if is_brokered or max(map(len, _replicas_of(plan).values())) < 2:
        return ()
    return _COMPONENTS.get_or(
        _component_key(plan), lambda: _build_components(plan, _linked_replicas(plan)) or ()
    )


@cached_on_instance
def _component_key(plan: Plan) -> tuple[Hashable, ...]:
    """Key of everything that components and their shapes follow from."""
    by_identity = map(Identity, (plan.model, plan.batch, plan.programs, plan.cluster))
    by_value = map(value_key, (plan.stages, plan.microbatches, plan.token_shards))
    return (*by_identity, *by_value, plan.settings.boundaries)


def _replicas_of(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {module.name: plan.replicas(module.name) for module in plan.model.modules}


def _linked_replicas(plan: Plan) -> list[list[ModuleReplica]]:
    """Group replicas with a common sample or rank, by first member; the smaller set joins the larger."""
    group_of: dict[ModuleReplica, list[ModuleReplica]] = {member: [member] for member in plan.chain}
    if len(set(_replicas_of(plan).values())) == 1:
        first_in: dict[int, ModuleReplica] = {}  # by replica
        for member in plan.chain:
            _join(group_of, first_in.setdefault(member[1], member), member)
    first_on: dict[int, ModuleReplica] = {}  # by rank
    for module, replica, rows in dict.fromkeys([(s.module, s.replica, s.ranks) for s in plan.stages]):
        for rank in chain.from_iterable(rows):
            _join(group_of, first_on.setdefault(rank, (module, replica)), (module, replica))
    first_with: dict[int, ModuleReplica] = {}  # by sample
    for microbatch in plan.microbatches:
        member = microbatch.module, microbatch.replica
        if member not in group_of:
            continue  # no stage has it; `_build_components` reports it
        for sample in {sample for sample, _ in chain.from_iterable(microbatch.rows)}:
            _join(group_of, first_with.setdefault(sample, member), member)
    return list({id(group): group for group in group_of.values()}.values())


def _join(group_of: dict[Thing, list[Thing]], one: Thing, other: Thing) -> None:
    """Merge the groups of two things; the smaller one joins the larger."""
    first, second = group_of[one], group_of[other]
    if first is not second:
        larger, smaller = (first, second) if len(first) >= len(second) else (second, first)
        larger += smaller
        group_of.update(dict.fromkeys(smaller, larger))


def _equal_sets(plan: Plan, parts: Sequence[Component]) -> tuple[tuple[Component, ...], ...]:
    if len(parts) < 2:
        return ()
    kinds = sample_kinds(plan.batch)
    samples_of = [tuple([kinds[sample] for sample in component.samples]) for component in parts]
    num_alike = Counter(
        samples_of
    )  # the others need no shape to be told apart: no component has their samples
    sets: dict[object, list[Component]] = {}
    for component, samples in zip(parts, samples_of, strict=True):
        shape = samples, _shape(plan, component) if num_alike[samples] > 1 else None
        sets.setdefault(shape, []).append(component)
    return tuple(map(tuple, sets.values()))


@cached_on_instance
def first_of_all(plan: Plan) -> Plan:
    """Return the plan reduced to its first component if all others equal it; otherwise the plan itself."""
    sets = alike_replicas(plan)
    return part_of(plan, sets[0][0].replicas) if len(sets) == 1 and len(sets[0]) > 1 else plan


def firsts_of(plan: Plan, sets: Iterable[Sequence[Component]]) -> Plan:
    """Return the plan reduced to the first component of each set, with its equal sets already cached."""
    replicas = {replica for first, *_ in sets for replica in first.replicas}
    part = part_of(plan, replicas)
    remaining = (
        tuple(component for component in equals if component.replicas[0] in replicas)
        for equals in alike_replicas(plan)
    )
    alike = tuple(equals for equals in remaining if equals)
    if sum(map(len, alike)) > 1:
        set_cached(part, alike_replicas, alike)
    return part


def with_copied(draft: Plan, programs: tuple[Program, ...]) -> Plan:
    """Return the draft with programs; equal components get copies of the first one's, so they stay equal.

    Complexity: O(ranks).
    """
    plan = replace(draft, programs=programs)
    ((*originals,),) = alike_replicas(draft)
    index_of = {rank: index for index, component in enumerate(originals) for rank in component.ranks}
    programs_of: list[list[Program]] = [[] for _ in originals]
    for program in programs:
        programs_of[index_of[program.ranks[0]]].append(program)
    copied = tuple(
        component._replace(programs=tuple(own_programs))
        for component, own_programs in zip(originals, programs_of, strict=True)
    )
    set_cached(plan, components, copied)
    sets: tuple[tuple[Component, ...], ...] = (copied,)
    set_cached(plan, alike_replicas, sets)
    return plan


def part_of(plan: Plan, replicas: Collection[ModuleReplica]) -> Plan:
    """Return the plan restricted to these module replicas."""
    stages = tuple(stage for stage in plan.stages if (stage.module, stage.replica) in replicas)
    ranks = {rank for stage in stages for rank in stage.flat_ranks}
    return replace(
        plan,
        stages=stages,
        microbatches=tuple(m for m in plan.microbatches if (m.module, m.replica) in replicas),
        programs=tuple(program for program in plan.programs if ranks.issuperset(program.ranks)),
        token_shards=tuple(shard for shard in plan.token_shards if (shard.module, shard.replica) in replicas),
    )


def _build_components(
    plan: Plan, groups: Sequence[Collection[ModuleReplica]]
) -> tuple[Component, ...] | None:
    """Return a component per group, by first stage; None where a program or owner crosses groups."""
    group_of = {member: number for number, group in enumerate(groups) for member in group}
    stages: list[list[Stage]] = [[] for _ in groups]
    samples: list[dict[int, None]] = [{} for _ in groups]
    programs: list[list[Program]] = [[] for _ in groups]
    for stage in plan.stages:
        stages[group_of[stage.module, stage.replica]].append(stage)
    for microbatch in plan.microbatches:
        number = group_of.get((microbatch.module, microbatch.replica))
        if number is None:
            return None
        samples[number].update(dict.fromkeys([sample for row in microbatch.rows for sample, _ in row]))
    if not group_of.keys() >= _token_owners(plan).keys():
        return None
    ranks = [{rank for stage in group_stages for rank in stage.flat_ranks} for group_stages in stages]
    of_stage = {stage.id: number for number, group_stages in enumerate(stages) for stage in group_stages}
    for program in plan.programs:
        used = {stage for stage, _, _ in program.actions}
        groups_used = {of_stage.get(stage) for stage in used if stage is not None}
        number = next(iter(groups_used), None)
        if number is None or len(groups_used) > 1 or not ranks[number].issuperset(program.ranks):
            return None
        programs[number].append(program)
    replica_position = {member: position for position, member in enumerate(plan.chain)}
    stage_position = {stage.id: position for position, stage in enumerate(plan.stages)}
    parts = [
        Component(
            tuple(sorted(group, key=replica_position.__getitem__)),
            tuple(stage.id for stage in group_stages),
            tuple(sorted(own_ranks)),
            tuple(own_samples),
            tuple(own_programs),
        )
        for group, group_stages, own_ranks, own_samples, own_programs in zip(
            groups, stages, ranks, samples, programs, strict=True
        )
    ]
    return tuple(sorted(parts, key=lambda component: stage_position[component.stages[0]]))


@cached_on_instance
def _token_owners(plan: Plan) -> dict[ModuleReplica, tuple[Owners, ...]]:
    """Token shards of each module replica that has some, in the plan's order."""
    owners_of: dict[ModuleReplica, list[Owners]] = {}
    for shard in plan.token_shards:
        owners = shard.microbatch, shard.row, shard.block_tokens, shard.owners
        owners_of.setdefault((shard.module, shard.replica), []).append(owners)
    return {member: tuple(owners) for member, owners in owners_of.items()}


def _shape(plan: Plan, component: Component) -> object:
    """Everything that must be equal but kinds of samples: contents by position instead of name."""
    stage_at: dict[int | None, int] = {s: position for position, s in enumerate(sorted(component.stages))}
    stage_at[None] = -1  # of STEP
    rank_at = {rank: position for position, rank in enumerate(component.ranks)}
    sample_at = {sample: position for position, sample in enumerate(component.samples)}
    by_module: dict[str, list[int]] = {}
    for module, replica in component.replicas:
        by_module.setdefault(module, []).append(replica)
    ordered = [(module, replica) for module, replicas in by_module.items() for replica in sorted(replicas)]
    replica_at = {
        (module, replica): position
        for module, replicas in by_module.items()
        for position, replica in enumerate(sorted(replicas))
    }
    stages = tuple([_stage_shape(plan.stage[s], stage_at, rank_at, replica_at) for s in component.stages])
    placement = relative_placement(plan.cluster, component.ranks)
    senders_key = Identity(plan.model), Identity(plan.cluster), stages, placement
    return (
        stages,
        tuple([_items_shape(plan.microbatches_of.get(member, ()), sample_at) for member in ordered]),
        tuple([_token_owners(plan).get(member, ()) for member in ordered]),
        tuple(_program_shape(program, stage_at, rank_at) for program in component.programs),
        _SENDERS.get_or(senders_key, lambda: tuple(_num_senders(plan, component))),
    )


def _num_senders(plan: Plan, component: Component) -> Iterator[int]:
    """Yield how many ranks send from each share of an edge to each index across it."""
    routing = routing_of(plan)
    for edge in plan.model.edges:
        sources = [replica for module, replica in component.replicas if module == edge.source]
        targets = [replica for module, replica in component.replicas if module == edge.target]
        produced = [routing.boundary_stage(edge.source, replica, edge.after_layer) for replica in sources]
        readers = [stage for replica in targets for stage in routing.reading_stages(edge, replica)]
        for producer, consumer in product(produced, readers):
            for sender, receiver in ((producer, consumer), (consumer, producer)):
                for from_share, to_share in product(
                    range(sender.num_shares), (None, *range(receiver.num_shares))
                ):
                    yield num_senders(plan.cluster, sender, receiver, from_share, to_share)


def _stage_shape(
    stage: Stage,
    stage_at: Mapping[int | None, int],
    rank_at: Mapping[int, int],
    replica_at: Mapping[ModuleReplica, int],
) -> object:
    grid = tuple(tuple(rank_at[rank] for rank in row) for row in stage.ranks)
    replica = replica_at[stage.module, stage.replica]
    return stage_at[stage.id], stage.module, replica, stage.layers, grid, stage.ep, stage.joint_replicas


def _program_shape(
    program: Program, stage_at: Mapping[int | None, int], rank_at: Mapping[int, int]
) -> object:
    ranks = tuple(rank_at[rank] for rank in program.ranks)
    stages, *others = zip(*program.actions, strict=True) if program.actions else ((),)
    return ranks, tuple([stage_at[stage] for stage in stages]), *others


def _items_shape(microbatches: Sequence[Microbatch], sample_at: Mapping[int, int]) -> object:
    """Return the items of microbatches in flat columns, and where each microbatch and row ends."""
    items = [item for microbatch in microbatches for row in microbatch.rows for item in row]
    samples, *numbers = zip(*items, strict=True) if items else ((),)
    lengths = tuple([(microbatch.index, *map(len, microbatch.rows)) for microbatch in microbatches])
    return lengths, tuple([sample_at[sample] for sample in samples]), *numbers
