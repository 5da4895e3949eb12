"""What the runtime cannot do of a sound plan, said once: `check` tells it, and a run refuses by it."""

from workbench.model.item_tokens import class_tokens
from workbench.model.model_graph import Module
from workbench.model.projector import Projector
from workbench.plan.plan import ModuleSettings, Plan

AVERAGING = (Projector.LINEAR, Projector.MLP)  # they make one token of equal runs of several


def check_runnable(plan: Plan) -> None:
    """Raise ValueError where a plan can be simulated but not run.

    Complexity: O(modules + segments of the batch).
    """
    for module in plan.model.modules:
        check_recompute(module.name, plan.settings.of(module.name))
        _check_features(plan, module)


def check_recompute(module: str, settings: ModuleSettings) -> None:
    """Raise ValueError where some modules of a layer are computed again and others not."""
    if settings.computed_again:
        raise ValueError(
            f"module {module!r}: the runtime computes whole layers again or nothing, got "
            f"{', '.join(settings.computed_again)}; nearest: recompute 'full'"
        )


def _check_features(plan: Plan, module: Module) -> None:
    """Every item's tokens must shrink evenly to those behind the projector, a class token left out."""
    if module.source is None or module.source.projector not in AVERAGING:
        return
    possible = {0, class_tokens(module.layers[0])}
    for sample in plan.batch:
        for segment in sample.of(module.modality):
            if all((segment.tokens_in - dropped) % segment.tokens_out for dropped in possible):
                raise ValueError(
                    f"module {module.name!r}, sample {sample.id}, {segment.modality}[{segment.k}]: "
                    f"{segment.tokens_in} tokens do not shrink evenly to {segment.tokens_out}"
                )
