"""What an elastic training will come to, said before it starts: its layouts, and seconds a step."""

import pickle
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Protocol

import torch

from runtime.data.batches import microbatch_data
from runtime.elastic.job import ElasticJob, Reduction, plan_step
from runtime.elastic.moves import Move
from runtime.elastic.replan import Replanned, after_loss, after_warning, start_layout
from workbench.cost.hardware import Cluster
from workbench.elastic.layerwise import LastBackward, layerwise
from workbench.elastic.layout import NodeLayout
from workbench.elastic.reconfigure import CannotContinueError
from workbench.elastic.step_events import StepEvents
from workbench.memory.account import MemoryTable
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan
from workbench.schedule.action import STEP, Action
from workbench.strategies.elastic_templates import ElasticTemplates
from workbench.timing.accept import accept
from workbench.timing.provenance import unmeasured_costs
from workbench.trace import Trace

MOMENTS = 2  # of AdamW, for every weight that is trained
TIMES = 3  # that planning and feeding are rehearsed


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutInterval:
    """Steps [first, end) that one layout takes, what leads to it, and the bytes to copy for it."""

    first: int
    end: int
    why: str
    layout: NodeLayout
    copied_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """All intervals in order; `refusal` where training will stop before its last step."""

    intervals: tuple[LayoutInterval, ...]
    refusal: str | None = None


class Predict(Protocol):
    """How a plan's step is simulated: `sim.predict.predict` with the machine's costs."""

    def __call__(
        self, lowered: Lowered, memory: MemoryTable, *, overlapped: Mapping[Action, LastBackward] = ...
    ) -> Trace: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """Seconds of a step of a layout with these pipelines.

    Args:
        simulated_s: of the step's plan, on this machine's cores.
        planning_s: what the supervisor takes to plan a step, as rehearsed; ranks update their weights
            meanwhile.
        feeding_s: until a rank has plan and data, as rehearsed.
        update_s: the slowest rank's, part of `simulated_s`.
        core_s: core seconds of all ranks and the supervisor; sums of gradients, which the simulator keeps
            off the cores, are in it.
        num_cores: that all of them share.
        unmeasured: costs that nobody measured.
    """

    sizes: tuple[int, ...]
    simulated_s: float
    planning_s: float
    feeding_s: float
    update_s: float
    core_s: float
    num_cores: int
    unmeasured: tuple[str, ...]

    @property
    def step_s(self) -> float:
        """From one vote to the next: ranks wait for the next plan where it is later than their update.

        No shorter than all cores need for what there is to do.
        """
        planning_s = max(0.0, self.planning_s - self.update_s)
        return max(self.simulated_s + self.feeding_s + planning_s, self.core_s / self.num_cores)


def forecast_layouts(job: ElasticJob, events: StepEvents, steps: int) -> Forecast:
    """The layouts of all steps, by the rules that training itself follows.

    Raises:
        CannotContinueError: too few nodes to start.
        ValueError: fewer microbatches than pipelines at some step.
    """
    course = _Course(job, start_layout(job, events.start))
    now = LayoutInterval(first=events.first, end=steps, why="start", layout=course.layout, copied_bytes=0)
    found: list[LayoutInterval] = []
    for step in sorted({event.step for event in events.events}):
        if step > now.first:
            found.append(replace(now, end=step))
        try:
            told, copied_bytes = course.follow(events, step)
        except CannotContinueError as error:
            return Forecast(intervals=tuple(found), refusal=f"step {step}: {error}")
        if step == now.first:
            told, copied_bytes = f"{now.why}, {told}", now.copied_bytes + copied_bytes
        now = LayoutInterval(first=step, end=steps, why=told, layout=course.layout, copied_bytes=copied_bytes)
    return Forecast(intervals=(*found, now))


class _Course:
    """The layout as it changes; nodes beyond the number that templates were planned for wait."""

    def __init__(self, job: ElasticJob, layout: NodeLayout) -> None:
        self._job, self.layout = job, layout
        self._waiting: list[str] = []
        self._copied_bytes = 0

    def follow(self, events: StepEvents, step: int) -> tuple[str, int]:
        """Everything that happens around a step, in the order in which training does it.

        Returns:
            What happens in words, and the bytes that are copied for it.

        Raises:
            CannotContinueError: too few nodes, or no copy of a layer, are left.
        """
        now, told = events.at(step), list[str]()
        self._copied_bytes = 0
        self._waiting += now.joins
        if self._waiting:
            self._take_in()
        if now.joins:
            told.append(f"{_names(now.joins)} {'join' if len(now.joins) > 1 else 'joins'}")
        if now.warned:
            self._waiting = [node for node in self._waiting if node not in now.warned]
            leaving = [node for node in now.warned if node in self.layout.nodes]
            self._go(after_warning(self._job, self.layout, leaving))
            told.append(f"{_names(now.warned)} warned")
            self._take_in()
        if now.killed:
            killed = (*now.killed, *now.killed_in_recovery)  # the recovery begins anew from the same layout
            lost = [node for node in killed if node in self.layout.nodes]
            self._waiting = [node for node in self._waiting if node not in killed]
            joining = self._room(len(self.layout.nodes) - len(lost))
            self._go(after_loss(self._job, self.layout, lost, joining))
            self._waiting = self._waiting[len(joining) :]
            told.append(f"{_names(now.killed)} killed")
        if now.killed_in_recovery:
            told.append(f"{_names(now.killed_in_recovery)} killed in recovery")
        return ", ".join(told), self._copied_bytes

    def _go(self, replanned: Replanned) -> None:
        self.layout = replanned.layout
        self._copied_bytes += sum(_moved_bytes(self._job, move) for move in replanned.moves)

    def _room(self, num_nodes: int) -> list[str]:
        return self._waiting[: max(0, self._job.templates.specification.num_nodes - num_nodes)]

    def _take_in(self) -> None:
        joining = self._room(self.layout.num_nodes)
        if joining:
            self._go(after_loss(self._job, self.layout, (), joining))
            self._waiting = self._waiting[len(joining) :]


def _moved_bytes(job: ElasticJob, move: Move) -> int:
    size = job.precision.num_bytes
    span = move.span(_state_bytes(job, move.owner) // size)
    return size * (span.stop - span.start)


def _state_bytes(job: ElasticJob, owner: tuple[str, int]) -> int:
    """Of a layer, or of its parts: weights, and two moments of each where it is trained."""
    name, index = owner
    layer = job.model.module(name).layers[index]
    tensors = MOMENTS + 1 if layer.trainable else 1
    tied = {shared for _, shared in layer.tied}
    sizes = Counter({"": 0})  # laid end to end are all but tied ones
    for each in layer.parameters():
        sizes[each.name if each.name in tied else ""] += each.num_elements
    parts = job.lanes if job.is_sharded else 1
    return tensors * job.precision.num_bytes * sum(-(-size // parts) for size in sizes.values())


def predict_steps(
    found: ElasticTemplates,
    job: ElasticJob,
    forecast: Forecast,
    machine: Cluster,
    predict: Predict,
    looks: int,
) -> Mapping[tuple[int, ...], StepPrediction]:
    """A prediction for every layout of the forecast, by the sizes of its pipelines.

    Args:
        machine: one node with the cores and the memory that all ranks share.
        predict: gives a plan its times.
        looks: steps of a layout's first interval to look at, evenly spread; the mean is taken.

    Raises:
        ValueError: a plan that is refused, or a profile that cannot price it.
    """
    predictions: dict[tuple[int, ...], StepPrediction] = {}
    for interval in forecast.intervals:
        sizes = interval.layout.sizes
        if sizes not in predictions:
            length = interval.end - interval.first
            steps = {interval.first + index * length // looks for index in range(looks)}
            predictions[sizes] = _mean(
                [_predict_step(found, job, interval.layout, step, machine, predict) for step in sorted(steps)]
            )
    return predictions


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What a step costs beside its passes, in this process's own seconds: medians over a few times.

    Args:
        plan: of the step.
        planning_s: to plan, check and pickle it; the supervisor's part.
        feeding_s: until the rank with the most data has the plan and its data; the ranks' part.
        feeding_core_s: the same of all ranks together.
    """

    plan: Plan
    planning_s: float
    feeding_s: float
    feeding_core_s: float


def rehearse(job: ElasticJob, layout: NodeLayout, step: int) -> Rehearsal:
    """Do it in this process, before any other is forked from it.

    Raises:
        ValueError: the plan was refused.
    """
    torch.set_num_threads(1)  # as in the ranks; and whoever is forked must not miss a pool of threads
    planning_s, feeding_s, feeding_core_s = [], [], []
    for _ in range(TIMES):
        start_s = time.process_time()
        plan = plan_step(job, layout, job.batch(step))
        pickled = pickle.dumps(accept(plan)[0])
        planned_s = time.process_time()
        pickle.loads(pickled)
        reading_s = time.process_time() - planned_s
        planning_s.append(planned_s - start_s)
        by_rank_s = [reading_s + _data_s(job, plan, rank) for rank in plan.ranks]
        feeding_s.append(max(by_rank_s))
        feeding_core_s.append(sum(by_rank_s))
    return Rehearsal(
        plan=plan,
        planning_s=median(planning_s),
        feeding_s=median(feeding_s),
        feeding_core_s=median(feeding_core_s),
    )


def _data_s(job: ElasticJob, plan: Plan, rank: int) -> float:
    start_s = time.process_time()
    for stage in plan.stages_on[rank]:
        for microbatch in plan.microbatches_of.get((stage.module, stage.replica), ()):
            microbatch_data(plan, stage, microbatch, job.source, dtype=job.dtype)
    return time.process_time() - start_s


def check_waits(predictions: Iterable[StepPrediction], wait_s: float) -> None:
    """Raise ValueError where a step is predicted to outlast the waits."""
    slowest_s = max((found.step_s for found in predictions), default=0.0)
    if slowest_s > wait_s:
        raise ValueError(
            f"elastic: a step is predicted to take {slowest_s:.3g} s, every wait ends after "
            f"{wait_s:g} s; want --timeout {3 * slowest_s:.0f}"
        )


def _predict_step(
    found: ElasticTemplates,
    job: ElasticJob,
    layout: NodeLayout,
    step: int,
    machine: Cluster,
    predict: Predict,
) -> StepPrediction:
    rehearsal = rehearse(job, layout, step)
    plan = rehearsal.plan
    whole = machine.nodes[0]
    memory_bytes = whole.memory_bytes // whole.num_ranks * len(plan.ranks)
    node = replace(whole, num_ranks=len(plan.ranks), memory_bytes=memory_bytes)
    here = Cluster(name=machine.name, nodes=(node,), intra=machine.intra, inter=machine.inter)
    settings = replace(found.job.settings, modules=plan.settings.modules)
    lowered, memory = accept(replace(plan, cluster=here, settings=settings))
    is_within = job.reduction is Reduction.LAYERWISE and not job.is_sharded
    overlapped = _overlapped(found, lowered) if is_within else {}
    trace = predict(lowered, memory, overlapped=overlapped)
    working_s = _working_s(lowered, memory, predict)
    updates = [span.end_s - span.start_s for span in trace.spans if span.action == STEP]
    return StepPrediction(
        sizes=layout.sizes,
        simulated_s=trace.iteration_s,
        planning_s=rehearsal.planning_s,
        feeding_s=rehearsal.feeding_s,
        update_s=max(updates, default=0.0),
        core_s=working_s + rehearsal.feeding_core_s + rehearsal.planning_s,
        num_cores=node.num_cores or len(plan.ranks),
        unmeasured=tuple(unmeasured_costs(trace)),
    )


def _mean(found: Sequence[StepPrediction]) -> StepPrediction:
    """Of several steps of one layout."""
    return StepPrediction(
        sizes=found[0].sizes,
        simulated_s=fmean(each.simulated_s for each in found),
        planning_s=fmean(each.planning_s for each in found),
        feeding_s=fmean(each.feeding_s for each in found),
        update_s=fmean(each.update_s for each in found),
        core_s=fmean(each.core_s for each in found),
        num_cores=found[0].num_cores,
        unmeasured=tuple(dict.fromkeys(cost for each in found for cost in each.unmeasured)),
    )


def _working_s(lowered: Lowered, memory: MemoryTable, predict: Predict) -> float:
    """Core seconds of a step's actions: their times where no rank waits for a core."""
    cluster = lowered.plan.cluster
    alone = replace(cluster.nodes[0], num_cores=None)
    wide = Cluster(name=cluster.name, nodes=(alone,), intra=cluster.intra, inter=cluster.inter)
    trace = predict(replace(lowered, plan=replace(lowered.plan, cluster=wide)), memory)
    return sum(span.end_s - span.start_s for span in trace.spans)


def _overlapped(found: ElasticTemplates, lowered: Lowered) -> dict[Action, LastBackward]:
    backward_s = {
        owner: layer.backward_s for owner, layer in zip(found.chain.owners, found.layers, strict=True)
    }
    return layerwise(lowered, lambda module, layer: backward_s[module, layer])


def _names(nodes: tuple[str, ...]) -> str:
    return " and ".join(nodes)
