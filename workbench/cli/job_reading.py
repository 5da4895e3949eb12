"""A job file as commands read it: with a word about what in its models has no effect."""

from pathlib import Path

from workbench.cli.console import warn
from workbench.job.job import Job, load_job
from workbench.model.config_keys import misspelt_lines
from workbench.model.model_graph import ModelGraph


def read_job(path: Path) -> Job:
    """The job; a warning for each key of a model's configuration that looks misspelt.

    Raises:
        ValueError: as `load_job`.
    """
    job = load_job(path)
    warn_of_misspelt(job.model)
    return job


def warn_of_misspelt(model: ModelGraph) -> None:
    """A line on stderr for each key of the modules' configurations that looks misspelt."""
    for line in misspelt_lines(model):
        warn(line)
