"""A job file as commands read it: with a word about what in it has no effect."""

from pathlib import Path

from workbench.cli.console import warn
from workbench.job.job import Job, load_job
from workbench.model.config_keys import misspelt_lines


def read_job(path: Path) -> Job:
    """The job; a warning for each key of a model's configuration that looks misspelt.

    Raises:
        ValueError: as `load_job`.
    """
    job = load_job(path)
    for line in misspelt_lines(job.model):
        warn(line)
    return job
