"""Rejects plans that are valid, but that no search should propose."""

from workbench.job.device_pools import check_taken
from workbench.job.job import Job
from workbench.plan.plan import Plan
from workbench.plan.runnable_degrees import check_degrees
from workbench.plan.stage import Stage
from workbench.planner.assembly import layout_of


def check_chosen(job: Job, plan: Plan) -> None:
    """Raise ValueError for a module in a pool that does not take it, or with degrees that it cannot run.

    Degrees that the job asks for are not checked, nor are those of models that the runtime does not have.
    """
    first_of: dict[tuple[object, ...], Stage] = {}  # most layers are on the same ranks
    for stage in plan.stages:
        first_of.setdefault((stage.module, stage.ranks, stage.joint_replicas), stage)
    layouts = {module.name: layout_of(job, module.name) for module in plan.model.modules}
    for stage in first_of.values():
        check_taken(job.pools, stage.module, stage.flat_ranks)
        module, layout = plan.model.module(stage.module), layouts[stage.module]
        if module.source is not None and (stage.tp, stage.cp) != (layout.tp, layout.cp):
            check_degrees(module, tp=stage.tp, cp=stage.cp)
