"""Simulates a row's step: the plan of the mode's strategy with the printed degrees."""

from dataclasses import dataclass, replace
from functools import cache

from experiments.mimo.models import LLM, VISION, Assumptions, Images, Workload, calibrated, job_of
from sim.predict import iteration_s
from sim.step.wire import wires
from workbench.cost.model import CostModel
from workbench.cost.roofline import Work
from workbench.memory.account import memory_table, peak_bytes
from workbench.model.layer import Layer, LayerKind
from workbench.plan.folded import judged_part
from workbench.plan.lower import lower
from workbench.plan.lowered import Direction, Lowered
from workbench.plan.plan import Plan
from workbench.plan.work import work_of
from workbench.planner.assembly import in_phases
from workbench.planner.layout_choice import LayoutChoice, Mode
from workbench.planner.layout_plan import job_with
from workbench.planner.layout_step import LayoutSteps
from workbench.strategies import megatron_heterogeneous, megatron_homogeneous
from workbench.timing.attention import AttentionCall, AttentionTime
from workbench.timing.price import Price, price


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A simulated step.

    Args:
        step_s: the whole iteration.
        passes_s: passes and sums of gradients, without the update.
    """

    step_s: float
    passes_s: float


@dataclass(frozen=True, slots=True)
class WholeImages:
    """Attention of encoders whose context-parallel ranks each have whole images: no keys travel.

    Args:
        cost: the machine.
    """

    cost: CostModel

    def __call__(self, call: AttentionCall) -> AttentionTime | None:
        """Times with an even share of the images on each rank; None for the LLM."""
        if call.stage.cp == 1 or call.stage.module != VISION:
            return None
        rows = work_of(call.plan, call.microbatch).rows
        share = Work(rows[: -(-len(rows) // call.stage.cp)])
        alone = Layer(name=call.operator.name, kind=LayerKind.BLOCK, operators=(call.operator,), out_width=1)
        time = self.cost.layer_time(
            alone, share, tp=call.stage.tp, cp=1, precision=call.plan.settings.precision
        )
        return AttentionTime(forward_s=time.forward_s, backward_s=time.input_grad_s)


def plan_of(workload: Workload, layout: LayoutChoice, assumed: Assumptions, cost: CostModel) -> Plan:
    """The strategy's plan of the printed layout, its stages balanced for the machine that runs it.

    Raises:
        ValueError: a layout that the strategy refuses.
    """
    job = job_of(workload, assumed, _copies(layout, assumed))
    job = job_with(job, layout, LayoutSteps(job, cost).step(layout))
    if layout.mode is Mode.HOMOGENEOUS:
        return megatron_homogeneous.of_layout(job, layout, cost)
    if layout.mode is Mode.COLOCATED:
        job = in_phases(job, megatron_heterogeneous.NAME)
    return megatron_heterogeneous.plan(job, cost)


def lowered_of(workload: Workload, layout: LayoutChoice, assumed: Assumptions, cost: CostModel) -> Lowered:
    """The lowered plan, with one replica for all equal ones."""
    return lower(judged_part(plan_of(workload, layout, assumed, cost)))


def prices_of(lowered: Lowered, cost: CostModel, assumed: Assumptions) -> Price:
    """The prices of a lowered plan's actions."""
    attention = WholeImages(cost) if assumed.under_context is Images.WHOLE else None
    has_parts = any(stage.cp > 1 and stage.module == VISION for stage in lowered.plan.stages)
    return price(lowered, cost, attention=attention if has_parts else None)


def passes_s(lowered: Lowered, prices: Price) -> float:
    """Seconds of passes and sums of gradients, without the update."""
    return iteration_s(lowered, replace(prices, steps_s=dict.fromkeys(prices.steps_s, 0.0)))


@cache
def step_of(workload: Workload, layout: LayoutChoice, assumed: Assumptions) -> Step:
    """The step under a layout on the calibrated machine, whether or not it fits."""
    lowered = lowered_of(workload, layout, assumed, calibrated())
    prices = prices_of(lowered, calibrated(), assumed)
    return Step(step_s=iteration_s(lowered, prices), passes_s=passes_s(lowered, prices))


def peak_of(workload: Workload, layout: LayoutChoice, assumed: Assumptions) -> int:
    """Peak bytes of the fullest rank."""
    lowered = lowered_of(workload, layout, assumed, calibrated())
    return max(peak_bytes(lowered, memory_table(lowered)).values())


def _copies(layout: LayoutChoice, assumed: Assumptions) -> int:
    whole = layout.mode is Mode.HOMOGENEOUS and assumed.under_context is Images.WHOLE
    return layout.llm.cp if whole else 1


def boundary_of(lowered: Lowered) -> tuple[float, float]:
    """Messages between modules in a step.

    Seconds of the busiest port, which carries features and their gradients, and bytes of features sent to
    the ranks of one replica of the LLM."""
    network = wires(lowered)
    busy_s: dict[int, float] = {}
    num_bytes = 0.0
    for row, transmit_s, latency_s, port in zip(
        lowered.transfers, network.transmit_s, network.latency_s, network.port, strict=True
    ):
        if row.edge == f"{VISION}>{LLM}" and port >= 0:
            busy_s[port] = busy_s.get(port, 0.0) + float(transmit_s + latency_s)
            arrives = len(row.destination_ranks) if row.direction is Direction.FORWARD else 0
            num_bytes += arrives * row.num_bytes
    return max(busy_s.values(), default=0.0), num_bytes / len(lowered.plan.replicas(LLM))
