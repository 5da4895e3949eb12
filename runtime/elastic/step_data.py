"""What an elastic training reads: a folder over and over, or samples drawn anew in every step."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.data.batches import DataSource, SyntheticSource
from runtime.data.dataset import FolderSource, sizes_of, with_data
from runtime.data.planned import examples_text
from workbench.data.sample import Sample
from workbench.job.job import Job
from workbench.plan.codec import digest_of

LOOKS = 4  # at batches of unequal samples, for a prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class StepData:
    """The samples of every step, and where their contents come from.

    Args:
        job: with the first batch.
        batch: samples of a step, by how many were taken before.
        looks: steps that a prediction should look at: 1 where all batches have equal samples.
        name: that tells what the steps read from what those of another training read.
    """

    job: Job
    batch: Callable[[int], tuple[Sample, ...]]
    source: DataSource
    looks: int
    name: str


def drawn(job: Job, seed: int) -> StepData:
    """Samples as long as the job's, with contents of their own in every step."""
    apart = 1 + max(sample.id for sample in job.batch)

    def batch(step: int) -> tuple[Sample, ...]:
        return tuple(replace(sample, id=apart * step + sample.id) for sample in job.batch)

    name = f"random samples {digest_of(job.batch):.16}"
    return StepData(job=job, batch=batch, source=SyntheticSource(seed), looks=1, name=name)


def read_folder(job: Job, folder: Path) -> StepData:
    """The folder's samples in their order, from the first again after the last.

    Raises:
        ValueError: fewer samples than a batch has, or of a kind that no encoder reads.
    """
    source, size = FolderSource(folder), len(job.batch)
    records = tuple(source.records.values())
    samples = sizes_of(records, folder, job.model)

    def batch(step: int) -> tuple[Sample, ...]:
        return tuple(samples[(step * size + index) % len(samples)] for index in range(size))

    name = examples_text(records, size)
    return StepData(job=with_data(job, folder), batch=batch, source=source, looks=LOOKS, name=name)
