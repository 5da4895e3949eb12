"""Splits the error of one prediction by cause, by simulating again with executed durations.

Durations of one kind of action after the other are replaced by executed medians; the change of the simulated
iteration is that kind's part of the error. The rest, when all are replaced, is what a timeline of exact
durations misses: messages, waiting, and whatever happens between actions. So the parts add up to the error.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sim.step.engine import simulate
from sim.step.lanes import shares_cores
from workbench.metrics import exposed_communication_s
from workbench.plan.lowered import Lowered
from workbench.schedule.action import Action, Pass
from workbench.timing.price import Price
from workbench.trace import Trace

OTHER = "between actions"
SHARED = "passes and shared cores"
ORDER = tuple(Pass)


@dataclass(frozen=True, slots=True)
class Executed:
    """Medians over the timed steps: seconds of every action on its slowest rank, and of each rank's STEP."""

    durations_s: Mapping[Action, float]
    steps_s: Mapping[int, float]


def executed_medians(traces: Sequence[Trace]) -> Executed:
    """Compute the medians from the spans of all steps of one plan."""
    by_action: dict[Action, list[float]] = {}
    by_rank: dict[int, list[float]] = {}
    for trace in traces:
        slowest: dict[Action, float] = {}
        for span in trace.spans:
            duration_s = span.end_s - span.start_s
            slowest[span.action] = max(duration_s, slowest.get(span.action, 0.0))
            if span.action.kind is Pass.STEP:
                by_rank.setdefault(span.rank, []).append(duration_s)
        for action, duration_s in slowest.items():
            by_action.setdefault(action, []).append(duration_s)
    return Executed(
        {action: statistics.median(durations_s) for action, durations_s in by_action.items()},
        {rank: statistics.median(durations_s) for rank, durations_s in by_rank.items()},
    )


def causes(lowered: Lowered, prices: Price, traces: Sequence[Trace]) -> dict[str, float]:
    """Return cause -> its share of (predicted - executed) / executed; the shares add up to the error.

    Where cores are shared, executed durations already include the sharing: they are replaced all at once,
    in a simulation without sharing.

    Complexity: one simulation per kind of action, and one more.
    """
    executed = executed_medians(traces)
    executed_s = statistics.median(trace.iteration_s for trace in traces)
    before_s = _simulated_s(lowered, prices, executed, ())
    parts: dict[str, float] = {}
    if _shares_cores(lowered):
        after_s = _simulated_s(_with_cores(lowered), prices, executed, ORDER)
        parts[SHARED] = (before_s - after_s) / executed_s
    else:
        after_s = before_s
        for index, kind in enumerate(ORDER):
            if not any(action.kind is kind for action in executed.durations_s):
                continue
            after_s = _simulated_s(lowered, prices, executed, ORDER[: index + 1])
            parts[str(kind)] = (before_s - after_s) / executed_s
            before_s = after_s
    parts[OTHER] = (after_s - executed_s) / executed_s
    return parts


def exposed_s(trace: Trace) -> float:
    """Mean over the ranks of the communication that no computation hides."""
    return statistics.fmean(exposed_communication_s(trace).values())


def _simulated_s(lowered: Lowered, prices: Price, executed: Executed, replaced: Sequence[Pass]) -> float:
    def duration_s(action: Action) -> float:
        if action.kind in replaced:
            return executed.durations_s.get(action, prices.duration_s(action))
        return prices.duration_s(action)

    def step_s(rank: int) -> float:
        if Pass.STEP in replaced:
            return executed.steps_s.get(rank, prices.step_s(rank))
        return prices.step_s(rank)

    return simulate(lowered, duration_s, step_s=step_s).iteration_s


def _shares_cores(lowered: Lowered) -> bool:
    return any(shares_cores(lowered, node) for node in lowered.plan.cluster.nodes)


def _with_cores(lowered: Lowered) -> Lowered:
    """The same plan with a device per rank."""
    cluster = lowered.plan.cluster
    nodes = tuple(replace(node, num_cores=None) for node in cluster.nodes)
    return replace(lowered, plan=replace(lowered.plan, cluster=replace(cluster, nodes=nodes)))
