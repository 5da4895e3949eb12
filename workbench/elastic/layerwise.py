"""When, within the last backward of a stage, the gradients of each of its layers are whole."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import isfinite

from workbench.plan.lowered import Lowered, Weights
from workbench.plan.plan import Plan, Stage
from workbench.plan.tied import equal_stages
from workbench.schedule.action import Action, Pass

Shares = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LastBackward:
    """The backward that a sum of gradients may overlap.

    Args:
        backward: the stage's last one.
        shares: [groups of the sum] part of that backward after which each group is whole.
    """

    backward: Action
    shares: Shares

    def __post_init__(self) -> None:
        if not all(0 <= share <= 1 for share in self.shares):
            raise ValueError(f"{self.backward}: shares of a backward lie in [0, 1], got {self.shares}")


def last_backward(program: Sequence[Action], stages: Collection[int]) -> Action | None:
    """After which all gradients of equal stages are whole; None where weight gradients come apart from it."""
    mine = [action for action in program if action.stage in stages]
    if any(action.kind is Pass.W for action in mine):
        return None
    return next((action for action in reversed(mine) if action.kind is Pass.B), None)


def layerwise(lowered: Lowered, backward_s: Callable[[str, int], float]) -> dict[Action, LastBackward]:
    """What each sum of gradients may overlap, where sums start layer by layer.

    A backward goes from the last layer to the first; a layer is whole when all from it to the last
    have run, a tied weight when its first layer in the stage has.

    Source: Oobleck chapter, section 2.6.1.

    Args:
        backward_s: of (module, layer): seconds of its backward, or any other unit.

    Raises:
        ValueError: a layer's time that is negative or not finite.

    Complexity: O(groups x layers of a stage).
    """
    found = {}
    for action, indices in lowered.reductions.items():
        stage = lowered.plan.stage[action.stage or 0]
        program = lowered.plan.program.get(stage.flat_ranks[0], ())
        backward = last_backward(program, equal_stages(lowered.plan, stage))
        if backward is not None:
            shares = _shares(stage, backward_s)
            whole = [
                shares[_first_layer(lowered.plan, stage, lowered.groups[index].weights[0]) - stage.layers[0]]
                for index in indices
            ]
            found[action] = LastBackward(backward=backward, shares=tuple(whole))
    return found


def _shares(stage: Stage, backward_s: Callable[[str, int], float]) -> list[float]:
    """[layers of the stage] part of its backward that has run when each layer's has."""
    seconds = [backward_s(stage.module, layer) for layer in range(*stage.layers)]
    for layer, each in enumerate(seconds, start=stage.layers[0]):
        if not (isfinite(each) and each >= 0):
            raise ValueError(f"layer {layer} of {stage.module!r}: a backward takes >= 0 s, got {each}")
    total = sum(seconds)
    return [sum(seconds[index:]) / total if total else 1.0 for index in range(len(seconds))]


def _first_layer(plan: Plan, stage: Stage, weights: Weights) -> int:
    """Of the stage, the first that holds the weights; where another stage does, it held them earlier."""
    if weights.layer is not None:
        return weights.layer
    layers = plan.model.module(stage.module).layers
    holders = (layer for layer in range(*stage.layers) if weights.shared in dict(layers[layer].tied).values())
    return next(holders, stage.layers[1] - 1)
