"""Data of an elastic training: a folder read repeatedly, or new random samples in every step."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.data.batches import DataSource, SyntheticSource
from runtime.data.dataset import FolderSource, sizes_of, with_data
from runtime.data.planned import examples_text
from workbench.data.sample import Sample
from workbench.job.job import Job
from workbench.plan.codec import digest_of

LOOKS = 4  # batches of unequal samples that a prediction averages


@dataclass(frozen=True, slots=True, kw_only=True)
class StepData:
    """The samples of every step, and the source of their contents.

    Args:
        job: with the first batch.
        batch: step -> its samples.
        looks: steps that a prediction should average: 1 where all batches have equal samples.
        name: identifies the data of the steps among trainings.
    """

    job: Job
    batch: Callable[[int], tuple[Sample, ...]]
    source: DataSource
    looks: int
    name: str


def drawn(job: Job, seed: int) -> StepData:
    """Random samples of the job's sizes, with new contents in every step."""
    num_ids = 1 + max(sample.id for sample in job.batch)

    def batch(step: int) -> tuple[Sample, ...]:
        return tuple(replace(sample, id=num_ids * step + sample.id) for sample in job.batch)

    name = f"random samples {digest_of(job.batch):.16}"
    return StepData(job=job, batch=batch, source=SyntheticSource(seed), looks=1, name=name)


def read_folder(job: Job, folder: Path) -> StepData:
    """The folder's samples in order, repeated.

    Raises:
        ValueError: fewer samples than a batch, or of a kind that no encoder reads.
    """
    source, size = FolderSource(folder), len(job.batch)
    records = tuple(source.records.values())
    samples = sizes_of(records, folder, job.model)

    def batch(step: int) -> tuple[Sample, ...]:
        return tuple(samples[(step * size + index) % len(samples)] for index in range(size))

    name = examples_text(records, size)
    return StepData(job=with_data(job, folder), batch=batch, source=source, looks=LOOKS, name=name)
