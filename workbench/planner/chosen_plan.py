"""What no search proposes, though a plan may say it."""

from workbench.job.device_pools import check_taken
from workbench.job.job import Job
from workbench.plan.plan import Plan
from workbench.plan.runnable_degrees import check_degrees
from workbench.planner.assembly import layout_of


def check_chosen(job: Job, plan: Plan) -> None:
    """Raise ValueError for a module in a pool that does not take it, or divided as it cannot run.

    Degrees that the job itself asks for are its own affair, as are those of models that cannot run at all.
    """
    for stage in plan.stages:
        check_taken(job.pools, stage.module, stage.flat_ranks)
        module, asked = plan.model.module(stage.module), layout_of(job, stage.module)
        if module.source is not None and (stage.tp, stage.cp) != (asked.tp, asked.cp):
            check_degrees(module, tp=stage.tp, cp=stage.cp)
