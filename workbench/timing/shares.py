"""Share of a predicted step that each source of error decides, from its growth if the source slows."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum

from workbench.cost.execution import Execution
from workbench.float_sum import float_sum

SLOWER = 0.02  # large against rounding, small against what overlap hides


class Source(StrEnum):
    """Costs that err together, because one table or one rule prices them."""

    PRODUCTS = "products"
    ATTENTION = "attention"
    MEMORY = "memory-bound kernels"
    COLLECTIVES = "collectives inside layers"
    REDUCTION = "collectives over weights and gradients"
    REST = "everything else"


RATES: dict[Source, tuple[str, ...]] = {
    Source.PRODUCTS: ("matmul_rate",),
    Source.ATTENTION: ("attention_rate",),
    Source.MEMORY: ("memory_rate", "step_rate"),
    Source.COLLECTIVES: ("collective_rate",),
    Source.REDUCTION: ("reduction_rate",),
}
"""The rates of an execution that a source depends on."""


def shares_of(
    seconds_of: Callable[[Execution], float], execution: Execution, seconds: float
) -> Mapping[Source, float]:
    """Return the share of a step's time that each source decides; what is fully overlapped has none.

    Args:
        seconds_of: predicts the step under another execution.
        execution: that of the prediction.
        seconds: of the step under it.

    Complexity: one evaluation a source.
    """
    shares = {}
    for source, rates in RATES.items():
        slower = replace(execution, **{rate: getattr(execution, rate) / (1 + SLOWER) for rate in rates})
        growth = seconds_of(slower) / seconds - 1 if seconds > 0 else 0.0
        shares[source] = min(1.0, max(0.0, growth / SLOWER))
    shares[Source.REST] = max(0.0, 1.0 - float_sum(shares.values()))
    return shares
