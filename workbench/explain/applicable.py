"""Changes of a job that its strategy can follow, told without planning."""

from dataclasses import replace

from workbench.explain.neighbours import Change
from workbench.job.job import Job
from workbench.plan.plan import ModuleSettings, Sharding
from workbench.planner.strategy_spec import OwnSpace, StrategySpec


def is_followed(change: Change, job: Job, spec: StrategySpec) -> bool:
    """Whether the strategy may make another plan of the changed job.

    False where it refuses such a job at once, or decides itself all that is changed, so its plan is the same.
    """
    try:
        changed = change.edit(job)
        spec.check(changed)
    except ValueError:
        return False
    return _as_read(changed, spec.own_space) != _as_read(job, spec.own_space)


def _as_read(job: Job, space: OwnSpace) -> Job:
    """The job without what the strategy decides itself; joint replicas are planned as requested."""
    if not space.says_memory or job.joint_replicas > 1:
        return job
    modules = tuple(_without_sharding(job.settings.of(module.name)) for module in job.model.modules)
    return replace(
        job,
        settings=replace(job.settings, modules=modules),
        replicas=1,
        microbatch_samples=1 if space.sizes_microbatches else job.microbatch_samples,
    )


def _without_sharding(settings: ModuleSettings) -> ModuleSettings:
    """Without sharding, except how long sharded parameters stay gathered."""
    return settings if settings.shards_parameters else settings.sharded(Sharding.NONE)
