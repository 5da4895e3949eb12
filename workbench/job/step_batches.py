"""Batches of a job's data: what other steps than the first may get."""

import random
from dataclasses import replace
from itertools import cycle
from pathlib import Path

from workbench.data.sample import Sample
from workbench.job.job import Job
from workbench.job.job_file import read_spec
from workbench.job.parts import batch_of
from workbench.job.sample_sizes import Tiling, sized_batches

Batches = tuple[tuple[Sample, ...], ...]


def step_batches(
    path: str | Path,
    job: Job,
    num: int,
    *,
    seed: int = 0,
    sizes: str | None = None,
    tiling: Tiling = Tiling.NONE,
) -> Batches:
    """Batches of a job file's data, none of them the job's own: equal seeds give equal batches.

    A corpus and a mixture are drawn with other seeds; rows of a file are drawn anew for every batch; fixed
    samples are equal in all of them.

    Args:
        path: the job file.
        job: made of it.
        num: of batches, one at least.
        sizes, tiling: of the job's samples, where they are not the file's.

    Raises:
        ValueError: fewer batches than one, or what the data refuse.
    """
    if num < 1:
        raise ValueError(f"batches: want >= 1, got {num}")
    spec, folder, num_samples = read_spec(Path(path)).batch, Path(path).parent, len(job.batch)
    source = sizes or spec.sizes
    if source is not None:
        file = folder / source
        found = sized_batches(
            job.model,
            num_samples,
            str(file) if sizes is None and file.exists() else source,
            num_batches=num,
            seed=seed + 1,
            tiling=tiling,
        )
        return tuple(_masked(job, batch) for batch in found)
    if spec.mixture is None:
        return (job.batch,) * num
    wanted = [
        spec.model_copy(
            update={"mixture": spec.mixture.model_copy(update={"seed": _seed(spec.mixture.seed, seed, each)})}
        )
        for each in range(num)
    ]
    return tuple(batch_of(each, job.model, folder=folder) for each in wanted)


def _seed(first: int, seed: int, number: int) -> int:
    """Another for every batch, and none that of the job's own."""
    return random.Random(f"{first} {seed} {number}").getrandbits(48)


def _masked(job: Job, batch: tuple[Sample, ...]) -> tuple[Sample, ...]:
    masks = cycle(sample.mask for sample in job.batch)
    return tuple(replace(sample, mask=mask) for sample, mask in zip(batch, masks, strict=False))
