"""Goodput: samples a second that count, where nodes fail; how a plan recovers is part of what is chosen."""

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from workbench.cost.model import CostModel
from workbench.cost.node_copy import node_copy_s
from workbench.elastic.availability import Availability
from workbench.job.job import Job
from workbench.memory.layer import state_bytes_of
from workbench.memory.stage import GRADIENTS, state_of
from workbench.plan.plan import Plan
from workbench.schedule.choice import Schedule
from workbench.search.objectives import template_plans
from workbench.search.objectives.checkpoint_interval import daly_s
from workbench.search.objectives.fewer_nodes import (
    nodes_of_first,
    num_nodes,
    num_pipelines,
    pipelines_of_copy,
    with_pipelines,
)
from workbench.search.objectives.plan_judge import Judged
from workbench.search.objectives.recovery import (
    FailureSim,
    Recovering,
    Recovery,
    RecoveryCosts,
    Saving,
)
from workbench.search.objectives.step_times import PassedOverError, StepJudge, StepTimes, standard_error
from workbench.strategies.elastic_templates import ElasticTemplates
from workbench.timing.price import HOST_BYTES_PER_S

FARTHER = 2**0.5  # the next interval between checkpoints that is tried
MOST_TRIED = 4  # to either side of the closed form's

Going = tuple[int, float]  # number of nodes, seconds of a step on them
OnNodes = Mapping[int, Going]  # by number of pipelines; of templates, by number of nodes


@dataclass(frozen=True, slots=True)
class Followed:
    """Useful samples a second of a way to recover, by trace."""

    way: Recovery
    rates: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.rates)


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Most samples a second that count, of the ways in which a plan can recover.

    Every way runs the plan on all its nodes, and on fewer of them as many of its pipelines as go on those,
    with the whole batch, each simulated. A job whose state is in memory stops below so many pipelines; one
    with checkpoints saves as often as Daly's closed form says, or up to four times more or less often as long
    as that gets it further; either takes nodes in at once or at the next loss.

    Args:
        job, cost: of the plans.
        times: of a plan on fewer nodes.
        simulate: the failures.
        traces: of nodes that leave and come back, the same for every plan.
        until_s: how far each is followed.
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
        """ValueError where not one sample counts."""
        return self._best(plan, times, self.on_nodes(plan, times, schedule))

    def within(self, plan: Plan, times: StepTimes, limit: float) -> Judged:
        """As `__call__`; `PassedOverError` where the value is at least the limit whatever fails.

        A plan whose own step leaves room below the limit is looked at as a whole.
        """
        on = self.on_nodes(plan, times, None)
        if times.step_s / len(plan.batch) >= limit and self.least(plan, on) >= limit:
            raise PassedOverError
        return self._best(plan, times, on)

    def _best(self, plan: Plan, times: StepTimes, on: OnNodes) -> Judged:
        tried = [self._followed(way) for way in self.ways(plan, on)]
        saving = [each for each in tried if each.way.checkpoint_every is not None]
        if saving:
            tried.append(self._climbed(max(saving, key=lambda each: each.mean)))
        best = max(tried, key=lambda each: each.mean)
        if best.mean <= 0:
            raise ValueError(
                f"goodput: no sample counts on {len(self.job.cluster.nodes)} nodes with a loss every "
                f"{self.mtbf_s:.4g} s; want checkpoints that are saved faster, or a plan on fewer nodes"
            )
        way = best.way
        figures = {
            "useful_samples_per_s": best.mean,
            "useful_standard_error": standard_error(best.rates),
            "useful_share": best.mean * times.step_s / len(plan.batch),
            "recovery": way.kind.value,
            "checkpoint_every": way.checkpoint_every,
            "checkpoint_every_daly": self._daly_steps(way) if way.checkpoint_every else None,
            "takes_in": way.takes_in,
            "spare_nodes": len(self.job.cluster.nodes) - num_nodes(plan),
        }
        return Judged(value=1 / best.mean, times=times, figures=figures)

    def least(self, plan: Plan, on: OnNodes) -> float:
        """Seconds of a sample if all nodes that are there worked all the time; inf where none ever goes on.

        No value of the plan is below. A job trains at any time on some of the nodes that are there, as a
        member that leaves ends the iteration; rates do not fall with the number of nodes, whichever pipelines
        go on; and what counts is part of what is trained. So it is no more than the rate of all nodes,
        summed over the trace. Steps on fewer nodes have to be known for that: where they wait less for
        one another, they may be shorter than the plan's own.
        """
        most = self.mean_of(self._rates(plan, on.values()))
        return 1 / most if most else math.inf

    def mean_of(self, by_nodes: Sequence[float]) -> float:
        """Of what there is by number of nodes, [n + 1], over time and traces, as far as they are followed."""
        return statistics.fmean(self._mean_over(trace, by_nodes) for trace in self.traces)

    def _mean_over(self, trace: Availability, by_nodes: Sequence[float]) -> float:
        starts = [(min(time_s, self.until_s), by_nodes[count]) for time_s, count in trace.num_nodes()]
        spans = pairwise((*starts, (self.until_s, 0.0)))
        return sum(held * (end_s - begin_s) for (begin_s, held), (end_s, _) in spans) / self.until_s

    def on_nodes(self, plan: Plan, times: StepTimes, schedule: Schedule | None) -> OnNodes:
        """Steps that some way to recover may go on with."""
        if plan.strategy == template_plans.NAME:
            return self._of_templates(plan, times)
        return self._of_pipelines(plan, times, schedule)

    def _followed(self, way: Recovery) -> Followed:
        return Followed(way, tuple(self.simulate(way, trace, self.until_s) for trace in self.traces))

    def _climbed(self, start: Followed) -> Followed:
        """With checkpoints more or less often, as long as it gets further."""
        every, best = start.way.checkpoint_every, start
        assert every is not None, "it saves"
        for direction in (FARTHER, 1 / FARTHER):
            for number in range(1, MOST_TRIED + 1):
                steps = max(1, round(every * direction**number))
                found = self._followed(replace(start.way, checkpoint_every=steps))
                if found.mean <= best.mean:
                    break
                best = found
        return best

    def ways(self, plan: Plan, on: OnNodes) -> Iterator[Recovery]:
        """The ways in which the plan can recover, checkpoints as often as the closed form says.

        None from checkpoints where copies in memory go on as fast on all nodes that are ever there and are
        sooner at it: they save nothing and lose no more than the step that was cut off.
        """
        if plan.strategy == template_plans.NAME:
            yield from self._in_memory(plan, on.values(), self._templates.copy_s)
            return
        of_copy, held = pipelines_of_copy(plan), _held_bytes(plan)
        enough = [found for kept, found in on.items() if kept // of_copy >= self.costs.copies]
        in_memory = list(self._in_memory(plan, enough, node_copy_s(plan.cluster, held))) if enough else []
        saving = list(self._from_checkpoints(plan, on.values(), held))
        yield from in_memory
        if not in_memory or self._may_be_better(saving[0], in_memory[0]):
            yield from saving

    def _may_be_better(self, saving: Recovery, in_memory: Recovery) -> bool:
        counts = {len(self.job.cluster.nodes), *self._counts}
        is_faster = any(saving.samples_per_s[n] > in_memory.samples_per_s[n] for n in counts)
        return is_faster or saving.recover_s < in_memory.recover_s

    def _of_pipelines(self, plan: Plan, times: StepTimes, schedule: Schedule | None) -> OnNodes:
        """By number of pipelines left: as many as go on each number of nodes that is ever there."""
        whole = num_pipelines(plan)
        found = {whole: (num_nodes(plan), times.step_s)}
        unserved = {count for count in self._counts if count < num_nodes(plan)}
        for kept in range(whole - 1, 0, -1):
            nodes = nodes_of_first(plan, kept)
            if nodes > max(unserved, default=0):
                continue
            try:
                fewer = with_pipelines(plan, kept, schedule or self.job.schedule, self.cost)
                found[kept] = nodes, self.times(fewer, schedule).step_s
            except ValueError:  # one fewer may go; else it waits for nodes
                continue
            unserved = {count for count in unserved if count < nodes}
        return found

    def _of_templates(self, plan: Plan, times: StepTimes) -> OnNodes:
        """By the numbers of nodes that ever are there."""
        templates = self._templates
        most, least = num_nodes(plan), templates.planned.specification.threshold
        fewer = [count for count in sorted(self._counts) if least <= count < most]
        plans = (template_plans.plan_of_templates(templates, count) for count in fewer)
        steps_s = (self.times(each, None).step_s for each in plans)
        on = zip((most, *fewer), (times.step_s, *steps_s), strict=True)
        return {count: (count, step_s) for count, step_s in on}

    @cached_property
    def _templates(self) -> ElasticTemplates:
        return template_plans.templates_of(self.job, self.cost, self.costs.copies - 1)

    @cached_property
    def _counts(self) -> set[int]:
        return {count for trace in self.traces for _, count in trace.num_nodes()}

    def _from_checkpoints(
        self, plan: Plan, by_nodes: Collection[Going], held: Mapping[int, int]
    ) -> Iterator[Recovery]:
        """Written behind, training stops until the host has what is saved: of no rank more than it holds."""
        saved, loaded = checkpoint_bytes(plan)
        rate = self.costs.storage_bytes_per_s
        stops_s, behind_s = saved / rate, 0.0
        if self.costs.saving is Saving.BEHIND:
            stops_s, behind_s = max(held.values()) / HOST_BYTES_PER_S, stops_s
        for takes_in in (True, False):
            way = Recovery(
                kind=Recovering.CHECKPOINT,
                samples_per_s=self._rates(plan, by_nodes),
                samples_per_step=len(plan.batch),
                recover_s=self.costs.restart_s + loaded / rate,
                checkpoint_every=1,
                save_s=stops_s,
                write_s=behind_s,
                takes_in=takes_in,
            )
            yield replace(way, checkpoint_every=max(self._daly_steps(way), math.ceil(behind_s / way.step_s)))

    def _in_memory(self, plan: Plan, by_nodes: Collection[Going], copy_s: float) -> Iterator[Recovery]:
        for takes_in in (True, False):
            yield Recovery(
                kind=Recovering.REPLICAS,
                samples_per_s=self._rates(plan, by_nodes),
                samples_per_step=len(plan.batch),
                recover_s=self.costs.notice_s + copy_s,
                takes_in=takes_in,
            )

    def _rates(self, plan: Plan, by_nodes: Collection[Going]) -> tuple[float, ...]:
        """By number of nodes: of those steps that go on them, the shortest."""
        return tuple(
            max(
                (len(plan.batch) / step_s for nodes, step_s in by_nodes if nodes <= count),
                default=0.0,
            )
            for count in range(len(self.job.cluster.nodes) + 1)
        )

    def _daly_steps(self, way: Recovery) -> int:
        """Spares fail beside the job."""
        own_s = min(self.mtbf_s * len(self.job.cluster.nodes) / way.num_used, self.until_s)
        return max(1, round(daly_s(way.save_s, own_s) / way.step_s))


def _held_bytes(plan: Plan) -> dict[int, int]:
    """Weights and optimizer state of every rank."""
    return {
        rank: sum(size for _, kind, size in state_of(plan, rank) if kind.part != GRADIENTS)
        for rank in plan.ranks
    }


def checkpoint_bytes(plan: Plan | Job) -> tuple[int, int]:
    """(saved, loaded) of the whole model: trained weights with their optimizer's state; and frozen ones.

    Complexity: O(parameters).
    """
    size = state_bytes_of(plan.settings)
    trained: dict[tuple[str, str], int] = {}
    frozen: dict[tuple[str, str], int] = {}
    for module in plan.model.modules:
        for layer in module.layers:
            kind = trained if layer.trainable else frozen
            kind.update({(module.name, each.name): each.num_elements for each in layer.parameters()})
    saved = sum(trained.values()) * (size.weight + size.optimizer)
    return saved, saved + sum(frozen.values()) * size.weight
