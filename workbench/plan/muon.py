"""Which weights of a plan Muon updates, and in which precision."""

from workbench.model.layer import Layer, Parameter
from workbench.model.muon import muon_matrices
from workbench.plan.optimizer import Optimizer
from workbench.plan.plan import Precision, Settings


def matrices_of(settings: Settings, layer: Layer) -> tuple[Parameter, ...]:
    """Weights of the layer that Muon updates; none where the optimizer is AdamW."""
    return muon_matrices(layer) if settings.optimizer is Optimizer.MUON else ()


def ortho_precision(settings: Settings) -> Precision:
    """Precision in which matrices are orthogonalised."""
    wide = settings.optimizer_precision or settings.precision
    return Precision.FLOAT64 if wide is Precision.FLOAT64 else Precision.BFLOAT16
