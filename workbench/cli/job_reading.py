"""Job files as commands read them: with warnings about keys without effect and skewed batches."""

from pathlib import Path

from workbench.cli.console import warn
from workbench.job.first_rows import sizes_of, unlike_rows, without_items
from workbench.job.job import Job, load_job
from workbench.job.sample_sizes import Tiling, with_sizes
from workbench.model.config_keys import misspelt_lines
from workbench.model.model_graph import ModelGraph


def read_job(path: Path, *, sizes: str | None = None, seed: int = 0, tiling: Tiling = Tiling.NONE) -> Job:
    """Read a job file; warn of keys of model configurations that look misspelt, and of a skewed batch.

    Args:
        sizes, seed, tiling: of samples in place of the file's, see `with_sizes`; None: the file's.

    Raises:
        ValueError: as `load_job` and `with_sizes`.
    """
    job = load_job(path)
    warn_of_misspelt_keys(job.model)
    if sizes is not None:
        job = with_sizes(job, sizes, seed=seed, tiling=tiling)
    warn_of_unlike_rows(job, (sizes, tiling) if sizes is not None else sizes_of(path))
    return job


def warn_of_unlike_rows(job: Job, source: tuple[str, Tiling] | None) -> None:
    """Print warnings if the job's samples are rows unlike most of their file's, or leave encoders idle."""
    if source is None:
        return
    for line in (without_items(job.model, job.batch, source[0]), unlike_rows(job.model, job.batch, *source)):
        if line:
            warn(line)


def warn_of_misspelt_keys(model: ModelGraph) -> None:
    """Print a warning for each key of the modules' configurations that looks misspelt."""
    for line in misspelt_lines(model):
        warn(line)
