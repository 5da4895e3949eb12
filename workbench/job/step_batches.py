"""Batches of a job's data for later steps."""

import random
from dataclasses import replace
from itertools import cycle
from pathlib import Path

from workbench.data.sample import Sample
from workbench.job.job import Job
from workbench.job.job_file import read_spec
from workbench.job.parts import batch_of
from workbench.job.sample_sizes import Tiling, named_sizes, sized_batches

Batches = tuple[tuple[Sample, ...], ...]


def step_batches(
    path: str | Path,
    job: Job,
    num: int,
    *,
    seed: int = 0,
    sizes: str | None = None,
    tiling: Tiling = Tiling.NONE,
    pack_tokens: int | None = None,
) -> Batches:
    """Batches of a job file's data, none of them the job's own: equal seeds give equal batches.

    A corpus and a mixture are drawn with other seeds; rows of a file are drawn anew for every batch; fixed
    samples are equal in all of them.

    Args:
        path: the job file.
        job: the job of that file.
        num: number of batches, >= 1.
        sizes, tiling, pack_tokens: of the job's samples, where they differ from the file's.

    Raises:
        ValueError: fewer batches than one, or as the data's reader.
    """
    if num < 1:
        raise ValueError(f"batches: want >= 1, got {num}")
    spec, folder, num_samples = read_spec(Path(path)).batch, Path(path).parent, len(job.batch)
    source = sizes or (None if spec.sizes is None else named_sizes(spec.sizes, folder))
    if source is not None:
        pack = pack_tokens if sizes is not None else spec.pack_tokens
        batches = sized_batches(
            job.model,
            num_samples,
            source,
            num_batches=num,
            seed=seed + 1,
            tiling=tiling if sizes is not None else spec.tiling,
            pack_tokens=pack,
        )
        if pack is not None:
            return batches
        return tuple(_masked(job, batch) for batch in batches)
    if spec.mixture is None:
        return (job.batch,) * num
    specs = [
        spec.model_copy(
            update={
                "mixture": spec.mixture.model_copy(update={"seed": _seed(spec.mixture.seed, seed, number)})
            }
        )
        for number in range(num)
    ]
    return tuple(batch_of(number, job.model, folder=folder) for number in specs)


def _seed(first: int, seed: int, number: int) -> int:
    """A different seed for every batch, never that of the job's own batch."""
    return random.Random(f"{first} {seed} {number}").getrandbits(48)


def _masked(job: Job, batch: tuple[Sample, ...]) -> tuple[Sample, ...]:
    masks = cycle(sample.mask for sample in job.batch)
    return tuple(replace(sample, mask=mask) for sample, mask in zip(batch, masks, strict=False))
