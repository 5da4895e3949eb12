"""Parts of a plan that are equal but for names: what is derived of one of them holds for the others."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from workbench.on_demand import OnDemand
from workbench.plan.instance_cache import cached_on_instance, set_cached
from workbench.plan.lru_cache import Identity, LruCache, value_key
from workbench.plan.paths import num_senders
from workbench.plan.plan import Boundaries, Plan, Program, Stage
from workbench.plan.rank_placement import relative_placement
from workbench.plan.routing import routing_of
from workbench.plan.work import sample_kinds
from workbench.schedule.action import Action

MOST_REPLICAS = 500_000  # of all plans whose components are remembered
nx = OnDemand("networkx")
Place = tuple[str, int]  # a module and one of its replicas
Owners = tuple[int, int, int, tuple[int, ...]]  # microbatch, row, tokens of a block, owner of each


class Component(NamedTuple):
    """Replicas of modules that have samples or ranks in common; equal ones have equal parts at equal places.

    Args:
        replicas: of which modules, in the plan's order.
        stages: their ids, in the plan's order.
        ranks: ascending.
        samples: in the order in which its microbatches come to them.
        programs: of its ranks, in the plan's order.
    """

    replicas: tuple[Place, ...]
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    samples: tuple[int, ...]
    programs: tuple[Program, ...]

    def actions_as(self, other: "Component") -> dict[Action, Action]:
        """From every action of this component's programs to that of an equal one."""
        pairs = zip(self.programs, other.programs, strict=True)
        return {a: b for mine, theirs in pairs for a, b in zip(mine.actions, theirs.actions, strict=True)}


_COMPONENTS: LruCache[tuple[Component, ...]] = LruCache(MOST_REPLICAS, lambda found: len(found) + 1)
_ALIKE: LruCache[tuple[tuple[Component, ...], ...]] = LruCache(
    MOST_REPLICAS, lambda sets: sum(map(len, sets)) + 1
)
_SENDERS: LruCache[tuple[int, ...]] = LruCache(2_000_000, lambda found: len(found) + 1)


@cached_on_instance
def alike_replicas(plan: Plan) -> tuple[tuple[Component, ...], ...]:
    """Sets of equal components, each in ascending order, the sets in that of their first ones.

    Equal means: stages, ranks, samples, programs and owners of tokens of one become those of the other when
    each is named by its place, and stages and ranks keep their order, by which ties are broken. No two
    components share ranks or samples, so no row leaves a component, and its rows, their order and its memory
    follow from these alone; of sharded weights every rank has a part of one size. Where every module has as
    many replicas, a component is one of each, or several of each where samples go from one to another; where
    some have more, as many as feed each other. Empty where a program spans two of them, or there are no two.
    Links and devices are not compared, but for what links decide: how many ranks send what crosses an edge.

    Complexity: O(items + actions + ranks + blocks of token shards).
    """
    return _ALIKE.get_or(_decided_by(plan), lambda: _sets(plan, components(plan)))


def alike_together(plan: Plan, links: Iterable[Sequence[int]]) -> tuple[tuple[Component, ...], ...]:
    """As `alike_replicas`, with components that are linked, by places in `components(plan)`, as one."""
    found = components(plan)
    graph = nx.Graph()
    graph.add_nodes_from(range(len(found)))
    for together in links:
        nx.add_path(graph, together)
    joined = [
        [replica for one in sorted(each) for replica in found[one].replicas]
        for each in nx.connected_components(graph)
    ]
    return _sets(plan, _made(plan, joined) or ())


@cached_on_instance
def components(plan: Plan) -> tuple[Component, ...]:
    """Replicas of modules by who has samples or ranks in common; empty where they are not told apart."""
    is_brokered = plan.settings.boundaries is Boundaries.BROKERS  # a row passes another replica's rank
    if is_brokered or max(map(len, _numbers(plan).values())) < 2:
        return ()
    return _COMPONENTS.get_or(_decided_by(plan), lambda: _made(plan, _linked(plan)) or ())


@cached_on_instance
def _decided_by(plan: Plan) -> tuple[Hashable, ...]:
    """All that components and their shapes follow from."""
    same = map(Identity, (plan.model, plan.batch, plan.programs, plan.cluster))
    equal = map(value_key, (plan.stages, plan.microbatches, plan.token_shards))
    return (*same, *equal, plan.settings.boundaries)


def _numbers(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {module.name: plan.replicas(module.name) for module in plan.model.modules}


def _linked(plan: Plan) -> list[list[Place]]:
    """Sets of replicas, each as its first one is found: a set is moved into the larger of two that meet."""
    group_of: dict[Place, list[Place]] = {place: [place] for place in plan.chain}
    first_of: dict[tuple[str, int], Place] = {}

    def link(what: tuple[str, int], place: Place) -> None:
        if place not in group_of:
            return  # no stage has it, which `_made` tells
        one, other = group_of[first_of.setdefault(what, place)], group_of[place]
        if one is not other:
            larger, smaller = (one, other) if len(one) >= len(other) else (other, one)
            larger += smaller
            group_of.update(dict.fromkeys(smaller, larger))

    numbers = _numbers(plan)
    if len(set(numbers.values())) == 1:
        for module, replica in plan.chain:
            link(("replica", replica), (module, replica))
    for stage in plan.stages:
        for rank in stage.flat_ranks:
            link(("rank", rank), (stage.module, stage.replica))
    for microbatch in plan.microbatches:
        place = microbatch.module, microbatch.replica
        for sample in {item.sample for item in microbatch.items}:
            link(("sample", sample), place)
    return list({id(group): group for group in group_of.values()}.values())


def _sets(plan: Plan, found: Sequence[Component]) -> tuple[tuple[Component, ...], ...]:
    sets: dict[object, list[Component]] = {}
    for component in found if len(found) > 1 else ():
        sets.setdefault(_shape(plan, component), []).append(component)
    return tuple(map(tuple, sets.values())) if sum(map(len, sets.values())) > 1 else ()


@cached_on_instance
def first_of_all(plan: Plan) -> Plan:
    """The plan with its first component alone, where all others equal it; else the plan itself."""
    sets = alike_replicas(plan)
    return part_of(plan, sets[0][0].replicas) if len(sets) == 1 and len(sets[0]) > 1 else plan


def firsts_of(plan: Plan, sets: Iterable[Sequence[Component]]) -> Plan:
    """The plan with the first component of each set alone; what is alike in it is known of the plan."""
    replicas = {replica for first, *_ in sets for replica in first.replicas}
    part = part_of(plan, replicas)
    left = (tuple(one for one in each if one.replicas[0] in replicas) for each in alike_replicas(plan))
    alike = tuple(each for each in left if each)
    if sum(map(len, alike)) > 1:
        set_cached(part, alike_replicas, alike)
    return part


def with_copied(draft: Plan, programs: tuple[Program, ...]) -> Plan:
    """The draft with programs, those of each of its equal components copied from the first: they stay equal.

    Complexity: O(ranks).
    """
    plan = replace(draft, programs=programs)
    ((*found,),) = alike_replicas(draft)
    number = {rank: at for at, component in enumerate(found) for rank in component.ranks}
    of_each: list[list[Program]] = [[] for _ in found]
    for program in programs:
        of_each[number[program.ranks[0]]].append(program)
    copied = tuple(
        component._replace(programs=tuple(held)) for component, held in zip(found, of_each, strict=True)
    )
    set_cached(plan, components, copied)
    sets: tuple[tuple[Component, ...], ...] = (copied,)
    set_cached(plan, alike_replicas, sets)
    return plan


def part_of(plan: Plan, replicas: Collection[Place]) -> Plan:
    """The plan with these replicas of modules alone."""
    stages = tuple(stage for stage in plan.stages if (stage.module, stage.replica) in replicas)
    ranks = {rank for stage in stages for rank in stage.flat_ranks}
    return replace(
        plan,
        stages=stages,
        microbatches=tuple(m for m in plan.microbatches if (m.module, m.replica) in replicas),
        programs=tuple(program for program in plan.programs if ranks.issuperset(program.ranks)),
        token_shards=tuple(each for each in plan.token_shards if (each.module, each.replica) in replicas),
    )


def _made(plan: Plan, groups: Sequence[Collection[Place]]) -> tuple[Component, ...] | None:
    """Each with its stages, ranks, samples and programs, by their first stages; None where two share one."""
    of_place = {place: number for number, group in enumerate(groups) for place in group}
    stages: list[list[Stage]] = [[] for _ in groups]
    samples: list[dict[int, None]] = [{} for _ in groups]
    programs: list[list[Program]] = [[] for _ in groups]
    for stage in plan.stages:
        stages[of_place[stage.module, stage.replica]].append(stage)
    for microbatch in plan.microbatches:
        number = of_place.get((microbatch.module, microbatch.replica))
        if number is None:
            return None
        samples[number].update((item.sample, None) for item in microbatch.items)
    if not of_place.keys() >= _owners(plan).keys():
        return None
    ranks = [{rank for stage in held for rank in stage.flat_ranks} for held in stages]
    of_stage = {stage.id: number for number, held in enumerate(stages) for stage in held}
    for program in plan.programs:
        of = {of_stage.get(action.stage) for action in program.actions if action.stage is not None}
        number = next(iter(of), None)
        if number is None or len(of) > 1 or not ranks[number].issuperset(program.ranks):
            return None
        programs[number].append(program)
    place_at = {place: at for at, place in enumerate(plan.chain)}
    first_at = {stage.id: at for at, stage in enumerate(plan.stages)}
    found = [
        Component(
            tuple(sorted(group, key=place_at.__getitem__)),
            tuple(stage.id for stage in held),
            tuple(sorted(own_ranks)),
            tuple(own_samples),
            tuple(own_programs),
        )
        for group, held, own_ranks, own_samples, own_programs in zip(
            groups, stages, ranks, samples, programs, strict=True
        )
    ]
    return tuple(sorted(found, key=lambda component: first_at[component.stages[0]]))


@cached_on_instance
def _owners(plan: Plan) -> dict[Place, tuple[Owners, ...]]:
    """Token shards of each replica of a module that has some, in the plan's order."""
    found: dict[Place, list[Owners]] = {}
    for each in plan.token_shards:
        owners = each.microbatch, each.row, each.block_tokens, each.owners
        found.setdefault((each.module, each.replica), []).append(owners)
    return {place: tuple(owners) for place, owners in found.items()}


def _shape(plan: Plan, component: Component) -> object:
    """What must be equal: everything of the component by places instead of names."""
    stage_at: dict[int | None, int] = {s: place for place, s in enumerate(sorted(component.stages))}
    stage_at[None] = -1  # of STEP
    rank_at = {rank: place for place, rank in enumerate(component.ranks)}
    sample_at = {sample: place for place, sample in enumerate(component.samples)}
    kinds = sample_kinds(plan.batch)
    of_module: dict[str, list[int]] = {}
    for module, replica in component.replicas:
        of_module.setdefault(module, []).append(replica)
    in_order = [(module, replica) for module, held in of_module.items() for replica in sorted(held)]
    replica_at = {
        (module, replica): at for module, held in of_module.items() for at, replica in enumerate(sorted(held))
    }
    stages = tuple([_stage_shape(plan.stage[s], stage_at, rank_at, replica_at) for s in component.stages])
    placement = relative_placement(plan.cluster, component.ranks)
    senders_key = Identity(plan.model), Identity(plan.cluster), stages, placement
    return (
        stages,
        tuple([kinds[sample] for sample in component.samples]),
        tuple(
            tuple(
                (m.index, tuple([tuple([(sample_at[sample], k) for sample, k in row]) for row in m.rows]))
                for m in plan.microbatches_of.get(place, ())
            )
            for place in in_order
        ),
        tuple([_owners(plan).get(place, ()) for place in in_order]),
        tuple(_program_shape(program, stage_at, rank_at) for program in component.programs),
        _SENDERS.get_or(senders_key, lambda: tuple(_num_senders(plan, component))),
    )


def _num_senders(plan: Plan, component: Component) -> Iterator[int]:
    """Of whatever may cross an edge between two places, one way and the other."""
    routing = routing_of(plan)
    for edge in plan.model.edges:
        sources = [number for module, number in component.replicas if module == edge.source]
        targets = [number for module, number in component.replicas if module == edge.target]
        produced = [routing.boundary_stage(edge.source, number, edge.after_layer) for number in sources]
        read = [stage for number in targets for stage in routing.reading_stages(edge, number)]
        for producer, consumer in product(produced, read):
            for here, there in ((producer, consumer), (consumer, producer)):
                for from_place, to_place in product(range(here.cp), (None, *range(there.cp))):
                    yield num_senders(plan.cluster, here, there, from_place, to_place)


def _stage_shape(
    stage: Stage,
    stage_at: Mapping[int | None, int],
    rank_at: Mapping[int, int],
    replica_at: Mapping[Place, int],
) -> object:
    grid = tuple(tuple(rank_at[rank] for rank in row) for row in stage.ranks)
    number = replica_at[stage.module, stage.replica]
    return stage_at[stage.id], stage.module, number, stage.layers, grid, stage.ep


def _program_shape(
    program: Program, stage_at: Mapping[int | None, int], rank_at: Mapping[int, int]
) -> object:
    ranks = tuple(rank_at[rank] for rank in program.ranks)
    return ranks, tuple([(stage_at[stage], kind, number) for stage, kind, number in program.actions])
