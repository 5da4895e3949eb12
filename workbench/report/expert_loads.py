"""Loads of experts that were counted in a run, beside those that its prediction assumes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from typing import Any

from workbench.float_sum import float_sum
from workbench.timing.provenance import expert_loads
from workbench.trace import Trace


@dataclass(frozen=True, slots=True)
class ComparedLoad:
    """The CV of the shares of rows of a module's experts, see `workbench.model.expert_load`."""

    module: str
    counted: float
    assumed: float


def compared_loads(traces: Sequence[Trace], assumed: Mapping[str, float]) -> tuple[ComparedLoad, ...]:
    """Return the loads of each module whose router was counted: the root of the mean square of the steps.

    Args:
        traces: of executed steps.
        assumed: by module; 0 for others.
    """
    by_step = [expert_loads(trace) for trace in traces]
    modules = dict.fromkeys(module for loads in by_step for module in loads)
    return tuple(
        ComparedLoad(
            module,
            sqrt(float_sum(loads.get(module, 0.0) ** 2 for loads in by_step) / len(by_step)),
            assumed.get(module, 0.0),
        )
        for module in modules
    )


def loads_text(loads: Sequence[ComparedLoad]) -> tuple[str, ...]:
    """One line; none where no router was counted."""
    if not loads:
        return ()
    each = (f"{load.module} {load.counted:.2g} counted, {load.assumed:.2g} assumed" for load in loads)
    return (f"loads of experts beyond random choices (expert_load_cv): {'; '.join(each)}",)


def loads_record(loads: Sequence[ComparedLoad]) -> list[dict[str, Any]]:
    """Return the same for `--json`."""
    return [asdict(load) for load in loads]
