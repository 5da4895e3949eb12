"""Predictions of a plan: its simulated trace with the assumptions behind it, or its iteration time alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sim.attention.price import attention_of
from sim.step.engine import simulate
from sim.step.more_microbatches import MoreMicrobatches, Orders
from sim.step.sweep import Sweep
from workbench.collector import collector_paused
from workbench.cost.execution import Execution
from workbench.cost.model import CostModel
from workbench.elastic.layerwise import LastBackward
from workbench.explain.timeline import Timeline, timeline
from workbench.memory.account import MemoryTable
from workbench.plan.folded import Folded
from workbench.plan.instance_cache import cached_on_instance
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan
from workbench.schedule.action import Action
from workbench.timing.accept import judged
from workbench.timing.doubts import doubts_of, narrow_doubts
from workbench.timing.interval import Doubt, interval
from workbench.timing.price import Price, price
from workbench.timing.provenance import with_interval, with_provenance
from workbench.timing.shares import shares_of
from workbench.timing.systems import ANY_SYSTEM, by_executor
from workbench.trace import Trace


@dataclass(frozen=True, slots=True)
class IterationJudge:
    """Compares plans by the seconds of their steps, each after all checks."""

    cost: CostModel

    def value(self, plan: Plan) -> float:
        """Seconds of a step by the fast engine; ValueError for a plan that is refused."""
        return candidate_s(plan, self.cost)

    def timeline(self, plan: Plan) -> Timeline:
        """Times of the whole step; ValueError for a plan that is refused."""
        return timeline_of(plan, self.cost)


def predict(
    lowered: Lowered,
    memory: MemoryTable,
    cost: CostModel,
    overlapped: Mapping[Action, LastBackward] = MappingProxyType({}),
) -> Trace:
    """Simulate a plan with the prices of a cost model; the details name what was not measured.

    On a GPU, attention whose tokens ranks share is simulated tile by tile.

    Args:
        overlapped: gradient reductions that start within a backward, see `sim.step.engine.simulate`.

    Raises:
        ValueError: a plan that the profile cannot price, or that deadlocks.
    """
    prices = prices_of(lowered, cost)
    trace = simulate(lowered, prices.duration_s, step_s=prices.step_s, memory=memory, overlapped=overlapped)
    return with_provenance(trace, lowered.plan, cost.profile, prices, beside=cost.beside)


def predict_within(lowered: Lowered, memory: MemoryTable, cost: CostModel) -> Trace:
    """As `predict`, with the 80 % interval of the iteration time; kinds of device share their uncertainties.

    With a profile that has no executor's overheads, that of a training system that was not compared, beside
    those of `by_executor`.

    Complexity: one prediction, and six pricings and sweeps.
    """
    trace, doubts = predict(lowered, memory, cost), doubts_of_plan(lowered, cost)
    if cost.profile.overheads_s:
        return with_interval(trace, interval(trace.iteration_s, doubts))
    is_multimodal = len(lowered.plan.model.modules) > 1
    found = by_executor(trace.iteration_s, doubts, is_multimodal=is_multimodal)
    return with_interval(
        trace, next(one.interval for one in found if one.executor == ANY_SYSTEM.about), found
    )


def doubts_of_plan(lowered: Lowered, cost: CostModel) -> tuple[Doubt, ...]:
    """Uncertainties of a plan's iteration time, by the shares of its costs."""

    def seconds_of(execution: Execution) -> float:
        return step_s(lowered, cost.executed(execution))

    cluster, ranks, settings = lowered.plan.cluster, lowered.plan.ranks, lowered.plan.settings
    shares = shares_of(seconds_of, cost.execution, seconds_of(cost.execution))
    return doubts_of(
        cost.profile,
        shares,
        across_nodes=len(set(map(cluster.node_of, ranks))) > 1,
        unsaid=narrow_doubts(cost.profile, shares, {each: str(each) for each in settings.narrow_products}),
    )


def prices_of(lowered: Lowered, cost: CostModel) -> Price:
    """Prices of the plan's actions, as `predict` uses them."""
    return price(lowered, cost, attention=attention_of(lowered.plan, cost))


def step_s(lowered: Lowered, cost: CostModel) -> float:
    """Seconds of the step as `predict` gives them, without a trace; by the fast engine where possible."""
    prices = prices_of(lowered, cost)
    if _shares_cores(lowered):
        return simulate(lowered, prices.duration_s, step_s=prices.step_s).iteration_s
    return iteration_s(lowered, prices)


@collector_paused()
def candidate_s(plan: Plan | Folded, cost: CostModel) -> float:
    """Seconds of the step of a search candidate as `predict` gives them, after all checks.

    Fast where candidates differ little, as what they share is derived once, and where replicas are equal, as
    one is simulated for all. Meant to be called repeatedly with one cost model, in any process.

    Raises:
        ValueError: as `accept` and `predict`.
    """
    lowered, _ = judged(plan)
    return step_s(lowered, cost)


@collector_paused()
def timeline_of(plan: Plan, cost: CostModel) -> Timeline:
    """Timeline of a plan's step, simulated as for `candidate_s`: of equal replicas, the first one's times.

    Raises:
        ValueError: as `accept` and `predict`.
    """
    lowered, _ = judged(plan)
    prices = prices_of(lowered, cost)
    if _shares_cores(lowered):
        return timeline(lowered, simulate(lowered, prices.duration_s, step_s=prices.step_s))
    return Sweep(lowered).timeline(prices.duration_s, prices.step_s)


def _shares_cores(lowered: Lowered) -> bool:
    """Whether ranks may share cores, which only the engine simulates."""
    return any(node.num_cores is not None for node in lowered.plan.cluster.nodes)


def iteration_s(lowered: Lowered, prices: Price, orders: Orders | None = None) -> float:
    """Seconds of an iteration by the fast engine, without a trace; ValueError as `predict`.

    Args:
        orders: passes of more microbatches than the plan has, see `MoreMicrobatches`.
    """
    if orders is not None:
        return _of_more(lowered, orders).iteration_s(lowered, prices)
    return Sweep(lowered).iteration_s(prices.duration_s, prices.step_s)


@cached_on_instance
def _of_more(lowered: Lowered, orders: Orders) -> MoreMicrobatches:
    """Cached, as a row is timed at several prices."""
    return MoreMicrobatches(lowered, orders)
