"""Random lowered plans for the simulator: any DAG of stages, any ranks, times full of ties."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tests.plans import chain_module
from workbench.cost.hardware import Cluster, Link, Node
from workbench.data.sample import Sample, Segment
from workbench.model.model_graph import ModelGraph
from workbench.plan.lowered import Direction, GradientGroup, Lowered, Route, Transfer, Weights
from workbench.plan.plan import Plan, Program
from workbench.plan.stage import Stage
from workbench.schedule.action import STEP, Action, Pass

MODEL = ModelGraph(name="any", modules=(chain_module("m", "text", [True]),))


@dataclass
class Draft:
    """A random plan under construction."""

    rng: Random
    cluster: Cluster
    stages: list[Stage] = field(default_factory=list)
    num_microbatches: list[int] = field(default_factory=list)
    rows: list[Transfer] = field(default_factory=list)
    families: list[tuple[int, ...]] = field(default_factory=list)  # replicas: stages with one gradient


def random_lowered(seed: int, *, cores: bool = False, scrambled: bool = False) -> Lowered:
    """A plan that a simulator can run; `scrambled` swaps actions, so that many deadlock.

    Stages get 1 to 3 ranks out of few, so that they share some; microbatches depend on
    random ones of every stage before; rows go rank to rank or leader to group; replicas
    all-reduce. A random total order of the actions gives every rank its program.
    """
    rng = Random(seed)
    draft = Draft(rng, random_cluster(rng, cores=cores))
    for index in range(rng.randint(1, 5)):
        _add_stage(draft, index)
    order = _total_order(draft)
    reductions, groups = _reductions(draft)
    programs = _programs(draft, order, reductions, scrambled=scrambled)
    plan = Plan(
        strategy="random",
        model=MODEL,
        cluster=draft.cluster,
        batch=(Sample(0, (Segment("text", 0, 1, 1),)),),
        stages=tuple(draft.stages),
        microbatches=(),
        programs=programs,
    )
    return _lowered(plan, draft, groups, reductions)


def random_cluster(rng: Random, *, cores: bool) -> Cluster:
    def link(name: str) -> Link:
        return Link(
            name=name, bytes_per_s=rng.choice([1, 2, 7.0, 8]), latency_s=rng.choice([0, 0, 0.5, 0.1, 1])
        )

    num_ranks = rng.randint(1, 3)
    num_cores = rng.randint(1, num_ranks) if cores else None
    node = Node(device="any", num_ranks=num_ranks, memory_bytes=1, num_cores=num_cores)
    return Cluster(name="any", nodes=(node,) * rng.randint(1, 3), intra=link("intra"), inter=link("inter"))


def random_durations(seed: int) -> Callable[[Action], float]:
    """Few values, so that many things happen at one instant; now and then an odd one."""

    def duration_s(action: Action) -> float:
        rng = Random(f"{seed} {action}")
        return rng.choice([0.0, 0.5, 0.5, 1.0, 1.0, 1.0, 1.5, 2.0, rng.random()])

    return duration_s


def _add_stage(draft: Draft, index: int) -> None:
    rng = draft.rng
    num_ranks = draft.cluster.num_ranks
    size = min(rng.choice([1, 1, 1, 2, 3]), num_ranks)
    ranks = tuple(sorted(rng.sample(range(num_ranks), size)))
    draft.stages.append(Stage(id=index, module="m", replica=index, layers=(0, 1), ranks=(ranks,)))
    draft.num_microbatches.append(rng.randint(1, 5))
    producers = [s for s in range(index) if rng.random() < 0.6]
    for producer in producers:
        gradient = rng.random() < 0.7
        for microbatch in range(draft.num_microbatches[index]):
            available = draft.num_microbatches[producer]
            for source in rng.sample(range(available), rng.randint(1, min(2, available))):
                _connect(draft, (producer, source), (index, microbatch), gradient=gradient)


def _connect(draft: Draft, source: tuple[int, int], target: tuple[int, int], *, gradient: bool) -> None:
    producer, consumer = draft.stages[source[0]].flat_ranks, draft.stages[target[0]].flat_ranks
    pairwise = len(producer) == len(consumer) and draft.rng.random() < 0.5
    forward = Action(source[0], Pass.F, source[1]), Action(target[0], Pass.F, target[1])
    backward = Action(target[0], Pass.B, target[1]), Action(source[0], Pass.B, source[1])
    _add_rows(draft, Direction.FORWARD, forward, (producer, consumer), pairwise=pairwise)
    if gradient:
        _add_rows(draft, Direction.BACKWARD, backward, (consumer, producer), pairwise=pairwise)


def _add_rows(
    draft: Draft,
    direction: Direction,
    actions: tuple[Action, Action],
    ranks: tuple[tuple[int, ...], tuple[int, ...]],
    *,
    pairwise: bool,
) -> None:
    num_bytes = draft.rng.choice([0, 1, 1, 2, 4, 5])

    def add(source: int, destinations: tuple[int, ...], route: Route, after: int | None = None) -> None:
        draft.rows.append(
            Transfer(
                row=len(draft.rows),
                edge="m>m",
                direction=direction,
                route=route,
                producer=actions[0],
                consumer=actions[1],
                source_rank=source,
                destination_ranks=destinations,
                slices=(),
                num_tokens=1,
                width=1,
                num_bytes=num_bytes,
                after=after,
            )
        )

    sources, destinations = ranks
    if pairwise:
        for source, destination in zip(sources, destinations, strict=True):
            add(source, (destination,), Route.LOCAL if source == destination else Route.P2P)
        return
    leader, *others = destinations
    if leader in sources:
        add(leader, (leader,), Route.LOCAL)
    else:
        add(sources[0], (leader,), Route.P2P)
    if others:
        add(leader, tuple(others), Route.BROADCAST, after=len(draft.rows) - 1)


def _total_order(draft: Draft) -> list[Action]:
    """All passes in a random order that respects the rows, forwards before their backward."""
    backward = {row.consumer for row in draft.rows if row.direction is Direction.BACKWARD}
    backward |= {row.producer for row in draft.rows if row.direction is Direction.BACKWARD}
    needs: dict[Action, set[Action]] = {}
    for stage, num_microbatches in enumerate(draft.num_microbatches):
        for microbatch in range(num_microbatches):
            forward, back = Action(stage, Pass.F, microbatch), Action(stage, Pass.B, microbatch)
            needs[forward] = set()
            if back in backward or draft.rng.random() < 0.5:
                needs[back] = {forward}
    for row in draft.rows:
        needs[row.consumer].add(row.producer)
    done: list[Action] = []
    while len(done) < len(needs):
        ready = [action for action in needs if action not in done and needs[action] <= set(done)]
        done.append(draft.rng.choice(ready))
    return done


def _reductions(draft: Draft) -> tuple[dict[Action, tuple[int, ...]], tuple[GradientGroup, ...]]:
    """Families of stages with disjoint ranks share gradients; others reduce alone or not at all."""
    rng = draft.rng
    reductions: dict[Action, list[int]] = {}
    groups: list[GradientGroup] = []
    free = list(range(len(draft.stages)))
    while free:
        first = free.pop(0)
        family = [first]
        if rng.random() < 0.3:
            continue
        for other in list(free):
            taken = {rank for stage in family for rank in draft.stages[stage].flat_ranks}
            if not taken & set(draft.stages[other].flat_ranks) and rng.random() < 0.7:
                family.append(other)
                free.remove(other)
        draft.families.append(tuple(family))
        ranks = sorted(rank for stage in family for rank in draft.stages[stage].flat_ranks)
        for _ in range(rng.randint(1, 3) if len(ranks) > 1 else 0):
            members = tuple(sorted(rng.sample(ranks, rng.randint(2, len(ranks)))))
            index = len(groups)
            groups.append(_group(index, members, rng.choice([1, 2, 4])))
            for stage in family:
                if set(members) & set(draft.stages[stage].flat_ranks):
                    reductions.setdefault(Action(stage, Pass.REDUCE_GRAD), []).append(index)
    return {action: tuple(indices) for action, indices in reductions.items()}, tuple(groups)


def _group(index: int, ranks: tuple[int, ...], num_elements: int) -> GradientGroup:
    weights = (Weights("m", index),)
    return GradientGroup(index=index, ranks=ranks, weights=weights, num_elements=num_elements)


def _programs(
    draft: Draft, order: list[Action], reductions: dict[Action, tuple[int, ...]], *, scrambled: bool
) -> tuple[Program, ...]:
    """Each rank's part of the order; a family's reductions stand after all passes of earlier families."""
    rng = draft.rng
    order = list(order)
    position = 0
    for family in draft.families:
        last = [max(i for i, action in enumerate(order) if action.stage == stage) for stage in family]
        position = rng.randint(max(position, *(index + 1 for index in last)), len(order))
        order[position:position] = [Action(stage, Pass.REDUCE_GRAD) for stage in family]
        position += len(family)
    if scrambled:
        for _ in range(2):
            a, b = rng.randrange(len(order)), rng.randrange(len(order))
            order[a], order[b] = order[b], order[a]
    step = (STEP,) if rng.random() < 0.8 else ()
    by_actions: dict[tuple[Action, ...], list[int]] = {}
    for rank in range(draft.cluster.num_ranks):
        held = {stage.id for stage in draft.stages if rank in stage.flat_ranks}
        if held:
            actions = tuple(action for action in order if action.stage in held)
            if scrambled and rng.random() < 0.3 and len(actions) > 1:
                a = rng.randrange(len(actions) - 1)
                actions = (*actions[:a], actions[a + 1], actions[a], *actions[a + 2 :])
            by_actions.setdefault(actions + step, []).append(rank)
    return tuple(Program(ranks=tuple(ranks), actions=actions) for actions, ranks in by_actions.items())


def _lowered(
    plan: Plan,
    draft: Draft,
    groups: tuple[GradientGroup, ...],
    reductions: dict[Action, tuple[int, ...]],
) -> Lowered:
    inputs: dict[Action, list[int]] = {}
    outputs: dict[Action, list[int]] = {}
    for row in draft.rows:
        inputs.setdefault(row.consumer, []).append(row.row)
        outputs.setdefault(row.producer, []).append(row.row)
    return Lowered(
        plan=plan,
        transfers=tuple(draft.rows),
        inputs={action: tuple(rows) for action, rows in inputs.items()},
        outputs={action: tuple(rows) for action, rows in outputs.items()},
        groups=groups,
        reductions=reductions,
    )
