"""What a prediction rests on, written into its trace."""

from dataclasses import replace

from workbench.plan.price import Price
from workbench.trace import Trace

PROFILE = "profile"
UNMEASURED = "unmeasured"


def with_provenance(trace: Trace, profile: str, prices: Price) -> Trace:
    """The trace with the profile's name and one detail for every cost that was not measured."""
    details = ((PROFILE, profile), *((UNMEASURED, name) for name in prices.unmeasured))
    return replace(trace, details=(*trace.details, *details))


def unmeasured_costs(trace: Trace) -> tuple[str, ...]:
    """Costs without a measurement that the trace's prediction rests on."""
    return tuple(value for name, value in trace.details if name == UNMEASURED)
