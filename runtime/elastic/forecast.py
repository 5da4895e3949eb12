"""Forecast of an elastic training, before it starts: its layouts, and the seconds of their steps."""

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
from workbench.float_sum import float_sum
from workbench.memory.account import MemoryTable
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan
from workbench.schedule.action import STEP, Action
from workbench.strategies.elastic_templates import ElasticTemplates
from workbench.timing.accept import accept
from workbench.timing.provenance import unmeasured_costs
from workbench.trace import Trace

MOMENTS = 2  # of AdamW, per trained weight
TIMES = 3  # repetitions of rehearsed planning and feeding


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutInterval:
    """Steps [first, end) with one layout, the cause of the layout, and the bytes that it takes to copy."""

    first: int
    end: int
    why: str
    layout: NodeLayout
    copied_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """All intervals in order; `refusal` says why training will stop before its last step, if it does."""

    intervals: tuple[LayoutInterval, ...]
    refusal: str | None = None


class Predict(Protocol):
    """Simulates a plan's step: `sim.predict.predict` with the machine's costs."""

    def __call__(
        self, lowered: Lowered, memory: MemoryTable, *, overlapped: Mapping[Action, LastBackward] = ...
    ) -> Trace: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """Predicted seconds of a step, of layouts with these pipelines.

    Args:
        simulated_s: of the step's plan, on this machine's cores.
        planning_s: the supervisor's planning of a step, as rehearsed; it overlaps the ranks' updates.
        feeding_s: until a rank has plan and data, as rehearsed.
        update_s: the slowest rank's update, part of `simulated_s`.
        core_s: core seconds of all ranks and the supervisor, including gradient reductions, which occupy no
            cores in the simulator.
        num_cores: shared by all of them.
        unmeasured: costs that were not measured.
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
        """Seconds from one vote to the next; ranks wait for the next plan if it is later than their update.

        At least the core seconds over the number of cores.
        """
        planning_s = max(0.0, self.planning_s - self.update_s)
        return max(self.simulated_s + self.feeding_s + planning_s, self.core_s / self.num_cores)


def forecast_layouts(job: ElasticJob, events: StepEvents, steps: int) -> Forecast:
    """The layouts of all steps, by the same rules as training.

    Raises:
        CannotContinueError: too few nodes to start.
        ValueError: fewer microbatches than pipelines at some step.
    """
    course = _Course(job, start_layout(job, events.start))
    current = LayoutInterval(first=events.first, end=steps, why="start", layout=course.layout, copied_bytes=0)
    intervals: list[LayoutInterval] = []
    for step in sorted({event.step for event in events.events}):
        if step > current.first:
            intervals.append(replace(current, end=step))
        try:
            why, copied_bytes = course.follow(events, step)
        except CannotContinueError as error:
            return Forecast(intervals=tuple(intervals), refusal=f"step {step}: {error}")
        if step == current.first:
            why, copied_bytes = f"{current.why}, {why}", current.copied_bytes + copied_bytes
        current = LayoutInterval(
            first=step, end=steps, why=why, layout=course.layout, copied_bytes=copied_bytes
        )
    return Forecast(intervals=(*intervals, current))


class _Course:
    """The current layout; nodes beyond the number that templates were planned for wait."""

    def __init__(self, job: ElasticJob, layout: NodeLayout) -> None:
        self._job, self.layout = job, layout
        self._waiting: list[str] = []
        self._copied_bytes = 0

    def follow(self, events: StepEvents, step: int) -> tuple[str, int]:
        """Apply the events around a step, in the order of training.

        Returns:
            A description of the events, and the bytes copied for them.

        Raises:
            CannotContinueError: too few nodes are left, or no copy of a layer.
        """
        now, happened = events.at(step), list[str]()
        self._copied_bytes = 0
        self._waiting += now.joins
        if self._waiting:
            self._admit()
        if now.joins:
            happened.append(f"{_names(now.joins)} {'join' if len(now.joins) > 1 else 'joins'}")
        if now.warned:
            self._waiting = [node for node in self._waiting if node not in now.warned]
            leaving = [node for node in now.warned if node in self.layout.nodes]
            self._apply(after_warning(self._job, self.layout, leaving))
            happened.append(f"{_names(now.warned)} warned")
            self._admit()
        if now.killed:
            killed = (*now.killed, *now.killed_in_recovery)  # the recovery restarts from the same layout
            lost = [node for node in killed if node in self.layout.nodes]
            self._waiting = [node for node in self._waiting if node not in killed]
            joining = self._room(len(self.layout.nodes) - len(lost))
            self._apply(after_loss(self._job, self.layout, lost, joining))
            self._waiting = self._waiting[len(joining) :]
            happened.append(f"{_names(now.killed)} killed")
        if now.killed_in_recovery:
            happened.append(f"{_names(now.killed_in_recovery)} killed in recovery")
        return ", ".join(happened), self._copied_bytes

    def _apply(self, replanned: Replanned) -> None:
        self.layout = replanned.layout
        self._copied_bytes += sum(_moved_bytes(self._job, move) for move in replanned.moves)

    def _room(self, num_nodes: int) -> list[str]:
        return self._waiting[: max(0, self._job.templates.specification.num_nodes - num_nodes)]

    def _admit(self) -> None:
        joining = self._room(self.layout.num_nodes)
        if joining:
            self._apply(after_loss(self._job, self.layout, (), joining))
            self._waiting = self._waiting[len(joining) :]


def _moved_bytes(job: ElasticJob, move: Move) -> int:
    size = job.precision.num_bytes
    span = move.span(_state_bytes(job, move.owner) // size)
    return size * (span.stop - span.start)


def _state_bytes(job: ElasticJob, owner: tuple[str, int]) -> int:
    """Bytes of a layer's state, or of its parts: weights, and two moments of each trained one."""
    name, index = owner
    layer = job.model.module(name).layers[index]
    tensors = MOMENTS + 1 if layer.trainable else 1
    tied = {shared for _, shared in layer.tied}
    sizes = Counter({"": 0})  # all but tied ones are concatenated
    for each in layer.parameters():
        sizes[each.name if each.name in tied else ""] += each.num_elements
    parts = job.lanes if job.is_sharded else 1
    return tensors * job.precision.num_bytes * sum(-(-size // parts) for size in sizes.values())


def predict_steps(
    templates: ElasticTemplates,
    job: ElasticJob,
    forecast: Forecast,
    machine: Cluster,
    predict: Predict,
    looks: int,
) -> Mapping[tuple[int, ...], StepPrediction]:
    """Sizes of pipelines -> prediction, for every layout of the forecast.

    Args:
        machine: one node with the cores and the memory that all ranks share.
        predict: simulates a plan.
        looks: number of steps of a layout's first interval to average, evenly spaced.

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
                [
                    _predict_step(templates, job, interval.layout, step, machine, predict)
                    for step in sorted(steps)
                ]
            )
    return predictions


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Overheads of a step besides its passes, in this process: medians over a few repetitions.

    Args:
        plan: of the step.
        planning_s: to plan, check and pickle it, by the supervisor.
        feeding_s: until the rank with the most data has the plan and its data.
        feeding_core_s: the same, summed over all ranks.
    """

    plan: Plan
    planning_s: float
    feeding_s: float
    feeding_core_s: float


def rehearse(job: ElasticJob, layout: NodeLayout, step: int) -> Rehearsal:
    """Plan and feed a step in this process, before any other is forked from it.

    Raises:
        ValueError: the plan was refused.
    """
    torch.set_num_threads(1)  # as in the ranks; and forked processes must not lack a thread pool
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
        feeding_core_s.append(float_sum(by_rank_s))
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
    slowest_s = max((prediction.step_s for prediction in predictions), default=0.0)
    if slowest_s > wait_s:
        raise ValueError(
            f"elastic: a step is predicted to take {slowest_s:.3g} s, every wait ends after "
            f"{wait_s:g} s; want --timeout {3 * slowest_s:.0f}"
        )


def _predict_step(
    templates: ElasticTemplates,
    job: ElasticJob,
    layout: NodeLayout,
    step: int,
    machine: Cluster,
    predict: Predict,
) -> StepPrediction:
    rehearsal = rehearse(job, layout, step)
    plan = rehearsal.plan
    machine_node = machine.nodes[0]
    memory_bytes = machine_node.memory_bytes // machine_node.num_ranks * len(plan.ranks)
    node = replace(machine_node, num_ranks=len(plan.ranks), memory_bytes=memory_bytes)
    cluster = Cluster(name=machine.name, nodes=(node,), intra=machine.intra, inter=machine.inter)
    settings = replace(templates.job.settings, modules=plan.settings.modules)
    lowered, memory = accept(replace(plan, cluster=cluster, settings=settings))
    is_within = job.reduction is Reduction.LAYERWISE and not job.is_sharded
    overlapped = _overlapped(templates, lowered) if is_within else {}
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


def _mean(predictions: Sequence[StepPrediction]) -> StepPrediction:
    """The mean over several steps of one layout."""
    return StepPrediction(
        sizes=predictions[0].sizes,
        simulated_s=fmean(prediction.simulated_s for prediction in predictions),
        planning_s=fmean(prediction.planning_s for prediction in predictions),
        feeding_s=fmean(prediction.feeding_s for prediction in predictions),
        update_s=fmean(prediction.update_s for prediction in predictions),
        core_s=fmean(prediction.core_s for prediction in predictions),
        num_cores=predictions[0].num_cores,
        unmeasured=tuple(dict.fromkeys(cost for prediction in predictions for cost in prediction.unmeasured)),
    )


def _working_s(lowered: Lowered, memory: MemoryTable, predict: Predict) -> float:
    """Core seconds of a step's actions, each with a core of its own."""
    cluster = lowered.plan.cluster
    alone = replace(cluster.nodes[0], num_cores=None)
    wide = Cluster(name=cluster.name, nodes=(alone,), intra=cluster.intra, inter=cluster.inter)
    trace = predict(replace(lowered, plan=replace(lowered.plan, cluster=wide)), memory)
    return float_sum(span.end_s - span.start_s for span in trace.spans)


def _overlapped(templates: ElasticTemplates, lowered: Lowered) -> dict[Action, LastBackward]:
    backward_s = {
        owner: layer.backward_s for owner, layer in zip(templates.chain.owners, templates.layers, strict=True)
    }
    return layerwise(lowered, lambda module, layer: backward_s[module, layer])


def _names(nodes: tuple[str, ...]) -> str:
    return " and ".join(nodes)
