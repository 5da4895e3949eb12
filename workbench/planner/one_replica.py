"""Reduces a job of equal replicas to the job of one of them, whose plan is made once for all."""

from dataclasses import dataclass, replace

from workbench.data.sample import Sample
from workbench.job.job import Job
from workbench.plan.folded import Folded, equal_batches
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.plan import Plan, Settings

_BATCHES: LruCache[tuple[tuple[Sample, ...], ...]] = LruCache(64)


@dataclass(frozen=True, slots=True, kw_only=True)
class OneReplica:
    """The first replica of a job.

    Args:
        job: the job of this replica alone, on the whole cluster.
        batches: samples of every replica.
        settings: settings of the whole job.
    """

    job: Job
    batches: tuple[tuple[Sample, ...], ...]
    settings: Settings

    def folded(self, plan: Plan) -> Folded:
        """The plan of the whole job, from one of `self.job`; ValueError as `Folded`."""
        return Folded(one=plan, batches=self.batches, settings=self.settings)


def one_replica(job: Job) -> OneReplica:
    """The job of the first replica, with the samples that `draft_plan` assigns to it.

    Decisions that depend on memory, such as run-ahead, are made as for a single replica.

    Raises:
        ValueError: modules with their own replicas or rank offsets, pools, a batch that does not divide, or
            replicas whose samples differ.
    """
    if any(part.rank_offset is not None or part.dp not in (None, job.replicas) for part in job.layouts):
        raise ValueError(
            f"job {job.name!r}: modules with their own dp or rank_offset do not form one replica"
        )
    if job.pools:
        raise ValueError(f"job {job.name!r}: pools differ, so replicas on them differ")
    size, replicas = job.microbatch_samples, job.replicas
    if len(job.batch) % (size * replicas):
        raise ValueError(
            f"job {job.name!r}: a batch of {len(job.batch)} samples is not a multiple of {size} x {replicas}"
        )
    batches = _BATCHES.get_or((Identity(job.batch), size, replicas), lambda: _batches(job))
    if not equal_batches(batches):
        raise ValueError(f"job {job.name!r}: samples of its {replicas} replicas differ")
    limit = job.usable_ranks // replicas
    modules = tuple(replace(part, instances=1) for part in job.settings.modules)
    alone = replace(
        job,
        replicas=1,
        batch=batches[0],
        max_ranks=limit,
        layouts=tuple(replace(part, dp=None) for part in job.layouts),
        settings=replace(job.settings, modules=modules),
    )
    return OneReplica(job=alone, batches=batches, settings=job.settings)


def _batches(job: Job) -> tuple[tuple[Sample, ...], ...]:
    size, replicas = job.microbatch_samples, job.replicas
    chunks = [job.batch[first : first + size] for first in range(0, len(job.batch), size)]
    return tuple(
        tuple(sample for chunk in chunks[number::replicas] for sample in chunk) for number in range(replicas)
    )
