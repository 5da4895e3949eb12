"""A weight that several stages of one rank use, as one tensor."""

from runtime.step.stage_module import StageModule
from workbench.plan.lowered import Weights


def hold_with(module: StageModule, other: StageModule, weights: Weights) -> None:
    """Put another stage's tensors where a stage has the same weights.

    Autograd then adds the gradients of all uses to one, and an optimizer updates it once.
    """
    theirs = dict(zip(map(id, module.weights()[weights]), other.weights()[weights], strict=True))
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in theirs:
                part.register_parameter(name, theirs[id(parameter)])
