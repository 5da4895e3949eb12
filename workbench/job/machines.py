"""The cost model of a job's machines, from the files of profiles and executions."""

from pathlib import Path

from workbench.cost.execution import load_execution
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.device_pools import cost_model
from workbench.job.job import Job
from workbench.plan.narrow_products import multiplying


def cost_of(job: Job, profile: str | None, execution: Path | None) -> CostModel:
    """The cost model of the job's machines, by a profile or the job's, under the execution of a file.

    Raises:
        ValueError: as `load_profile` and `load_execution`; a module has products in a format that a device
            which may compute it does not have.
    """
    cost = under(cost_model(job.pools, load_profile(profile or job.profile)), execution)
    for own in job.settings.modules:
        devices = dict.fromkeys(pool.device for pool in job.pools if pool.takes(own.module))
        for machine in (cost, *map(cost.on, devices)):
            multiplying(machine, job.settings, own.module)
    return cost


def under(cost: CostModel, execution: Path | None) -> CostModel:
    """The same machines under the execution of a file; None: unchanged."""
    return cost if execution is None else cost.executed(load_execution(execution))
