"""Goodput: useful samples per second under node failures, by the best way for a plan to recover."""

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from workbench.cost.model import CostModel
from workbench.cost.node_copy import node_copy_s
from workbench.elastic.availability import Availability
from workbench.float_sum import float_sum
from workbench.job.job import Job
from workbench.memory.checkpoint_bytes import checkpoint_bytes
from workbench.memory.stage import GRADIENTS, state_of
from workbench.plan.plan import Plan
from workbench.schedule.choice import Schedule
from workbench.search.objectives import template_plans
from workbench.search.objectives.fewer_nodes import (
    nodes_of_first,
    num_nodes,
    num_pipelines,
    pipelines_of_copy,
    with_pipelines,
)
from workbench.search.objectives.plan_judge import Judged, Report, unheard
from workbench.search.objectives.recovery import (
    FailureSim,
    Recovering,
    Recovery,
    RecoveryCosts,
    Saving,
    daly_s,
)
from workbench.search.objectives.step_times import PassedOverError, StepJudge, StepTimes, standard_error
from workbench.strategies.elastic_templates import ElasticTemplates
from workbench.timing.price import HOST_BYTES_PER_S

FARTHER = 2**0.5  # ratio of successive checkpoint intervals to try
MOST_TRIED = 4  # on either side of the closed form's interval

NodesAndStep = tuple[int, float]  # number of nodes, seconds of a step on them
StepsOnNodes = Mapping[int, NodesAndStep]  # by number of pipelines; with templates, by number of nodes


@dataclass(frozen=True, slots=True)
class SimulatedRecovery:
    """Useful samples per second with a way to recover, by trace."""

    way: Recovery
    rates: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.rates)


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Useful samples per second, by the best way for a plan to recover.

    Every way runs the plan on all its nodes; on fewer, it runs as many of the pipelines as fit, with the
    whole batch, each simulated. A job with its state in memory stops below a minimum number of pipelines;
    one with checkpoints saves as often as Daly's closed form says, or up to four times more or less often
    as long as that improves goodput. Either takes in returning nodes at once or at the next loss.

    Args:
        job, cost: of the plans.
        times: judges the steps of a plan on fewer nodes.
        simulate: simulates failures.
        traces: of nodes that leave and return, the same for every plan.
        until_s: simulated time per trace.
        mtbf_s: mean time between two losses anywhere in the cluster.
        costs: of a loss.
    """

    job: Job
    cost: CostModel
    times: StepJudge
    simulate: FailureSim
    traces: Sequence[Availability]
    until_s: float
    mtbf_s: float
    costs: RecoveryCosts

    def __call__(self, plan: Plan, times: StepTimes, schedule: Schedule | None) -> Judged:
        """Judge a plan by its best recovery; ValueError where no sample counts."""
        return self.reporting(plan, times, schedule, unheard)

    def reporting(self, plan: Plan, times: StepTimes, schedule: Schedule | None, report: Report) -> Judged:
        """As `__call__`; reports each number of nodes, and each trace by a way to recover, as it begins."""
        return self._best(plan, times, self.on_nodes(plan, times, schedule, report), report)

    def within(self, plan: Plan, times: StepTimes, limit: float) -> Judged:
        """As `__call__`; `PassedOverError` where the value is at least the limit even without failures.

        A plan whose own step is below the limit is always evaluated in full.
        """
        steps = self.on_nodes(plan, times, None)
        if times.step_s / len(plan.batch) >= limit and self.least(plan, steps) >= limit:
            raise PassedOverError
        return self._best(plan, times, steps, unheard)

    def _best(self, plan: Plan, times: StepTimes, steps: StepsOnNodes, report: Report) -> Judged:
        simulated = [self._simulated(recovery, report) for recovery in self.ways(plan, steps)]
        with_checkpoints = [
            candidate for candidate in simulated if candidate.way.checkpoint_every is not None
        ]
        if with_checkpoints:
            start = max(with_checkpoints, key=lambda candidate: candidate.mean)
            simulated.append(self._tuned(start, report))
        best = max(simulated, key=lambda candidate: candidate.mean)
        if best.mean <= 0:
            raise ValueError(
                f"goodput: no sample counts on {len(self.job.cluster.nodes)} nodes with a loss every "
                f"{self.mtbf_s:.4g} s; want checkpoints that are saved faster, or a plan on fewer nodes"
            )
        recovery = best.way
        figures = {
            "useful_samples_per_s": best.mean,
            "useful_standard_error": standard_error(best.rates),
            "useful_share": best.mean * times.step_s / len(plan.batch),
            "faster_on_nodes": _faster_on_nodes(times.step_s, steps.values()),
            "recovery": recovery.kind.value,
            "checkpoint_every": recovery.checkpoint_every,
            "checkpoint_every_daly": self._daly_steps(recovery) if recovery.checkpoint_every else None,
            "takes_in": recovery.takes_in,
            "spare_nodes": len(self.job.cluster.nodes) - num_nodes(plan),
        }
        return Judged(value=1 / best.mean, times=times, figures=figures)

    def least(self, plan: Plan, steps: StepsOnNodes) -> float:
        """Lower bound on the value: seconds per sample if all present nodes always worked; inf if none ever
        run.

        A job always trains on some of the present nodes, since a member that leaves ends the iteration;
        rates do not fall with the number of nodes, whichever pipelines remain; and useful samples are some
        of those trained. So goodput is at most the rate on all present nodes, averaged over the trace. This
        requires the steps on fewer nodes: with less waiting, they may be shorter than the plan's own.
        """
        most = self.mean_of(self._rates(plan, steps.values()))
        return 1 / most if most else math.inf

    def mean_of(self, by_nodes: Sequence[float]) -> float:
        """Mean over time and traces of a quantity by number of nodes, [n + 1], up to `until_s`."""
        return statistics.fmean(self._mean_over(trace, by_nodes) for trace in self.traces)

    def _mean_over(self, trace: Availability, by_nodes: Sequence[float]) -> float:
        starts = [(min(time_s, self.until_s), by_nodes[count]) for time_s, count in trace.num_nodes()]
        spans = pairwise((*starts, (self.until_s, 0.0)))
        return float_sum(value * (end_s - begin_s) for (begin_s, value), (end_s, _) in spans) / self.until_s

    def on_nodes(
        self, plan: Plan, times: StepTimes, schedule: Schedule | None, report: Report = unheard
    ) -> StepsOnNodes:
        """Steps on the numbers of nodes with which the plan may continue."""
        if plan.strategy == template_plans.NAME:
            return self._of_templates(plan, times, report)
        return self._of_pipelines(plan, times, schedule, report)

    def _simulated(self, recovery: Recovery, report: Report) -> SimulatedRecovery:
        rates = []
        for number, trace in enumerate(self.traces, 1):
            report(f"failures of trace {number} of {len(self.traces)}, {_way_text(recovery)}")
            rates.append(self.simulate(recovery, trace, self.until_s))
        return SimulatedRecovery(recovery, tuple(rates))

    def _tuned(self, start: SimulatedRecovery, report: Report) -> SimulatedRecovery:
        """Vary the checkpoint interval in both directions as long as goodput improves."""
        every, best = start.way.checkpoint_every, start
        assert every is not None, "it saves"
        for direction in (FARTHER, 1 / FARTHER):
            for power in range(1, MOST_TRIED + 1):
                steps = max(1, round(every * direction**power))
                candidate = self._simulated(replace(start.way, checkpoint_every=steps), report)
                if candidate.mean <= best.mean:
                    break
                best = candidate
        return best

    def ways(self, plan: Plan, steps: StepsOnNodes) -> Iterator[Recovery]:
        """The ways in which the plan can recover, with checkpoints as often as the closed form says.

        Checkpoints are omitted where in-memory copies continue as fast on all numbers of nodes that ever
        occur and recover sooner: they save nothing and lose no more than the interrupted step.
        """
        if plan.strategy == template_plans.NAME:
            yield from self._in_memory(plan, steps.values(), self._templates.copy_s)
            return
        copy_pipelines, bytes_by_rank = pipelines_of_copy(plan), _state_bytes(plan)
        enough = [step for kept, step in steps.items() if kept // copy_pipelines >= self.costs.copies]
        in_memory = (
            list(self._in_memory(plan, enough, node_copy_s(plan.cluster, bytes_by_rank))) if enough else []
        )
        saving = list(self._from_checkpoints(plan, steps.values(), bytes_by_rank))
        yield from in_memory
        if not in_memory or self._may_be_better(saving[0], in_memory[0]):
            yield from saving

    def _may_be_better(self, saving: Recovery, in_memory: Recovery) -> bool:
        counts = {len(self.job.cluster.nodes), *self._counts}
        is_faster = any(saving.samples_per_s[n] > in_memory.samples_per_s[n] for n in counts)
        return is_faster or saving.recover_s < in_memory.recover_s

    def _of_pipelines(
        self, plan: Plan, times: StepTimes, schedule: Schedule | None, report: Report
    ) -> StepsOnNodes:
        """By number of remaining pipelines: as many as run on each number of nodes that ever occurs."""
        num_all = num_pipelines(plan)
        steps = {num_all: (num_nodes(plan), times.step_s)}
        unserved = {count for count in self._counts if count < num_nodes(plan)}
        for kept in range(num_all - 1, 0, -1):
            nodes = nodes_of_first(plan, kept)
            if nodes > max(unserved, default=0):
                continue
            report(_nodes_text(nodes))
            try:
                fewer = with_pipelines(plan, kept, schedule or self.job.schedule, self.cost)
                steps[kept] = nodes, self.times(fewer, schedule).step_s
            except ValueError:  # one fewer may work; otherwise the job waits for nodes
                continue
            unserved = {count for count in unserved if count < nodes}
        return steps

    def _of_templates(self, plan: Plan, times: StepTimes, report: Report) -> StepsOnNodes:
        """By the numbers of nodes that ever occur."""
        templates = self._templates
        most, least = num_nodes(plan), templates.planned.specification.threshold
        fewer = [count for count in sorted(self._counts) if least <= count < most]
        steps = {most: (most, times.step_s)}
        for count in fewer:
            report(_nodes_text(count))
            steps[count] = count, self.times(template_plans.plan_of_templates(templates, count), None).step_s
        return steps

    @cached_property
    def _templates(self) -> ElasticTemplates:
        return template_plans.templates_of(self.job, self.cost, self.costs.copies - 1)

    @cached_property
    def _counts(self) -> set[int]:
        return {count for trace in self.traces for _, count in trace.num_nodes()}

    def _from_checkpoints(
        self, plan: Plan, by_nodes: Collection[NodesAndStep], bytes_by_rank: Mapping[int, int]
    ) -> Iterator[Recovery]:
        """If written in the background, training stops only for the copy to the host, as long as the
        largest rank's.
        """
        storage_s = checkpoint_bytes(plan.model, plan.settings) / self.costs.storage_bytes_per_s
        blocking_s, background_s = storage_s, 0.0
        if self.costs.saving is Saving.BEHIND:
            blocking_s, background_s = max(bytes_by_rank.values()) / HOST_BYTES_PER_S, blocking_s
        for takes_in in (True, False):
            recovery = Recovery(
                kind=Recovering.CHECKPOINT,
                samples_per_s=self._rates(plan, by_nodes),
                samples_per_step=len(plan.batch),
                recover_s=self.costs.restart_s + storage_s,
                checkpoint_every=1,
                save_s=blocking_s,
                write_s=background_s,
                takes_in=takes_in,
            )
            yield replace(
                recovery,
                checkpoint_every=max(self._daly_steps(recovery), math.ceil(background_s / recovery.step_s)),
            )

    def _in_memory(self, plan: Plan, by_nodes: Collection[NodesAndStep], copy_s: float) -> Iterator[Recovery]:
        for takes_in in (True, False):
            yield Recovery(
                kind=Recovering.REPLICAS,
                samples_per_s=self._rates(plan, by_nodes),
                samples_per_step=len(plan.batch),
                recover_s=self.costs.notice_s + copy_s,
                takes_in=takes_in,
            )

    def _rates(self, plan: Plan, by_nodes: Collection[NodesAndStep]) -> tuple[float, ...]:
        """By number of nodes: samples per second of the shortest step that runs on so many."""
        return tuple(
            max(
                (len(plan.batch) / step_s for nodes, step_s in by_nodes if nodes <= count),
                default=0.0,
            )
            for count in range(len(self.job.cluster.nodes) + 1)
        )

    def _daly_steps(self, recovery: Recovery) -> int:
        """Daly's interval in steps; failures of spare nodes do not interrupt the job."""
        own_s = min(self.mtbf_s * len(self.job.cluster.nodes) / recovery.num_used, self.until_s)
        return max(1, round(daly_s(recovery.save_s, own_s) / recovery.step_s))


def _way_text(recovery: Recovery) -> str:
    every = recovery.checkpoint_every
    return f"{recovery.kind}" if every is None else f"{recovery.kind} every {every:,} steps"


def _nodes_text(count: int) -> str:
    return f"its step on {count} node{'s' * (count > 1)}"


def _faster_on_nodes(step_s: float, by_nodes: Collection[NodesAndStep]) -> int | None:
    """Number of nodes of the shortest step if it is shorter than the plan's own; the fewest of equals."""
    nodes, shortest_s = min(by_nodes, key=lambda each: (each[1], each[0]))
    return nodes if shortest_s < step_s else None


def _state_bytes(plan: Plan) -> dict[int, int]:
    """Bytes of weights and optimizer state of every rank."""
    return {
        rank: sum(size for _, kind, size in state_of(plan, rank) if kind.part != GRADIENTS)
        for rank in plan.ranks
    }
