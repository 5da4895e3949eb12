"""Job files as commands read them: with a warning about keys of model configurations without effect."""

from pathlib import Path

from workbench.cli.console import warn
from workbench.job.job import Job, load_job
from workbench.model.config_keys import misspelt_lines
from workbench.model.model_graph import ModelGraph


def read_job(path: Path) -> Job:
    """Read a job file; warn of each key of a model configuration that looks misspelt.

    Raises:
        ValueError: as `load_job`.
    """
    job = load_job(path)
    warn_of_misspelt_keys(job.model)
    return job


def warn_of_misspelt_keys(model: ModelGraph) -> None:
    """Print a warning for each key of the modules' configurations that looks misspelt."""
    for line in misspelt_lines(model):
        warn(line)
