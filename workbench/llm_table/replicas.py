"""Equal data-parallel replicas: one stands for all, and reduces gradients as if all were there."""

from dataclasses import replace
from enum import StrEnum

from workbench.plan.gradient_groups import reductions
from workbench.plan.lowered import GradientGroup, Lowered
from workbench.plan.plan import Plan, Program
from workbench.schedule.action import REDUCTIONS, Action, reduction_of


class Sums(StrEnum):
    """Gradients are added up behind each stage's last pass, or behind all passes."""

    BEHIND_STAGE = "behind stage"
    BEHIND_ALL = "behind all"


def standing_for(
    lowered: Lowered, *, num_replicas: int, stride: int, sums: Sums = Sums.BEHIND_STAGE
) -> Lowered:
    """The lowered plan of one replica, with gradient groups that hold the ranks of all replicas.

    Replicas do the same work at the same moments, so a group's collective starts when this
    replica's ranks are at it. Only for `price` and `sim.step.sweep`, which ask nothing of the ranks that are
    not there; the engine would wait for them.
    Messages of replicas that are not there wait for nobody: a cluster whose ranks have each a card, with
    its share of what their node sends, says what they leave.

    Args:
        lowered: plan of one replica.
        num_replicas: of equal work.
        stride: rank r of this replica is rank r + d x stride of the d-th.
        sums: where the reductions stand; in the plan of all replicas it follows each stage's last pass.

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
    """The group's ranks in every replica; of experts that lie beyond a replica, in every copy of them."""
    ep = plan.stages[0].ep
    if group.weights[0].experts and ep > stride:
        num_replicas, stride = num_replicas * stride // ep, ep
    return tuple(sorted(r + d * stride for r in group.ranks for d in range(num_replicas)))


def in_one_buffer(lowered: Lowered) -> Lowered:
    """Groups of one stage and the same ranks joined into one, as in one flat gradient buffer.

    Shoeybi et al. 2019, "Megatron-LM": gradients of a rank are one buffer, reduced by one call.
    """
    joined: dict[tuple[object, ...], GradientGroup] = {}
    for group in lowered.groups:
        stage = _stage_of(lowered.plan, group)
        shared = group.weights[0].shared
        key = (stage, group.ranks, shared)
        found = joined.get(key)
        if found is None:
            joined[key] = replace(group, index=len(joined))
        else:
            weights = (*found.weights, *group.weights)
            elements = found.num_elements + group.num_elements
            joined[key] = replace(found, weights=weights, num_elements=elements)
    groups = tuple(joined.values())
    return replace(lowered, groups=groups, reductions=reductions(lowered.plan, groups))


def _stage_of(plan: Plan, group: GradientGroup) -> int:
    """The last stage that holds the group's first weights."""
    layer = group.weights[0].layer
    own = [s.id for s in plan.stages if layer is not None and s.layers[0] <= layer < s.layers[1]]
    return max(own, default=-1)


def _with_reductions(plan: Plan, sums: Sums) -> Plan:
    """A reduction of every stage, stages of the last layers first."""
    programs = []
    for program in plan.programs:
        actions = [action for action in program.actions if action.kind not in REDUCTIONS]
        own = {action.stage for action in actions if action.stage is not None}
        last = {action.stage: at for at, action in enumerate(actions)}
        due: dict[int, list[Action]] = {}
        at = 0 if sums is Sums.BEHIND_STAGE else max((last[stage] for stage in own), default=0)
        for stage in sorted(own, key=lambda stage: -stage):
            at = max(at, last[stage])
            due.setdefault(at, []).append(reduction_of(stage))
        told = [each for at, action in enumerate(actions) for each in (action, *due.get(at, ()))]
        programs.append(Program(ranks=program.ranks, actions=tuple(told)))
    return replace(plan, programs=tuple(programs))
