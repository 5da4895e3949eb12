"""Jobs with other layouts than their own, which count each data-parallel replica by itself, as files do."""

from collections.abc import Sequence
from dataclasses import replace

from workbench.job.job import Job
from workbench.job.joint_layouts import LayoutFields, join
from workbench.job.module_layout import ModuleLayout


def apart(job: Job) -> LayoutFields:
    """Return what the job's own file says, which counts each replica by itself."""
    num_joint = job.joint_replicas
    replicas = job.replicas * num_joint
    layouts = (
        replace(layout, dp=_own_dp(layout, job.replicas, replicas), joint_replicas=1)
        for layout in job.layouts
    )
    return LayoutFields(tuple(layouts), replicas, job.microbatch_samples // num_joint, 1)


def _own_dp(layout: ModuleLayout, joined: int, replicas: int) -> int | None:
    dp = (layout.dp or joined) * layout.joint_replicas
    return None if dp == replicas else dp


def with_layouts(job: Job, layouts: Sequence[ModuleLayout], replicas: int | None = None) -> Job:
    """The job with other layouts, which count each replica by itself.

    Args:
        job: whose samples per microbatch of a replica are kept.
        layouts: of its modules.
        replicas: of modules whose layout has no dp; None: as many as before.

    Raises:
        ValueError: as `join`, and what a `Job` refuses.
    """
    before = apart(job)
    joined = join(
        layouts,
        job.model.llm.name,
        replicas=before.replicas if replicas is None else replicas,
        microbatch_samples=before.microbatch_samples,
        where=f"job {job.name!r}",
    )
    return replace(job, **joined._asdict())
