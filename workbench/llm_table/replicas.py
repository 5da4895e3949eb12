"""Equal data-parallel replicas: one stands for all, with collectives over all of them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum

from workbench.float_sum import float_sum
from workbench.llm_table.llm_row import DataOverlap, LlmRow
from workbench.llm_table.row_prices import scattered
from workbench.model.experts import is_of_expert
from workbench.model.trained import frozen_parameters, trained_parameters
from workbench.plan.expert_groups import expert_elements, has_expert_parallelism, held_elements
from workbench.plan.gradient_groups import reductions
from workbench.plan.instance_cache import set_cached
from workbench.plan.lowered import GradientGroup, Lowered, Weights
from workbench.plan.parameter_shards import shard_units
from workbench.plan.plan import ModuleSettings, Plan, Program, Sharding
from workbench.plan.shard_unit import FlatWeights, ShardUnit
from workbench.plan.stage import Stage
from workbench.schedule.action import CLOSING, REDUCTIONS, STEP, Action, reduction_of
from workbench.schedule.reductions import with_reductions
from workbench.schedule.sharded import with_rounds


def with_replicas(alone: Lowered, row: LlmRow) -> Lowered:
    """The row's single replica with collectives over all: gathers of sharded weights, or flat reductions."""
    alone, stride = scattered(alone, row.tp), row.tp * row.cp
    if row.gathers_weights:
        return sharding_for(alone, num_ranks=row.data_ranks, stride=row.tp, group=row.sharing_ranks)
    sums = Sums.BEHIND_ALL if row.dp_overlap is DataOverlap.NO else Sums.BEHIND_STAGE
    whole = standing_for(_in_groups(alone, row), num_replicas=row.dp, stride=stride, sums=sums)
    return in_one_buffer(whole)


def _in_groups(alone: Lowered, row: LlmRow) -> Lowered:
    """The plan with as many instances of sharded state as the row's groups form."""
    num_copies = row.data_ranks // row.sharing_ranks if row.zero_stage else 1
    if num_copies == 1:
        return alone
    settings = alone.plan.settings
    modules = tuple(replace(each, instances=num_copies) for each in settings.modules)
    return replace(alone, plan=replace(alone.plan, settings=replace(settings, modules=modules)))


class Sums(StrEnum):
    """Where gradients are reduced: after each stage's last pass, or after all passes."""

    BEHIND_STAGE = "behind stage"
    BEHIND_ALL = "behind all"


def standing_for(
    lowered: Lowered, *, num_replicas: int, stride: int, sums: Sums = Sums.BEHIND_STAGE
) -> Lowered:
    """The lowered plan of one replica, with gradient groups over the ranks of all replicas.

    Replicas work in lockstep, so a group's collective starts when this replica's ranks reach it. Only for
    `price` and `sim.step.sweep`, which do not involve the absent ranks; the engine would wait for them.
    Messages of the absent replicas do not delay this one's: on a cluster with a card per rank, each has its
    share of the node's bandwidth.

    Args:
        lowered: plan of one replica.
        num_replicas: of equal work.
        stride: rank r of this replica is rank r + d x stride of the d-th.
        sums: where the reductions are; in a plan of all replicas each follows its stage's last pass.

    Complexity: O(groups x replicas + actions).
    """
    if num_replicas == 1:
        return lowered
    groups = tuple(
        replace(group, ranks=_all_ranks(lowered.plan, group, num_replicas, stride))
        for group in lowered.groups
    )
    plan = _with_reductions(lowered.plan, sums)
    return replace(lowered, plan=plan, groups=groups, reductions=reductions(plan, groups))


def _all_ranks(plan: Plan, group: GradientGroup, num_replicas: int, stride: int) -> tuple[int, ...]:
    """The group's ranks in every replica; experts that span replicas, in every copy of them."""
    ep = plan.stages[0].ep
    if group.weights[0].experts and ep > stride:
        num_replicas, stride = num_replicas * stride // ep, ep
    return tuple(sorted(r + d * stride for r in group.ranks for d in range(num_replicas)))


def in_one_buffer(lowered: Lowered) -> Lowered:
    """Merge groups of one stage and the same ranks, as in one flat gradient buffer.

    Shoeybi et al. 2019, "Megatron-LM": gradients of a rank are one buffer, reduced by one call.
    """
    joined: dict[tuple[object, ...], GradientGroup] = {}
    for group in lowered.groups:
        stage = _stage_of(lowered.plan, group)
        shared = group.weights[0].shared
        key = (stage, group.ranks, shared)
        existing = joined.get(key)
        if existing is None:
            joined[key] = replace(group, index=len(joined))
        else:
            weights = (*existing.weights, *group.weights)
            elements = existing.num_elements + group.num_elements
            joined[key] = replace(existing, weights=weights, num_elements=elements)
    groups = tuple(joined.values())
    return replace(lowered, groups=groups, reductions=reductions(lowered.plan, groups))


def _stage_of(plan: Plan, group: GradientGroup) -> int:
    """The last stage that holds the group's first weights."""
    layer = group.weights[0].layer
    stage_ids = [s.id for s in plan.stages if layer is not None and s.layers[0] <= layer < s.layers[1]]
    return max(stage_ids, default=-1)


def _with_reductions(plan: Plan, sums: Sums) -> Plan:
    """Add a reduction of every stage, stages of the last layers first."""
    programs = []
    for program in plan.programs:
        actions = [action for action in program.actions if action.kind not in REDUCTIONS]
        stages = {action.stage for action in actions if action.stage is not None}
        last = {action.stage: index for index, action in enumerate(actions)}
        due: dict[int, list[Action]] = {}
        index = 0 if sums is Sums.BEHIND_STAGE else max((last[stage] for stage in stages), default=0)
        for stage in sorted(stages, key=lambda stage: -stage):
            index = max(index, last[stage])
            due.setdefault(index, []).append(reduction_of(stage))
        with_reductions_due = [
            each for index, action in enumerate(actions) for each in (action, *due.get(index, ()))
        ]
        programs.append(Program(ranks=program.ranks, actions=tuple(with_reductions_due)))
    return replace(plan, programs=tuple(programs))


def sharding_for(lowered: Lowered, *, num_ranks: int, stride: int, group: int) -> Lowered:
    """The lowered plan of one replica whose stages' weights are sharded over the ranks of all replicas.

    Replicas work in lockstep, so a collective starts when this replica's ranks reach it. Units are the
    plan's stages. If a copy has fewer ranks than there are (HSDP), copies reduce their gradient shards
    after each stage's last pass. Only for `price` and `sim.step.sweep`.

    Args:
        lowered: plan of one replica with unsharded weights.
        num_ranks: that hold the same weights in all replicas, context-parallel ones included.
        stride: from one of them to the next.
        group: ranks among which one copy is sharded; divides `num_ranks`.

    Complexity: O(actions + stages x ranks).
    """
    units = tuple(_unit(lowered.plan, stage, group, stride) for stage in lowered.plan.stages)
    num_copies = num_ranks // group
    groups: list[GradientGroup] = []
    groups_of: dict[int, tuple[int, ...]] = {}  # by stage
    for stage, unit in zip(lowered.plan.stages, units, strict=True):
        ranks, first = _peers(stage, num_copies, stride * group), len(groups)
        for flat in unit.trained:
            weights = (Weights(stage.module, stage.layers[0], experts=flat.experts),)
            size = unit.part(flat)
            groups.append(GradientGroup(index=len(groups), ranks=ranks, weights=weights, num_elements=size))
        groups_of[stage.id] = tuple(range(first, len(groups)))
    plan = _with_rounds(lowered.plan, units, is_hybrid=num_copies > 1)
    set_cached(plan, shard_units, units)
    reductions: dict[Action, tuple[int, ...]] = {
        reduction_of(stage): indices for stage, indices in groups_of.items() if num_copies > 1 and indices
    }
    return replace(lowered, plan=plan, groups=tuple(groups), reductions=reductions)


def _unit(plan: Plan, stage: Stage, group: int, stride: int) -> ShardUnit:
    """The unsharded elements of one rank of the stage; tied weights count with each of their layers.

    Distributed experts are sharded among those ranks of a copy that hold the same ones, every ep-th.
    """
    first, trained, frozen = stage.flat_ranks[0], Counter[bool](), Counter[bool]()
    for layer in plan.model.module(stage.module).layers[slice(*stage.layers)]:
        is_distributed = has_expert_parallelism(stage, layer)
        for sizes, parameters in ((trained, trained_parameters(layer)), (frozen, frozen_parameters(layer))):
            own = [each for each in parameters if not (is_distributed and is_of_expert(each))]
            sizes[False] += round(float_sum(held_elements(each, stage) for each in own))
        experts = trained if layer.trainable else frozen  # which have no adapters
        experts[True] += expert_elements(layer, stage) if is_distributed else 0
    return ShardUnit(
        stages=(stage.id,),
        holders=(tuple(range(first, first + group * stride, stride)),),
        expert_holders=(tuple(range(first, first + group * stride, stage.ep)),) if stage.ep > 1 else (),
        trained=_flat(trained),
        frozen=_flat(frozen),
    )


def _flat(sizes: Mapping[bool, int]) -> tuple[FlatWeights, ...]:
    """Tensors of that many elements, of experts (True) and of all others."""
    return tuple(FlatWeights(size, is_expert) for is_expert, size in sizes.items() if size)


def _peers(stage: Stage, num_copies: int, stride: int) -> tuple[int, ...]:
    """The ranks that hold the first rank's shard in every copy."""
    return tuple(stage.flat_ranks[0] + copy * stride for copy in range(num_copies))


def _with_rounds(plan: Plan, units: Sequence[ShardUnit], *, is_hybrid: bool) -> Plan:
    """Add all-gathers, frees and reduce-scatters around the passes, and all-reduces over copies after a
    stage's last.
    """
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
