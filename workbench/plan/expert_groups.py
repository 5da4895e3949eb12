"""Which ranks hold which experts of a layer, and how many elements of its weights a rank holds."""

from collections.abc import Sequence
from math import prod

from workbench.balance.orchestration.expert_degrees import nearest_expert_degree
from workbench.model.experts import is_of_expert, num_experts
from workbench.model.layer import Layer, Parameter, Shard
from workbench.plan.stage import Stage


def has_expert_parallelism(stage: Stage, layer: Layer) -> bool:
    """Whether the stage's ranks distribute the layer's experts, whose weights are then grouped apart."""
    return stage.ep > 1 and num_experts(layer) > 0


def held_elements(parameter: Parameter, stage: Stage) -> float:
    """Return a parameter's elements on one rank of the stage; for distributed experts, the mean."""
    if stage.ep > 1 and is_of_expert(parameter):
        return parameter.num_elements / stage.ep
    return parameter.num_elements / (1 if parameter.shard is Shard.REPLICATED else stage.tp)


def expert_elements(layer: Layer, stage: Stage) -> int:
    """Return the elements of distributed experts on one rank."""
    return sum(p.num_elements for p in layer.parameters() if is_of_expert(p)) // stage.ep


def weight_holders(stages: Sequence[Stage]) -> tuple[tuple[int, ...], ...]:
    """Return, per tensor-parallel index, the ranks that hold the same weights of a layer, ascending."""
    return tuple(
        tuple(sorted({row[index] for stage in stages for row in stage.ranks}))
        for index in range(stages[0].tp)
    )


def expert_holders(stages: Sequence[Stage]) -> tuple[tuple[int, ...], ...]:
    """Return, per expert-parallel index, the ranks that hold the same experts of a layer, ascending."""
    return tuple(
        tuple(sorted({group[index] for stage in stages for group in stage.expert_ranks}))
        for index in range(stages[0].ep)
    )


def check_equal_degrees(stages: Sequence[Stage], module: str) -> None:
    """Raise ValueError where replicas of a layer cut its weights, or distribute its experts, differently."""
    degrees = sorted({stage.tp for stage in stages})
    if len(degrees) > 1:
        raise ValueError(
            f"module {module!r}: replicas with different tensor-parallel degrees {degrees} are refused; give "
            "all replicas one tp"
        )
    degrees = sorted({stage.ep for stage in stages})
    if len(degrees) > 1:
        raise ValueError(
            f"module {module!r}: replicas with different degrees of expert parallelism {degrees} are "
            "refused; give all replicas one ep"
        )


def check_experts(stage: Stage, layers: Sequence[Layer]) -> None:
    """Check a stage of a module with those layers as `check_expert_degree` does."""
    check_expert_degree(f"stage {stage.id}", stage.ep, (stage.joint_replicas, stage.cp, stage.tp), layers)


def check_expert_degree(where: str, ep: int, grid: tuple[int, int, int], layers: Sequence[Layer]) -> None:
    """Raise ValueError unless ep divides the ranks and every layer's number of experts; 1 always does.

    Args:
        where: what has the degree, for the message.
        ep: ranks among which experts are distributed.
        grid: joint replicas, cp and tp.
        layers: all of the module; those without experts are ignored.
    """
    num_ranks = prod(grid)
    if ep < 1 or num_ranks % ep:
        nearest = nearest_expert_degree(ep, num_ranks, num_ranks)
        product = "tp x cp" if grid[0] == 1 else "tp x cp x joint replicas"
        raise ValueError(
            f"{where}: ep must divide its {product} = {num_ranks} ranks, got {ep}; nearest: {nearest}"
        )
    if ep == 1:
        return
    counts = {num_experts(layer) for layer in layers} - {0}
    if not counts:
        raise ValueError(f"{where}: the module has no experts to distribute, got ep {ep}; nearest: 1")
    for count in sorted(counts):
        if count % ep:
            nearest = nearest_expert_degree(ep, num_ranks, count)
            raise ValueError(f"{where}: ep must divide the {count} experts, got {ep}; nearest: {nearest}")
