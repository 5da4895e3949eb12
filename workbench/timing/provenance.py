"""What a prediction rests on, written into its trace."""

from collections.abc import Mapping
from dataclasses import replace

from workbench.cost.model import CostModel
from workbench.cost.profile import Profile
from workbench.drift import YARDSTICK
from workbench.plan.flop import model_flop
from workbench.plan.plan import Plan
from workbench.timing.interval import Doubt, Interval
from workbench.timing.price import Price
from workbench.trace import Trace

PROFILE = "profile"
DEVICE = "device"
UNMEASURED = "unmeasured"
MFU = "mfu"
NOISE = "noise"
LOW, HIGH, DOUBT = "interval_80_low_s", "interval_80_high_s", "interval_80_doubt"


def with_provenance(
    trace: Trace,
    plan: Plan,
    profile: Profile,
    prices: Price,
    *,
    beside: Mapping[str, CostModel] | None = None,
) -> Trace:
    """The trace with the profile's name and device, its MFU, and one detail for every unmeasured cost.

    `beside` has the machines of other kinds of devices; each rank's own peak counts.
    """
    profiles = {device: model.profile for device, model in (beside or {}).items()}
    known = (profile, *profiles.values())
    details = [
        (PROFILE, ", ".join(dict.fromkeys(each.name for each in known))),
        (DEVICE, ", ".join(dict.fromkeys(each.device for each in known))),
    ]
    cluster = plan.cluster
    peaks = [
        dict(profiles.get(cluster.nodes[cluster.node_of(rank)].device, profile).peak_flop_per_s).get(
            plan.settings.precision
        )
        for rank in plan.ranks
    ]
    if trace.iteration_s > 0 and None not in peaks:
        possible = trace.iteration_s * sum(filter(None, peaks))
        details.append((MFU, repr(model_flop(plan) / possible)))
    details += [(UNMEASURED, name) for name in prices.unmeasured]
    details += [(NOISE, line) for line in dict.fromkeys(line for each in known for line in each.noise)]
    if profile.yardstick_s is not None:
        details.append((YARDSTICK, repr(profile.yardstick_s)))
    return replace(trace, details=(*trace.details, *details))


def with_interval(trace: Trace, found: Interval) -> Trace:
    """The trace with the interval of its iteration time, and a detail for each reason of its width."""
    doubts = ((DOUBT, f"{doubt.deviation!r} {doubt.about}") for doubt in found.doubts)
    return replace(
        trace, details=(*trace.details, (LOW, repr(found.low_s)), (HIGH, repr(found.high_s)), *doubts)
    )


def interval_of(trace: Trace) -> Interval | None:
    """The interval of a predicted iteration time; None where the trace has none."""
    ends = {name: float(value) for name, value in trace.details if name in (LOW, HIGH)}
    if len(ends) < 2:
        return None
    doubts = (value.split(" ", 1) for name, value in trace.details if name == DOUBT)
    return Interval(ends[LOW], ends[HIGH], tuple(Doubt(about, float(size)) for size, about in doubts))


def utilisation(trace: Trace) -> float | None:
    """Model FLOP utilisation of a predicted step, by the profile's peak; None where it is not known."""
    return next((float(value) for name, value in trace.details if name == MFU), None)


def unmeasured_costs(trace: Trace) -> tuple[str, ...]:
    """Costs without a measurement that the trace's prediction rests on."""
    return tuple(value for name, value in trace.details if name == UNMEASURED)


def noise_of(trace: Trace) -> tuple[str, ...]:
    """Why the measurements behind the trace's prediction are not to be trusted; none: no reason known."""
    return tuple(value for name, value in trace.details if name == NOISE)
