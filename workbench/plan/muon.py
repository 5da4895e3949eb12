"""Which weights of a plan Muon updates, and plans in which it cannot."""

from workbench.model.experts import EXPERT
from workbench.model.layer import Layer, Parameter
from workbench.model.model_graph import Module
from workbench.model.muon import muon_matrices
from workbench.plan.optimizer import Optimizer
from workbench.plan.plan import Plan, Precision, Settings


def matrices_of(settings: Settings, layer: Layer) -> tuple[Parameter, ...]:
    """Weights of the layer that Muon updates; none where the optimizer is AdamW."""
    return muon_matrices(layer) if settings.optimizer is Optimizer.MUON else ()


def ortho_precision(settings: Settings) -> Precision:
    """Precision in which matrices are orthogonalised."""
    wide = settings.optimizer_precision or settings.precision
    return Precision.FLOAT64 if wide is Precision.FLOAT64 else Precision.BFLOAT16


def check_whole_matrices(where: str, settings: Settings, module: Module, *, tp: int = 1, ep: int = 1) -> None:
    """Raise ValueError where ranks would hold parts of matrices that Muon updates.

    Args:
        where: names the module.
        tp, ep: of its stages.

    Complexity: O(layers).
    """
    layers = [layer for layer in module.layers if matrices_of(settings, layer)]
    if not layers:
        return
    wants = f"{where}: optimizer 'muon' wants"
    if ep > 1:
        raise ValueError(f"{wants} blocks without experts, got ep {ep}; nearest: ep 1")
    if any(operator.name.startswith(EXPERT) for layer in layers for operator in layer.operators):
        raise ValueError(f"{wants} blocks without experts; nearest: optimizer {Optimizer.ADAMW.value!r}")


def check_muon(plan: Plan) -> None:
    """Raise ValueError as `check_whole_matrices` for the first stage that breaks the rule.

    Complexity: O(layers of the model + stages).
    """
    if plan.settings.optimizer is not Optimizer.MUON:
        return
    for module, tp, ep in dict.fromkeys((stage.module, stage.tp, stage.ep) for stage in plan.stages):
        found = plan.model.module(module)
        check_whole_matrices(f"module {module!r}", plan.settings, found, tp=tp, ep=ep)
