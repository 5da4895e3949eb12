"""The cost model of a job's machines, from the files of profiles and executions."""

from pathlib import Path

from workbench.cost.execution import load_execution
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.device_pools import cost_model
from workbench.job.job import Job


def cost_of(job: Job, profile: str | None, execution: Path | None) -> CostModel:
    """The cost model of the job's machines, by a profile or the job's, under the execution of a file."""
    return under(cost_model(job.pools, load_profile(profile or job.profile)), execution)


def under(cost: CostModel, execution: Path | None) -> CostModel:
    """The same machines under the execution of a file; None: unchanged."""
    return cost if execution is None else cost.executed(load_execution(execution))
