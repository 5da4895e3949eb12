"""What a prediction is based on, written into its trace."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from workbench.cost.model import CostModel
from workbench.cost.profile import Profile
from workbench.drift import YARDSTICK
from workbench.float_sum import float_sum
from workbench.model.expert_load import stated_loads
from workbench.plan.flop import model_flop
from workbench.plan.plan import Plan
from workbench.timing.interval import Doubt, Interval
from workbench.timing.price import Price
from workbench.timing.systems import KERNELS_AND_LINKS, Within
from workbench.trace import Trace

PROFILE = "profile"
DEVICE = "device"
UNMEASURED = "unmeasured"
MFU = "mfu"
NOISE = "noise"
LOW, HIGH, DOUBT = "interval_80_low_s", "interval_80_high_s", "interval_80_doubt"
LOAD = "expert_load_cv"  # "cv module", counted or assumed, see `workbench.model.expert_load`
EXECUTOR = "interval_80_of_executor"  # "low_s high_s executor", for each that may execute the plan


def with_provenance(
    trace: Trace,
    plan: Plan,
    profile: Profile,
    prices: Price,
    *,
    beside: Mapping[str, CostModel] | None = None,
) -> Trace:
    """Add the profile's name and device, the MFU, and one detail for every unmeasured cost.

    `beside` has the machines of other kinds of devices; the MFU counts each rank's own peak.
    """
    profiles = {device: model.profile for device, model in (beside or {}).items()}
    all_profiles = (profile, *profiles.values())
    details = [
        (PROFILE, ", ".join(dict.fromkeys(used.name for used in all_profiles))),
        (DEVICE, ", ".join(dict.fromkeys(used.device for used in all_profiles))),
    ]
    cluster = plan.cluster
    peaks = [
        dict(profiles.get(cluster.nodes[cluster.node_of(rank)].device, profile).peak_flop_per_s).get(
            plan.settings.precision
        )
        for rank in plan.ranks
    ]
    if trace.iteration_s > 0 and None not in peaks:
        possible = trace.iteration_s * float_sum(filter(None, peaks))
        details.append((MFU, repr(model_flop(plan) / possible)))
    details += [load_detail(name, cv) for name, cv in stated_loads(plan.model).items() if cv]
    details += [(UNMEASURED, name) for name in prices.unmeasured]
    details += [(NOISE, line) for line in dict.fromkeys(line for used in all_profiles for line in used.noise)]
    if profile.yardstick_s is not None:
        details.append((YARDSTICK, repr(profile.yardstick_s)))
    return replace(trace, details=(*trace.details, *details))


def with_interval(trace: Trace, predicted: Interval, others: Iterable[Within] = ()) -> Trace:
    """Add the iteration time's interval, a detail for each reason of its width, and intervals by executor."""
    ends = ((LOW, repr(predicted.low_s)), (HIGH, repr(predicted.high_s)))
    doubts = ((DOUBT, f"{doubt.deviation!r} {doubt.about}") for doubt in predicted.doubts)
    by_executor = (
        (EXECUTOR, f"{other.interval.low_s!r} {other.interval.high_s!r} {other.executor}") for other in others
    )
    return replace(trace, details=(*trace.details, *ends, *doubts, *by_executor))


def intervals_by_executor(trace: Trace) -> tuple[Within, ...]:
    """Return the intervals by who executes the plan; empty where this machine's overheads were measured."""
    lines = (value.split(" ", 2) for name, value in trace.details if name == EXECUTOR)
    return tuple(Within(executor, Interval(float(low), float(high))) for low, high, executor in lines)


def comparable_interval(trace: Trace) -> Interval | None:
    """Return the interval without what one executor adds to the steps of all plans; None as `interval_of`."""
    alone = (one.interval for one in intervals_by_executor(trace) if one.executor == KERNELS_AND_LINKS)
    return next(alone, interval_of(trace))


def interval_of(trace: Trace) -> Interval | None:
    """Return the interval of a predicted iteration time; None where the trace has none."""
    ends = {name: float(value) for name, value in trace.details if name in (LOW, HIGH)}
    if len(ends) < 2:
        return None
    doubts = (value.split(" ", 1) for name, value in trace.details if name == DOUBT)
    return Interval(ends[LOW], ends[HIGH], tuple(Doubt(about, float(size)) for size, about in doubts))


def load_detail(module: str, cv: float) -> tuple[str, str]:
    """The detail of the CV of loads of a module's experts."""
    return LOAD, f"{cv!r} {module}"


def expert_loads(trace: Trace) -> dict[str, float]:
    """Return module -> CV of the loads of its experts: counted in a run, or stated of a prediction."""
    lines = (value.split(" ", 1) for name, value in trace.details if name == LOAD)
    return {module: float(cv) for cv, module in lines}


def utilisation(trace: Trace) -> float | None:
    """Return the model FLOP utilisation of a predicted step, of the profile's peak; None: unknown."""
    return next((float(value) for name, value in trace.details if name == MFU), None)


def unmeasured_costs(trace: Trace) -> tuple[str, ...]:
    """Return the unmeasured costs that the trace's prediction includes."""
    return tuple(value for name, value in trace.details if name == UNMEASURED)


def noise_of(trace: Trace) -> tuple[str, ...]:
    """Return reasons to distrust the measurements behind the trace's prediction; empty: none known."""
    return tuple(value for name, value in trace.details if name == NOISE)
