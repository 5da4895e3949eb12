"""A plan's emulated trace: measured actions, put together by the plan's dependencies."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from runtime.emulation.emulate import Emulation
from runtime.emulation.thread_mesh import CollectiveSpan
from workbench.cost.collectives import Collective, Collectives
from workbench.cost.hardware import Link
from workbench.cost.model import CostModel
from workbench.cost.profile import Profile
from workbench.drift import YARDSTICK
from workbench.job.matching import profile_for
from workbench.plan.lowered import Lowered
from workbench.schedule.action import MEANING, Action, Activity
from workbench.timing.price import price
from workbench.timing.provenance import DEVICE, PROFILE, UNMEASURED
from workbench.trace import Executor, Trace

EMULATED = "emulated"
COLLECTIVES = {kind.value for kind in Collective}


class Simulate(Protocol):
    """How timed actions become a timeline: `sim.step.engine.simulate`."""

    def __call__(
        self,
        lowered: Lowered,
        duration_s: Callable[[Action], float],
        *,
        step_s: Callable[[int], float],
    ) -> Trace: ...


def compose(
    lowered: Lowered, emulation: Emulation, simulate: Simulate, profile: Profile | None = None
) -> Trace:
    """The timeline of one step, with passes and steps as they were timed alone.

    Messages take their links' time. What one device cannot show comes from a profile: the time
    of gradient sums, and of collectives inside a pass. Its name, and what of that it never
    measured, stand in the details.

    Args:
        simulate: puts the actions together.
        profile: None: the shipped one of the cluster's device, where the plan has collectives.

    Raises:
        ValueError: no profile is of this device, or the plan's times deadlock the simulator.
    """
    unmeasured: dict[str, None] = {}
    sums_s: dict[Action, float] = {}
    profile = check_collectives(lowered, profile)
    if profile is not None:
        prices = price(lowered, CostModel(profile))
        sums_s = {
            a: s for a, s in prices.durations_s.items() if MEANING[a.kind].activity is Activity.COLLECTIVE
        }
        collectives = Collectives(profile)
        for group in lowered.groups:
            link = lowered.plan.cluster.joining(group.ranks)
            if not collectives.is_measured(Collective.ALL_REDUCE, len(group.ranks), link):
                unmeasured[_unmeasured(Collective.ALL_REDUCE.value)] = None

    def exchange_s(exchange: CollectiveSpan) -> float:
        link = lowered.plan.cluster.joining(exchange.ranks)
        if exchange.kind not in COLLECTIVES:
            unmeasured[_unmeasured(exchange.kind)] = None
            return _neighbours_s(exchange, link)
        kind = Collective(exchange.kind)
        if not collectives.is_measured(kind, len(exchange.ranks), link):
            unmeasured[_unmeasured(kind.value)] = None
        return collectives.seconds(kind, exchange.num_bytes, len(exchange.ranks), link)

    durations_s = sums_s | emulation.timings.durations_s(exchange_s)
    trace = simulate(lowered, durations_s.__getitem__, step_s=emulation.timings.steps_s.__getitem__)
    details = [(DEVICE, emulation.kind)]
    details += [(EMULATED, f"one action at a time on {emulation.device}, median of {emulation.num_timed}")]
    if emulation.yardsticks_s:
        details.append((YARDSTICK, repr(statistics.harmonic_mean(emulation.yardsticks_s))))
    if profile is not None:
        details.append((PROFILE, f"{profile.name}, of collectives alone"))
    details += [(UNMEASURED, name) for name in unmeasured]
    loss = emulation.losses[-1]
    return replace(trace, executor=Executor.EMULATED, loss=loss, details=tuple(details))


def check_collectives(lowered: Lowered, profile: Profile | None) -> Profile | None:
    """The profile that gives collectives their times; None where the plan has none.

    Raises:
        ValueError: it has some, no profile is given and none is of the cluster's device.
    """
    is_shared = any(len(group.ranks) > 1 for group in lowered.groups)
    if not is_shared and all(len(stage.flat_ranks) == 1 for stage in lowered.plan.stages):
        return None
    return profile or profile_for(lowered.plan)


def _neighbours_s(exchange: CollectiveSpan, link: Link) -> float:
    """A ring step sends its bytes once; an all-to-all all but a rank's own share, message by message."""
    others = len(exchange.ranks) - 1
    if exchange.kind == "ring":
        return exchange.num_bytes / link.bytes_per_s + link.latency_s
    return others * (exchange.num_bytes / len(exchange.ranks) / link.bytes_per_s + link.latency_s)


def _unmeasured(kind: str) -> str:
    return f"{kind} between ranks: formula over the cluster's links"
