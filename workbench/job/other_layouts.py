"""Jobs with other layouts than their own, which count each data-parallel replica by itself, as files do."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from workbench.job.job import Job
from workbench.job.joint_layouts import join
from workbench.job.module_layout import ModuleLayout


class Apart(NamedTuple):
    """Layouts, replicas and samples per microbatch as a job file counts them: each replica by itself."""

    layouts: tuple[ModuleLayout, ...]
    replicas: int
    microbatch_samples: int


def apart(job: Job) -> Apart:
    """Return what the job's own file says."""
    num_joint = job.joint_replicas
    replicas = job.replicas * num_joint
    layouts = (
        replace(layout, dp=_own_dp(layout, job.replicas, replicas), joint_replicas=1)
        for layout in job.layouts
    )
    return Apart(tuple(layouts), replicas, job.microbatch_samples // num_joint)


def _own_dp(layout: ModuleLayout, joined: int, replicas: int) -> int | None:
    dp = (layout.dp or joined) * layout.joint_replicas
    return None if dp == replicas else dp


def with_layouts(job: Job, layouts: Sequence[ModuleLayout], replicas: int | None = None) -> Job:
    """The job with other layouts, which count each replica by itself; without layouts all degrees are open.

    Args:
        replicas: of modules whose layout has no dp; None: as many as now.

    Raises:
        ValueError: as `join`, and what a `Job` refuses.
    """
    _, num_apart, samples = apart(job)
    joined = join(
        layouts,
        job.model.llm.name,
        replicas=num_apart if replicas is None else replicas,
        microbatch_samples=samples,
        where=f"job {job.name!r}",
    )
    return replace(job, **joined._asdict())
