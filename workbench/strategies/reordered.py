"""DistTrain's data reordering on Cornstarch's stages: samples over replicas, microbatches over time.

Source: DistTrain, section 5. Its orchestration of the modules is not included: stages are those of
`cornstarch`, so that the effect of reordering can be isolated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from workbench.balance.microbatches.reorder import reorder_by_exchanges, reorder_microbatches, reorder_samples
from workbench.balance.microbatches.reorder_interleaved import reorder_in_programs
from workbench.balance.tokens.policies import longest_first_equal_counts
from workbench.cost.model import CostModel
from workbench.data.sample import Sample
from workbench.job.job import Job
from workbench.plan.microbatches import chunked_microbatches
from workbench.plan.plan import Plan
from workbench.planner.assembly import scheduled
from workbench.planner.sample_work import sample_work
from workbench.planner.stage_counts import Progress, silent
from workbench.planner.strategy_spec import PLAIN_OR_INTERLEAVED, Chooser, OwnSpace, StrategySpec
from workbench.schedule.action import Action, Pass
from workbench.schedule.choice import Schedule, ScheduleKind, rank_block
from workbench.schedule.graph_aware import Consumer, ScheduleNode
from workbench.schedule.programs import programs_of
from workbench.strategies import cornstarch
from workbench.timing.stage_times import StageTimes, stage_times

NAME, EXCHANGES_NAME = "disttrain-reordered", "reordered-by-exchanges"

Reorder = Callable[[StageTimes], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Reordered:
    """Distribute samples over replicas by encoder work (Algorithm 1), then order each replica's microbatches.

    Differs: replicas get equal numbers of samples, which a fixed microbatch size needs; several parallel
    encoders count as one that takes as long as the slowest.

    Args:
        name: of the strategy.
        reorder_of: returns a job's ordering of a replica's microbatches.
    """

    name: str
    reorder_of: Callable[[Job], Reorder]

    def plan(self, job: Job, cost: CostModel, progress: Progress = silent) -> Plan:
        """Plan on Cornstarch's stages; ValueError as `cornstarch.plan`."""
        return self.regroup(cornstarch.plan(job, cost, progress), job, cost)

    def shortlist(self, job: Job, cost: CostModel, progress: Progress, most: int) -> tuple[Plan, ...]:
        """Reorder every plan of `cornstarch.shortlist`; errors as there."""
        return tuple(
            self.regroup(first, job, cost) for first in cornstarch.shortlist(job, cost, progress, most)
        )

    def regroup(self, plan: Plan, job: Job, cost: CostModel) -> Plan:
        """Order the job's batch on the stages of a plan."""
        return _reordered(job, cost, self.name, self.reorder_of(job), plan)


def _reorder_of(job: Job) -> Reorder:
    """Algorithm 2. Under the interleaved schedule it fills as many intervals as its rank has stages.

    These are in that schedule's programs; the rank is the first one with backwards, since no gap opens
    before it.
    """
    interleaves = job.schedule.kind is ScheduleKind.INTERLEAVED
    return partial(_reorder_interleaved, job.schedule) if interleaves else _reorder_plain


def _reorder_plain(times: StageTimes) -> tuple[int, ...]:
    return reorder_microbatches(times.forward_s, times.backward_s)


def _exchanging(_: Job) -> Reorder:
    """Exchanges judged by the whole pipeline. Differs: always that of plain 1F1B, whatever the job's
    schedule.
    """
    return lambda times: reorder_by_exchanges(times.forward_s, times.backward_s)


def _reorder_interleaved(schedule: Schedule, times: StageTimes) -> tuple[int, ...]:
    num = len(times.forward_s)
    programs = chain_programs(
        schedule, times.num_encoder_stages, [bool(column.any()) for column in times.backward_s.T], num
    )
    with_backward = (rank for rank, program in enumerate(programs) if any(a.kind is Pass.B for a in program))
    rank = next(with_backward, None)
    if rank is None:  # no backward, so nothing waits
        return tuple(range(num))
    return reorder_in_programs(times.forward_s, times.backward_s, programs, rank)


def chain_programs(
    schedule: Schedule, num_encoder_stages: int, has_backward: Sequence[bool], num_microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    """Programs of a chain whose encoder stages have one rank each and whose LLM stages share theirs.

    Args:
        schedule: of the LLM's stages.
        num_encoder_stages: stages before them.
        has_backward: by stage.
        num_microbatches: l, of every stage.

    Returns:
        By rank along the chain; microbatches are positions, stages are columns.
    """
    columns = range(len(has_backward))
    needs = tuple((index,) for index in range(num_microbatches))
    nodes = [
        ScheduleNode(
            stage=column,
            num_microbatches=num_microbatches,
            backward=(has_backward[column],) * num_microbatches,
            consumers=tuple(Consumer(later, needs) for later in columns[column + 1 : column + 2]),
        )
        for column in columns
    ]
    encoders, llm = tuple(columns[:num_encoder_stages]), tuple(columns[num_encoder_stages:])
    blocks: dict[int, tuple[int, ...]] = {}
    for index, column in enumerate(llm):
        block = rank_block(schedule, index, len(llm))
        blocks[block] = (*blocks.get(block, ()), column)
    groups = [*((column,) for column in encoders), *(blocks[block] for block in sorted(blocks))]
    programs = programs_of(nodes, groups, schedule, [chain for chain in (encoders, llm) if chain])
    return tuple(programs[group] for group in groups)


def _reordered(job: Job, cost: CostModel, name: str, reorder: Reorder, first: Plan) -> Plan:
    """The job's batch on the stages of a plan, reordered."""
    first = replace(first, batch=job.batch, microbatches=(), programs=(), token_shards=())
    chunks = _chunks(job, cost)
    unordered = _scheduled(job, cost, first, chunks)
    ordered = {
        replica: [of_replica[index] for index in reorder(_stage_times(unordered, cost, replica, of_replica))]
        for replica, of_replica in chunks.items()
    }
    return replace(_scheduled(job, cost, first, ordered), strategy=name)


def _chunks(job: Job, cost: CostModel) -> dict[int, list[tuple[Sample, ...]]]:
    """By replica, its samples in microbatches, largest first."""
    encoder_s = sample_work(job, cost).encoder_s
    groups = reorder_samples(encoder_s, job.replicas, longest_first_equal_counts)
    size = job.microbatch_samples
    return {
        replica: [
            tuple(job.batch[index] for index in members[start : start + size])
            for start in range(0, len(members), size)
        ]
        for replica, members in enumerate(groups)
    }


def _scheduled(job: Job, cost: CostModel, first: Plan, chunks: dict[int, list[tuple[Sample, ...]]]) -> Plan:
    """The same stages with other microbatches and new token shards."""
    draft = replace(first, microbatches=chunked_microbatches(first, chunks))
    return cornstarch.with_balanced_tokens(scheduled(draft, job.schedule, cost))


def _stage_times(plan: Plan, cost: CostModel, replica: int, chunks: Sequence[Sequence[Sample]]) -> StageTimes:
    """Seconds of both passes along one chain."""
    positions = {sample.id: number for number, chunk in enumerate(chunks) for sample in chunk}
    return stage_times(plan, cost, replica, produced=positions, consumed=positions)


AS_PRINTED = Reordered(NAME, _reorder_of)
BY_EXCHANGES = Reordered(EXCHANGES_NAME, _exchanging)
plan, plan_by_exchanges = AS_PRINTED.plan, BY_EXCHANGES.plan

SPEC = StrategySpec(
    name=NAME,
    planner=AS_PRINTED.plan,
    shortlist=AS_PRINTED.shortlist,
    summary="DistTrain's reordering of samples between replicas and of microbatches, as printed",
    regroup=AS_PRINTED.regroup,
    own_space=OwnSpace(degrees=Chooser.EACH, where="DistTrain, section 5", schedules=PLAIN_OR_INTERLEAVED),
)

SPEC_BY_EXCHANGES = StrategySpec(
    name=EXCHANGES_NAME,
    planner=BY_EXCHANGES.plan,
    shortlist=BY_EXCHANGES.shortlist,
    summary="ours: microbatches swapped as long as the whole pipeline gets faster",
    regroup=BY_EXCHANGES.regroup,
    own_space=OwnSpace(degrees=Chooser.EACH, where="ours, after DistTrain", schedules=PLAIN_OR_INTERLEAVED),
)
