"""Builds a plan out of answers: stages and microbatches in, programs out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from workbench.data.sample import Sample
from workbench.plan.check import check
from workbench.plan.gradient_groups import reduction_order
from workbench.plan.plan import Microbatch, Plan, Program, Stage
from workbench.plan.routing import Routing
from workbench.schedule.action import STEP, Action, Pass
from workbench.schedule.choice import Schedule
from workbench.schedule.graph_aware import Consumer, ScheduleNode
from workbench.schedule.programs import one_unit, programs_of


def with_programs(
    draft: Plan,
    schedule: Schedule | None = None,
    duration: Callable[[Action], float] = one_unit,
) -> Plan:
    """The plan with programs for its stages and microbatches, checked.

    Without a schedule, graph-aware 1F1B: stages on the same ranks run in lockstep, in forward
    order. REDUCE_GRAD follows the stage's last pass, STEP ends every program.

    Args:
        schedule: see `programs_of`.
        duration: time of a pass in any one unit, for the kinds that choose between orders by it.

    Raises:
        ValueError: what `check` refuses, or stages whose ranks overlap without being equal.
    """
    groups = _rank_groups(draft)
    chains = [tuple(stage.id for stage in chain) for chain in draft.chain.values()]
    orders = programs_of(
        schedule_nodes(draft), list(groups.values()), schedule or Schedule(), chains, duration
    )
    reduced = reduction_order(draft)
    programs = tuple(
        Program(ranks=ranks, actions=(*_with_reductions(orders[group], group, reduced), STEP))
        for ranks, group in groups.items()
    )
    plan = replace(draft, programs=programs)
    check(plan)
    return plan


def schedule_nodes(plan: Plan) -> tuple[ScheduleNode, ...]:
    """What the scheduler needs to know of every stage: microbatches, backwards, consumers."""
    routing = Routing(plan)
    consumers = _consumers(routing)
    nodes = []
    for stage in plan.stages:
        microbatches = plan.microbatches_of.get((stage.module, stage.replica), ())
        nodes.append(
            ScheduleNode(
                stage=stage.id,
                num_microbatches=len(microbatches),
                backward=tuple(routing.has_backward(stage, m) for m in microbatches),
                consumers=tuple(consumers.get(stage.id, ())),
                weights=tuple(routing.trains(stage, m) for m in microbatches),
            )
        )
    return tuple(nodes)


def _consumers(routing: Routing) -> dict[int, list[Consumer]]:
    plan = routing.plan
    found: dict[int, list[Consumer]] = {}
    for (module, replica), chain in plan.chain.items():
        indices = range(len(plan.microbatches_of.get((module, replica), ())))
        needs = tuple((index,) for index in indices)
        for producer, consumer in pairwise(chain):
            found.setdefault(producer.id, []).append(Consumer(consumer.id, needs))
    for edge in plan.model.edges:
        for replica in plan.replicas(edge.target):
            consumer = routing.boundary_stage(edge.target, replica, edge.before_layer)
            reads: dict[int, list[tuple[int, ...]]] = {}
            producers = {
                source: routing.boundary_stage(edge.source, source, edge.after_layer).id
                for source in plan.replicas(edge.source)
            }
            targets = plan.microbatches_of.get((edge.target, replica), ())
            for position, target in enumerate(targets):
                for item in routing.wanted(edge, target):
                    holding = routing.holding(edge, item, consumer)
                    needs_of = reads.setdefault(producers[holding.replica], [()] * len(targets))
                    if holding.microbatch not in needs_of[position]:
                        needs_of[position] += (holding.microbatch,)
            for producer_id, needs_list in reads.items():
                found.setdefault(producer_id, []).append(Consumer(consumer.id, tuple(needs_list)))
    return found


def _rank_groups(plan: Plan) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Ranks -> stages on them, in forward order (modules in the model's order, then layers)."""
    position = {module.name: index for index, module in enumerate(plan.model.modules)}
    groups: dict[tuple[int, ...], list[Stage]] = {}
    owner: dict[int, Stage] = {}
    for stage in plan.stages:
        ranks = tuple(sorted(stage.flat_ranks))
        groups.setdefault(ranks, []).append(stage)
        for rank in ranks:
            other = owner.setdefault(rank, stage)
            if sorted(other.flat_ranks) != list(ranks):
                raise ValueError(
                    f"stages {other.id} and {stage.id} share rank {rank} but not all ranks: "
                    f"{other.flat_ranks} and {stage.flat_ranks}"
                )
    return {
        ranks: tuple(s.id for s in sorted(stages, key=lambda s: (position[s.module], s.layers, s.replica)))
        for ranks, stages in groups.items()
    }


def _with_reductions(
    actions: Sequence[Action], stages: Sequence[int], reduced: Sequence[int]
) -> tuple[Action, ...]:
    """REDUCE_GRAD after the stage's last pass, and after every one that comes before it in order."""
    last = {action.stage: index for index, action in enumerate(actions)}
    due: list[list[Action]] = [[] for _ in range(len(actions) + 1)]
    at = 0
    for stage in (stage for stage in reduced if stage in stages):
        at = max(at, last.get(stage, -1) + 1)
        due[at].append(Action(stage, Pass.REDUCE_GRAD))
    result = [*due[0]]
    for index, action in enumerate(actions):
        result += [action, *due[index + 1]]
    return tuple(result)


def batched_microbatches(
    draft: Plan, *, samples_per_microbatch: int, replicas: Sequence[int]
) -> tuple[Microbatch, ...]:
    """The same samples everywhere: consecutive samples form microbatches, dealt to replicas in turn.

    Every module gets the items of those samples; each item is a row of its own. A module
    none of whose items stand in a microbatch's samples skips it.

    Raises ValueError when the batch does not divide.
    """
    if samples_per_microbatch < 1 or len(draft.batch) % (samples_per_microbatch * len(replicas)):
        raise ValueError(
            f"batch of {len(draft.batch)} samples: want a multiple of microbatch x replicas, "
            f"got {samples_per_microbatch} x {len(replicas)}"
        )
    chunks = [
        draft.batch[start : start + samples_per_microbatch]
        for start in range(0, len(draft.batch), samples_per_microbatch)
    ]
    return chunked_microbatches(
        draft, {replica: chunks[place :: len(replicas)] for place, replica in enumerate(replicas)}
    )


def chunked_microbatches(
    draft: Plan, chunks: Mapping[int, Sequence[Sequence[Sample]]]
) -> tuple[Microbatch, ...]:
    """The same samples everywhere: each chunk of a replica's samples is a microbatch of every module.

    Every module gets the items of those samples; each item is a row of its own. A module none of
    whose items stand in a chunk skips it.
    """
    routing = Routing(draft)
    found: list[Microbatch] = []
    for module in draft.model.modules:
        for replica, of_replica in chunks.items():
            index = 0
            for chunk in of_replica:
                rows = tuple((item,) for sample in chunk for item in routing.items(module.name, sample.id))
                if rows:
                    found.append(Microbatch(module=module.name, replica=replica, index=index, rows=rows))
                    index += 1
    return tuple(found)
