"""Job files as commands read them: with warnings about keys without effect, batches and foreign profiles."""

from contextlib import suppress
from pathlib import Path

from workbench.calibrate.beyond_sheet import beyond_sheet
from workbench.cli.console import warn
from workbench.cost.device_names import may_be
from workbench.cost.profile import load_profile
from workbench.job.first_rows import SizesRead, sizes_of, unlike_rows, without_items
from workbench.job.job import Job, load_job
from workbench.job.sample_sizes import with_sizes
from workbench.model.config_keys import misspelt_lines
from workbench.model.model_graph import ModelGraph
from workbench.plan.kernel_heads import CPU


def read_job(path: Path, *, sizes: SizesRead | None = None, seed: int = 0) -> Job:
    """Read a job file; warn of misspelt keys of models, a skewed batch, another device's profile, and units.

    Args:
        sizes, seed: of samples in place of the file's, see `with_sizes`; None: the file's.

    Raises:
        ValueError: as `load_job` and `with_sizes`.
    """
    job = load_job(path)
    warn_of_misspelt_keys(job.model)
    _warn_of_profile(job)
    for line in beyond_sheet(job):
        warn(line)
    if sizes is not None:
        job = with_sizes(job, sizes.source, seed=seed, tiling=sizes.tiling, pack_tokens=sizes.pack_tokens)
    warn_of_batch(job, sizes if sizes is not None else sizes_of(path))
    return job


def warn_of_batch(job: Job, read: SizesRead | None) -> None:
    """Print warnings if the job's samples are rows unlike most of their file's, or leave encoders idle."""
    if read is None:
        return
    for line in (
        without_items(job.model, job.batch, read.source),
        unlike_rows(job.model, job.batch, read),
    ):
        if line:
            warn(line)


def warn_of_misspelt_keys(model: ModelGraph) -> None:
    """Print a warning for each key of the modules' configurations that looks misspelt."""
    for line in misspelt_lines(model):
        warn(line)


def _warn_of_profile(job: Job) -> None:
    """Print a warning if the profile is of another device than the job's GPUs, whose times it then gives."""
    device = job.cluster.nodes[0].device
    if device == CPU or job.pools:
        return
    with suppress(ValueError):  # a missing profile is refused where it is needed
        profile = load_profile(job.profile)
        if not may_be(device, profile.device):
            warn(
                f"job {job.name!r}: cluster.device is {device}, but times are those of {profile.device}, by "
                f"profile {profile.name!r}; want a profile of {device}"
            )
