"""DistTrain's data reordering on Cornstarch's stages: samples over replicas, microbatches over time.

Source: DistTrain, section 5. Its orchestration of the modules is not part of this: stages are those of
`cornstarch`, so that what reordering brings can be told apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from workbench.balance.reorder import reorder_by_exchanges, reorder_microbatches, reorder_samples
from workbench.balance.tokens import longest_first_equal_counts
from workbench.cost.model import CostModel
from workbench.data.sample import Sample
from workbench.job import Job
from workbench.plan.build import chunked_microbatches
from workbench.plan.plan import Plan
from workbench.strategies import cornstarch
from workbench.strategies.assembly import scheduled
from workbench.strategies.sample_work import sample_work
from workbench.strategies.stage_counts import Progress, silent
from workbench.strategies.stage_times import Seconds, stage_times

Reorder = Callable[[Seconds, Seconds], tuple[int, ...]]


def plan(job: Job, cost: CostModel, progress: Progress = silent) -> Plan:
    """Samples by encoder work over replicas (Algorithm 1), then each replica's microbatches (Algorithm 2).

    Differs: replicas get equal numbers of samples, which a fixed microbatch size needs; several
    encoders side by side count as one that takes as long as the slowest.

    Raises:
        ValueError: as `cornstarch.plan`.
    """
    return _plan(job, cost, "disttrain-reordered", reorder_microbatches, progress)


def plan_by_exchanges(job: Job, cost: CostModel, progress: Progress = silent) -> Plan:
    """The same with microbatches ordered by exchanges judged by the whole pipeline."""
    return _plan(job, cost, "reordered-by-exchanges", reorder_by_exchanges, progress)


def _plan(job: Job, cost: CostModel, name: str, reorder: Reorder, progress: Progress) -> Plan:
    first = cornstarch.plan(job, cost, progress)
    chunks = _chunks(job, cost)
    even = _scheduled(job, cost, first, chunks)
    ordered = {
        replica: [of_replica[index] for index in reorder(*_stage_times(even, cost, replica, of_replica))]
        for replica, of_replica in chunks.items()
    }
    return replace(_scheduled(job, cost, first, ordered), strategy=name)


def _chunks(job: Job, cost: CostModel) -> dict[int, list[tuple[Sample, ...]]]:
    """Replica -> its samples in microbatches, largest first."""
    encoder_s = sample_work(job, cost).encoder_s
    groups = reorder_samples(encoder_s, job.replicas, longest_first_equal_counts)
    size = job.microbatch_samples
    return {
        replica: [
            tuple(job.batch[place] for place in members[start : start + size])
            for start in range(0, len(members), size)
        ]
        for replica, members in enumerate(groups)
    }


def _scheduled(job: Job, cost: CostModel, first: Plan, chunks: dict[int, list[tuple[Sample, ...]]]) -> Plan:
    """The same stages with other microbatches; token shards are dealt out anew."""
    draft = replace(first, microbatches=chunked_microbatches(first, chunks), programs=(), token_shards=())
    return cornstarch.with_balanced_tokens(scheduled(draft, job.schedule, cost))


def _stage_times(
    plan: Plan, cost: CostModel, replica: int, chunks: Sequence[Sequence[Sample]]
) -> tuple[Seconds, Seconds]:
    """[microbatches, stages] seconds of both passes along one chain."""
    places = {sample.id: number for number, chunk in enumerate(chunks) for sample in chunk}
    times = stage_times(plan, cost, replica, produced=places, consumed=places)
    return times.forward_s, times.backward_s
