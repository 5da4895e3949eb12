"""When, during the last backward of a stage, the gradients of each of its layers are complete."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import isfinite

from workbench.float_sum import float_sum
from workbench.plan.lowered import Lowered, Weights
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage
from workbench.plan.tied import equal_stages
from workbench.schedule.action import Action, Pass

Shares = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LastBackward:
    """The backward that an all-reduce of gradients may overlap.

    Args:
        backward: the stage's last one.
        shares: [groups of the all-reduce] part of that backward after which each group is complete.
    """

    backward: Action
    shares: Shares

    def __post_init__(self) -> None:
        if not all(0 <= share <= 1 for share in self.shares):
            raise ValueError(f"{self.backward}: shares of a backward lie in [0, 1], got {self.shares}")


def last_backward(program: Sequence[Action], stages: Collection[int]) -> Action | None:
    """The action after which all gradients of equal stages are complete; None if weight gradients are
    separate.
    """
    stage_actions = [action for action in program if action.stage in stages]
    if any(action.kind is Pass.W for action in stage_actions):
        return None
    return next((action for action in reversed(stage_actions) if action.kind is Pass.B), None)


def layerwise(lowered: Lowered, backward_s: Callable[[str, int], float]) -> dict[Action, LastBackward]:
    """The backward that each all-reduce of gradients may overlap, if reduction starts layer by layer.

    A backward goes from the last layer to the first; a layer is complete when all from it to the last have
    run, a tied weight when its first layer in the stage has.

    Source: Oobleck chapter, section 2.6.1.

    Args:
        backward_s: of (module, layer): seconds of its backward, or any other unit.

    Raises:
        ValueError: a layer's time that is negative or not finite.

    Complexity: O(groups x layers of a stage).
    """
    overlaps = {}
    for action, indices in lowered.reductions.items():
        stage = lowered.plan.stage[action.stage or 0]
        program = lowered.plan.program.get(stage.flat_ranks[0], ())
        backward = last_backward(program, equal_stages(lowered.plan, stage))
        if backward is not None:
            shares = _shares(stage, backward_s)
            complete_at = [
                shares[_first_layer(lowered.plan, stage, lowered.groups[index].weights[0]) - stage.layers[0]]
                for index in indices
            ]
            overlaps[action] = LastBackward(backward=backward, shares=tuple(complete_at))
    return overlaps


def _shares(stage: Stage, backward_s: Callable[[str, int], float]) -> list[float]:
    """[layers of the stage] part of the stage's backward that has run when each layer's has."""
    seconds = [backward_s(stage.module, layer) for layer in range(*stage.layers)]
    for layer, each in enumerate(seconds, start=stage.layers[0]):
        if not (isfinite(each) and each >= 0):
            raise ValueError(f"layer {layer} of {stage.module!r}: a backward takes >= 0 s, got {each}")
    total = float_sum(seconds)
    return [float_sum(seconds[index:]) / total if total else 1.0 for index in range(len(seconds))]


def _first_layer(plan: Plan, stage: Stage, weights: Weights) -> int:
    """The stage's first layer that holds the weights; if another stage holds them, that came earlier."""
    if weights.layer is not None:
        return weights.layer
    layers = plan.model.module(stage.module).layers
    holders = (layer for layer in range(*stage.layers) if weights.shared in dict(layers[layer].tied).values())
    return next(holders, stage.layers[1] - 1)
