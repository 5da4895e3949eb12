"""Weights that several stages of one rank use, as one tensor."""

from collections.abc import Mapping

from runtime.step.stage_module import StageModule
from workbench.plan.lowered import Weights
from workbench.plan.plan import Plan
from workbench.plan.tied import equal_stages, tied_on


def share_weights(plan: Plan, rank: int, modules: Mapping[int, StageModule]) -> None:
    """Let a rank's stages share one tensor for every weight that the plan ties between them.

    Args:
        modules: all of the rank, by stage.
    """
    for one in tied_on(plan, rank):
        first, *others = (modules[stage] for stage in one.stages)
        for other in others:
            tie_with(other, first, Weights(one.module, None, one.name))
    for stage, module in modules.items():
        first = modules[equal_stages(plan, plan.stage[stage])[0]]
        for weights in module.weights() if module is not first else ():
            tie_with(module, first, weights)


def tie_with(module: StageModule, other: StageModule, weights: Weights) -> None:
    """Replace a stage's tensors of some weights by another stage's.

    Autograd then accumulates the gradients of all uses, and an optimizer updates the weight once.
    """
    replacements = dict(zip(map(id, module.weights()[weights]), other.weights()[weights], strict=True))
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in replacements:
                part.register_parameter(name, replacements[id(parameter)])
