"""Equal replicas that shard their weights (FSDP, HSDP): one stands for all, and gathers as all of them do."""

from collections.abc import Sequence
from dataclasses import replace

from workbench.plan.expert_groups import held_elements
from workbench.plan.kept import give
from workbench.plan.lowered import GradientGroup, Lowered, Weights
from workbench.plan.parameter_shards import ShardUnit, shard_units
from workbench.plan.plan import ModuleSettings, Plan, Program, Sharding, Stage
from workbench.schedule.action import CLOSING, STEP, Action, reduction_of
from workbench.schedule.reductions import with_reductions
from workbench.schedule.sharded import with_rounds


def sharding_for(lowered: Lowered, *, num_ranks: int, stride: int, group: int) -> Lowered:
    """The lowered plan of one replica whose stages' weights are sharded over the ranks of all replicas.

    Replicas do the same work at the same moments, so a collective starts when this replica's ranks are at
    it. Units are the plan's stages. Where a copy has fewer ranks than there are (HSDP), copies add up their
    parts of gradients behind each stage's last pass. Only for `price` and `sim.step.sweep`.

    Args:
        lowered: plan of one replica, its weights whole.
        num_ranks: that hold the same weights in all replicas, context-parallel ones included.
        stride: from one of them to the next.
        group: ranks that share one copy; divides `num_ranks`.

    Complexity: O(actions + stages x ranks).
    """
    units = tuple(_unit(lowered.plan, stage, group, stride) for stage in lowered.plan.stages)
    num_copies = num_ranks // group
    groups = tuple(
        GradientGroup(
            index=index,
            ranks=_peers(stage, num_copies, stride * group),
            weights=(Weights(stage.module, stage.layers[0]),),
            num_elements=sum(map(unit.part, unit.trained)),
        )
        for index, (stage, unit) in enumerate(zip(lowered.plan.stages, units, strict=True))
    )
    plan = _with_rounds(lowered.plan, units, is_hybrid=num_copies > 1)
    give(plan, shard_units, units)
    reductions: dict[Action, tuple[int, ...]] = {
        reduction_of(stage.id): (index,)
        for index, stage in enumerate(plan.stages)
        if num_copies > 1 and units[index].trained
    }
    return replace(lowered, plan=plan, groups=groups, reductions=reductions)


def _unit(plan: Plan, stage: Stage, group: int, stride: int) -> ShardUnit:
    """Of what one rank of the stage would hold whole; tied weights stand with each of their layers."""
    sizes = {True: 0, False: 0}
    for layer in plan.model.module(stage.module).layers[slice(*stage.layers)]:
        sizes[layer.trainable] += round(sum(held_elements(each, stage) for each in layer.parameters()))
    first = stage.flat_ranks[0]
    trained, frozen = ((size,) if size else () for size in (sizes[True], sizes[False]))
    ranks = tuple(first + place * stride for place in range(group))
    return ShardUnit(stages=(stage.id,), ranks=ranks, trained=trained, frozen=frozen)


def _peers(stage: Stage, num_copies: int, stride: int) -> tuple[int, ...]:
    """The ranks that hold the first rank's part in every copy."""
    return tuple(stage.flat_ranks[0] + copy * stride for copy in range(num_copies))


def _with_rounds(plan: Plan, units: Sequence[ShardUnit], *, is_hybrid: bool) -> Plan:
    """Gathers, frees and reduce-scatters around the passes; sums over copies behind a stage's last pass."""
    stages_of = {program.ranks: _stages(plan, program) for program in plan.programs}
    passes = {
        stages_of[program.ranks]: tuple(action for action in program.actions if action.kind not in CLOSING)
        for program in plan.programs
    }
    trained = [unit.stages[0] for unit in units if unit.trained]
    orders = with_rounds(passes, [unit.stages for unit in units], trained)
    if is_hybrid:
        orders = with_reductions(orders, tuple(reversed(trained)))
    programs = tuple(
        Program(ranks=ranks, actions=(*orders[stages], STEP)) for ranks, stages in stages_of.items()
    )
    settings = replace(plan.settings, modules=tuple(map(_sharded, plan.settings.modules)))
    return replace(plan, programs=programs, settings=settings)


def _stages(plan: Plan, program: Program) -> tuple[int, ...]:
    return tuple(stage.id for stage in plan.stages if stage.flat_ranks == program.ranks)


def _sharded(settings: ModuleSettings) -> ModuleSettings:
    return replace(settings, sharding=Sharding.PARAMETERS)
