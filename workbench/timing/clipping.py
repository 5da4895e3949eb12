"""Seconds of clipping gradients by their global norm: read for it, summed over ranks, scaled."""

from collections.abc import Iterable

from workbench.cost.collectives import Collective
from workbench.cost.eager_traffic import OptimizerKernels
from workbench.cost.model import CostModel
from workbench.cost.traffic import WIDE_BYTES
from workbench.cost.weight_update import Clipping
from workbench.plan.lowered import GradientGroup
from workbench.plan.plan import Settings
from workbench.timing.weights import CollectivePrices

NORM_BYTES = 8  # of the sum of squares, in float64


def clipped_s(num_elements: float, cost: CostModel, settings: Settings) -> float:
    """Return the seconds in which one rank reads its gradients for the norm, and scales them.

    One read for the norm; where they are scaled, another and a write.

    Args:
        num_elements: of the gradients from which the rank updates weights.
    """
    clipping = cost.execution.clipping
    if clipping is Clipping.OFF:
        return 0.0
    num_bytes = num_elements * _gradient_bytes(settings, cost)
    scaled_s = cost.moved_s(2 * num_bytes) if clipping is Clipping.SCALED else 0.0
    return cost.moved_s(num_bytes) + scaled_s


def norm_sum_s(groups: Iterable[GradientGroup], collectives: CollectivePrices) -> float:
    """Return the seconds in which all ranks that train add up their parts of the norm. O(ranks log ranks)."""
    alike = {id(group.ranks): group.ranks for group in groups}  # most groups share their ranks
    ranks = sorted({rank for of_group in alike.values() for rank in of_group})
    return collectives.collective_s(Collective.ALL_REDUCE, NORM_BYTES, ranks) if ranks else 0.0


def _gradient_bytes(settings: Settings, cost: CostModel) -> int:
    """Return the bytes of a gradient's element at the optimizer; PyTorch's own kernels want float32."""
    if cost.execution.optimizer_kernels is OptimizerKernels.FUSED:
        return settings.gradient_bytes
    return max(WIDE_BYTES, settings.gradient_bytes)
