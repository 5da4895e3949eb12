"""DistTrain's data reordering on Cornstarch's stages: samples over replicas, microbatches over time.

Source: DistTrain, section 5. Its orchestration of the modules is not part of this: stages are those of
`cornstarch`, so that what reordering brings can be told apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from workbench.balance.reorder import reorder_by_exchanges, reorder_microbatches, reorder_samples
from workbench.balance.tokens import longest_first_equal_counts
from workbench.cost.model import CostModel
from workbench.data.sample import Sample
from workbench.graph.model_graph import TEXT
from workbench.job import Job
from workbench.plan.build import chunked_microbatches
from workbench.plan.lower import lower
from workbench.plan.plan import Plan
from workbench.plan.price import price
from workbench.schedule.action import COMPUTE, Pass
from workbench.strategies import cornstarch
from workbench.strategies.assembly import scheduled
from workbench.strategies.sample_work import sample_work
from workbench.strategies.stage_counts import Progress, silent

Seconds = NDArray[np.float64]
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
    """[microbatches, stages] seconds of both passes along one chain: encoders side by side, then the LLM."""
    prices = price(lower(plan), cost)
    place = {sample.id: number for number, chunk in enumerate(chunks) for sample in chunk}
    llm = next(module.name for module in plan.model.modules if module.modality == TEXT)
    encoders = [module.name for module in plan.model.modules if module.name != llm]
    depth = max((len(plan.chain[name, replica]) for name in encoders), default=0)
    columns = {
        stage.id: depth - len(plan.chain[name, replica]) + index
        for name in encoders
        for index, stage in enumerate(plan.chain[name, replica])
    }
    columns |= {stage.id: depth + index for index, stage in enumerate(plan.chain[llm, replica])}
    shape = len(chunks), depth + len(plan.chain[llm, replica])
    taken_s = {True: np.zeros((len(plan.stages), shape[0])), False: np.zeros((len(plan.stages), shape[0]))}
    number = {stage.id: row for row, stage in enumerate(plan.stages)}
    for action in plan.program_actions:
        if action.kind in COMPUTE and action.stage in columns:
            stage = plan.stage[action.stage]
            microbatch = plan.microbatches_of[stage.module, replica][action.microbatch or 0]
            at = number[stage.id], place[microbatch.items[0].sample]
            taken_s[action.kind is Pass.F][at] += prices.duration_s(action)
    found = {direction: np.zeros(shape) for direction in taken_s}
    for direction, by_stage_s in taken_s.items():
        for stage_id, column in columns.items():
            np.maximum(
                found[direction][:, column], by_stage_s[number[stage_id]], out=found[direction][:, column]
            )
    return found[True], found[False]
