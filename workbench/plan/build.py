"""Builds a plan from stages and microbatches: gives every rank its program."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import chain, pairwise

from workbench.collector import collector_paused
from workbench.model.layer import LayerKind
from workbench.model.model_graph import TEXT
from workbench.model.trained import is_trained
from workbench.plan.alike import alike_replicas, first_of_all, with_copied
from workbench.plan.check import check
from workbench.plan.frame import Frame, frame_of
from workbench.plan.gradient_groups import gradient_groups, reduction_order
from workbench.plan.instance_cache import set_cached
from workbench.plan.lru_cache import Identity, LruCache, value_key
from workbench.plan.parameter_shards import reshard_after_of, shard_units
from workbench.plan.plan import Plan, Program
from workbench.plan.routing import Routing, routing_of
from workbench.plan.stage import Stage
from workbench.schedule.action import STEP, Action, with_stages
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.schedule.graph_aware import Consumer, ScheduleNode
from workbench.schedule.parts import Group, Programs
from workbench.schedule.pass_graph import one_unit
from workbench.schedule.programs import Prepared
from workbench.schedule.reductions import with_reductions
from workbench.schedule.sharded import with_rounds

MOST_ACTIONS = 500_000  # in all cached orders together
_GROUPS: LruCache[dict[Group, tuple[int, ...]]] = LruCache(64)  # of the last stages
_PROBLEM: LruCache[Frame] = LruCache(4096)  # by frame: the inputs of the scheduler
_PREPARED: LruCache[Prepared] = LruCache(MOST_ACTIONS, lambda prepared: prepared.num_passes + 1)
_PROGRAMS: LruCache[tuple[Program, ...]] = LruCache(
    MOST_ACTIONS, lambda programs: sum(len(program.actions) for program in programs) + 1
)


@collector_paused()
def with_programs(
    draft: Plan,
    schedule: Schedule | None = None,
    duration: Callable[[Action], float] = one_unit,
) -> Plan:
    """Return the plan with programs for its stages and microbatches, checked.

    The default schedule is graph-aware 1F1B: stages on the same ranks run in lockstep, in forward order.
    Gradients are reduced after the stage's last pass; STEP ends every program. Schedules that distinguish
    inner stages get the LLM and the modules that read it.

    Args:
        schedule: see `programs_of`.
        duration: time of a pass, in any unit, for schedules that choose between orders by it.

    Raises:
        ValueError: what `check` refuses, stages whose ranks overlap without being equal, or a
            `run_ahead` where no encoder is frozen.
    """
    schedule = schedule or Schedule()
    if draft.schedule != schedule.own_name:
        draft = replace(draft, schedule=schedule.own_name)
    plan = _with_programs(draft, schedule, duration)
    set_cached(plan, shard_units, shard_units(draft))  # programs do not change these
    set_cached(plan, gradient_groups, gradient_groups(draft))
    set_cached(plan, reduction_order, reduction_order(draft))
    check(plan)
    return plan


def _with_programs(draft: Plan, schedule: Schedule, duration: Callable[[Action], float]) -> Plan:
    """Schedule one replica and copy its programs to all that equal it, where there are equals."""
    part = first_of_all(draft)
    if part is not draft and duration is one_unit and not schedule.spec.shares_ranks_in_part:
        with suppress(ValueError):  # reported below, with the stages of all replicas
            programs = _complete_programs(draft, part, _pass_programs(part, schedule, duration))
            plan = with_copied(draft, _programs_of_all(draft, programs))
            set_cached(plan, first_of_all, replace(part, programs=programs))
            return plan
    passes = _pass_programs(draft, schedule, duration)
    return replace(draft, programs=_complete_programs(draft, draft, passes))


def _programs_of_all(draft: Plan, programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Return programs of all equal replicas, copied from those of the first."""
    ((first, *others),) = alike_replicas(draft)
    groups = tuple(_rank_groups(draft).values())

    def derive() -> tuple[Program, ...]:
        by_ranks = {program.ranks: program for program in programs}
        for other in others:
            rank_of = dict(zip(first.ranks, other.ranks, strict=True))
            stage_of: dict[int | None, int | None] = dict(zip(first.stages, other.stages, strict=True))
            stage_of[None] = None
            for program in programs:
                ranks = tuple(sorted(rank_of[rank] for rank in program.ranks))
                actions = with_stages(program.actions, stage_of.__getitem__)
                by_ranks[ranks] = Program(ranks=ranks, actions=actions)
        return tuple(by_ranks[ranks] for ranks in groups)

    parts = tuple((component.ranks, component.stages) for component in (first, *others))
    return _PROGRAMS.get_or((Identity(programs), parts, groups), derive)


def _pass_programs(draft: Plan, schedule: Schedule, duration: Callable[[Action], float]) -> Programs:
    """Return the passes of every group of stages on the same ranks; equal problems share one result."""
    if not schedule.spec.shares_ranks_in_part:
        _check_equal_ranks(draft)
    problem = _PROBLEM.get_or(frame_of(draft), lambda: _problem(draft))
    prepared = _PREPARED.get_or((problem, schedule), lambda: _prepared(problem, schedule))
    return prepared.usual if duration is one_unit else prepared.programs(duration)


def _problem(draft: Plan) -> Frame:
    chains = tuple(tuple(stage.id for stage in chain) for chain in draft.chain.values())
    groups = tuple(_rank_groups(draft))
    return Frame((schedule_nodes(draft), groups, chains, _inner_stages(draft), _frozen_sources(draft)))


def _prepared(problem: Frame, schedule: Schedule) -> Prepared:
    nodes, groups, chains, inner, frozen_sources = problem.parts
    return Prepared(nodes, groups, schedule, chains, inner=inner, frozen_sources=frozen_sources)


def _complete_programs(draft: Plan, part: Plan, passes: Programs) -> tuple[Program, ...]:
    """Return the programs of a part's ranks: passes with gathers of sharded weights, reductions and STEP."""
    present = part.stage
    reduced = tuple(stage for stage in reduction_order(draft) if stage in present)
    in_part = (
        (tuple(s for s in unit.stages if s in present), bool(unit.trained), reshard_after_of(draft, unit))
        for unit in shard_units(draft)
    )
    rounds = tuple(each for each in in_part if each[0])
    ranks_of = _rank_groups(part)

    def derive() -> tuple[Program, ...]:
        orders = passes
        if rounds:
            trained = [stage for stages, is_trained, _ in rounds if is_trained for stage in stages]
            reshard_after = {unit: after for unit, (_, _, after) in enumerate(rounds)}
            orders = with_rounds(orders, [stages for stages, _, _ in rounds], trained, reshard_after)
        orders = with_reductions(orders, reduced)
        return tuple(
            Program(ranks=ranks, actions=(*orders[group], STEP)) for group, ranks in ranks_of.items()
        )

    return _PROGRAMS.get_or((Identity(passes), tuple(ranks_of.items()), rounds, reduced), derive)


def schedule_nodes(plan: Plan) -> tuple[ScheduleNode, ...]:
    """Return what the scheduler needs of every stage: microbatches, backwards, consumers."""
    routing = routing_of(plan)
    consumers = _consumers(routing)
    nodes = []
    for stage in plan.stages:
        backward = routing.backwards(stage)
        nodes.append(
            ScheduleNode(
                stage=stage.id,
                num_microbatches=len(backward),
                backward=backward,
                consumers=tuple(consumers.get(stage.id, ())),
                weights=routing.trained(stage),
            )
        )
    return tuple(nodes)


def _consumers(routing: Routing) -> dict[int, list[Consumer]]:
    plan = routing.plan
    consumers_of: dict[int, list[Consumer]] = {}
    for (module, replica), stages in plan.chain.items():
        indices = range(len(plan.microbatches_of.get((module, replica), ())))
        needs = tuple((index,) for index in indices)
        for producer, consumer in pairwise(stages):
            consumers_of.setdefault(producer.id, []).append(Consumer(consumer.id, needs))
    for edge in plan.model.edges:
        readers = [s for r in plan.replicas(edge.target) for s in routing.reading_stages(edge, r)]
        for consumer in readers:
            reads: dict[int, list[tuple[int, ...]]] = {}
            producers = {
                source: routing.boundary_stage(edge.source, source, edge.after_layer).id
                for source in plan.replicas(edge.source)
            }
            targets = plan.microbatches_of.get((edge.target, consumer.replica), ())
            for position, target in enumerate(targets):
                for item in routing.wanted(edge, target):
                    holding = routing.holding(edge, item, consumer)
                    needs_of = reads.setdefault(producers[holding.replica], [()] * len(targets))
                    if holding.microbatch not in needs_of[position]:
                        needs_of[position] += (holding.microbatch,)
            for producer_id, needs_list in reads.items():
                consumers_of.setdefault(producer_id, []).append(Consumer(consumer.id, tuple(needs_list)))
    return consumers_of


def _frozen_sources(plan: Plan) -> tuple[int, ...]:
    """Return the stages of modules that read no other module and train nothing but a projector."""
    fed = {edge.target for edge in plan.model.edges}
    frozen = {
        module.name
        for module in plan.model.modules
        if not (module.modality == TEXT or module.name in fed)
        and not any(is_trained(layer) for layer in module.layers if layer.kind is not LayerKind.PROJECTOR)
    }
    return tuple(stage.id for stage in plan.stages if stage.module in frozen)


def _inner_stages(plan: Plan) -> tuple[int, ...]:
    """Return the stages of the LLM and of all modules downstream of it."""
    inner = {module.name for module in plan.model.modules if module.modality == TEXT}
    for _ in plan.model.modules:
        inner |= {edge.target for edge in plan.model.edges if edge.source in inner}
    return tuple(stage.id for stage in plan.stages if stage.module in inner)


def _rank_groups(plan: Plan) -> dict[Group, tuple[int, ...]]:
    """Map each set of stages that share ranks, in forward order (module, then layers), to those ranks."""
    return _GROUPS.get_or((Identity(plan.model), value_key(plan.stages)), lambda: _rank_groups_of(plan))


def _rank_groups_of(plan: Plan) -> dict[Group, tuple[int, ...]]:
    module_position = {module.name: index for index, module in enumerate(plan.model.modules)}
    in_order = sorted(plan.stages, key=lambda s: (module_position[s.module], s.layers, s.replica))
    position_of = {stage.id: index for index, stage in enumerate(in_order)}
    ranks_holding: dict[tuple[int, ...], list[int]] = {}
    grids = dict.fromkeys([stage.flat_ranks for stage in plan.stages])
    for rank in dict.fromkeys(chain.from_iterable(map(sorted, grids))):
        ranks_holding.setdefault(tuple([stage.id for stage in plan.stages_on[rank]]), []).append(rank)
    ranks_of: dict[Group, list[int]] = {}
    for stages, ranks in ranks_holding.items():
        ranks_of.setdefault(tuple(sorted(stages, key=position_of.__getitem__)), []).extend(ranks)
    return {group: tuple(sorted(ranks)) for group, ranks in ranks_of.items()}


def _check_equal_ranks(plan: Plan) -> None:
    if sum(map(len, _rank_groups(plan))) == len(plan.stages):
        return  # every stage belongs to one group
    owner: dict[int, Stage] = {}
    for stage in plan.stages:
        for rank in sorted(stage.flat_ranks):
            other = owner.setdefault(rank, stage)
            if sorted(other.flat_ranks) != sorted(stage.flat_ranks):
                kinds = ", ".join(kind for kind in ScheduleKind if kind.spec.shares_ranks_in_part)
                raise ValueError(
                    f"stages {other.id} and {stage.id} share rank {rank} but not all ranks: "
                    f"{other.flat_ranks} and {stage.flat_ranks}; schedule {kinds} takes them"
                )
