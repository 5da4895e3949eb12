"""A weight that several stages of one rank use, as one tensor."""

from collections.abc import Mapping

from runtime.step.stage_module import StageModule
from workbench.plan.lowered import Weights
from workbench.plan.plan import Plan
from workbench.plan.tied import equal_stages, tied_on


def share_weights(plan: Plan, rank: int, modules: Mapping[int, StageModule]) -> None:
    """Let a rank's stages have one tensor of every weight that the plan says they hold together.

    Args:
        modules: by stage, all of the rank's.
    """
    for one in tied_on(plan, rank):
        first, *others = (modules[stage] for stage in one.stages)
        for other in others:
            hold_with(other, first, Weights(one.module, None, one.name))
    for stage, module in modules.items():
        first = modules[equal_stages(plan, plan.stage[stage])[0]]
        for weights in module.weights() if module is not first else ():
            hold_with(module, first, weights)


def hold_with(module: StageModule, other: StageModule, weights: Weights) -> None:
    """Put another stage's tensors where a stage has the same weights.

    Autograd then adds the gradients of all uses to one, and an optimizer updates it once.
    """
    theirs = dict(zip(map(id, module.weights()[weights]), other.weights()[weights], strict=True))
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in theirs:
                part.register_parameter(name, theirs[id(parameter)])
