"""Turns layouts that a search finds into plans, the best of those that are sound and fit."""

from collections.abc import Callable
from dataclasses import replace

from workbench.cost.model import CostModel
from workbench.job.device_pools import check_taken
from workbench.job.job import Job
from workbench.job.other_layouts import with_layouts
from workbench.plan.plan import Plan, Sharding
from workbench.planner.assembly import lowered_that_fits
from workbench.planner.layout_choice import LayoutChoice, LayoutStep, Mode, ModuleChoice
from workbench.planner.layout_search import fastest_by, has_layouts
from workbench.planner.layout_step import steps_of
from workbench.planner.stage_counts import PlannerStopped, Progress

Build = Callable[[Job, LayoutChoice], Plan]  # the job has the choice's layouts and settings


def searched_plans(
    job: Job,
    cost: CostModel,
    mode: Mode,
    build: Build,
    progress: Progress,
    most: int,
    num_ranks: int | None = None,
) -> tuple[Plan, ...]:
    """The plan of the fastest layout of a mode, then the plans that were best before it in the search.

    Where several are wanted, those follow that a search by a second estimate finds, in which what replicas
    exchange comes behind all passes: as plans do it, for which the first one's overlap is not to be had.

    Args:
        job: what is planned.
        cost: the machine.
        mode: how modules share the ranks.
        build: makes the plan of a layout.
        progress: as in `fastest_by`.
        most: the largest number of plans by each estimate; 1: of the first alone, the published one.
        num_ranks: ranks of every layout; None: all that the job may use, or the next smaller number for
            which there is a layout.

    Raises:
        ValueError: none fits, with the reason of the last one tried; or the LLM, which takes all ranks
            except in mode APART, may not use one of their pools.
        PlannerStopped: stopped before any plan was found.
    """
    usable = job.usable_ranks
    if mode is not Mode.APART:
        llm = job.model.llm.name
        check_taken(job.pools, llm, range(usable))
    if num_ranks is None:
        num_ranks = next((n for n in range(usable, 0, -1) if has_layouts(job, cost, mode, n)), usable)
    plans, likely = _Plans(job, cost, build), dict[LayoutChoice, Plan]()
    for hides_exchange in (True, False) if most > 1 else (True,):
        plans.improving.clear()
        steps = steps_of(job, cost, hides_exchange=hides_exchange)
        try:
            fastest_by(steps, mode, num_ranks=num_ranks, accepts=plans.accepts, progress=progress)
        except ValueError as error:
            raise (plans.refusal or error) from None
        except PlannerStopped:
            if not plans.fitting:
                raise
        likely |= {choice: plans.fitting[choice] for choice in plans.improving[: -most - 1 : -1]}
    return tuple(likely.values())


class _Plans:
    """Builds the plan of every layout that would be the best so far, once, and keeps those that fit.

    `improving` are the layouts of a search in which each was better than the one before it.
    """

    def __init__(self, job: Job, cost: CostModel, build: Build) -> None:
        self._job, self._cost, self._build = job, cost, build
        self.fitting: dict[LayoutChoice, Plan] = {}
        self.improving: list[LayoutChoice] = []
        self._refused: set[LayoutChoice] = set()
        self.refusal: ValueError | None = None

    def accepts(self, choice: LayoutChoice, step: LayoutStep) -> bool:
        """Whether the layout's plan is sound and fits."""
        if choice in self._refused:  # by a search with another estimate of the same layouts and cuts
            return False
        if choice not in self.fitting:
            try:
                plan = self._build(job_with(self._job, choice, step), choice)
                lowered_that_fits(plan)
            except ValueError as error:
                self.refusal = error
                self._refused.add(choice)
                return False
            self.fitting[choice] = plan
        self.improving.append(choice)
        return True


def job_with(job: Job, choice: LayoutChoice, step: LayoutStep) -> Job:
    """The job with a layout and settings for every module, and sharded optimizer state; replicas are joined.

    The search's cut of the LLM is kept where a rank has one stage; otherwise the strategy cuts again.
    """
    parts = {part.module: part for part in (*choice.encoders, choice.llm)}
    llm = choice.llm.module
    offset = 0 if choice.mode is Mode.COLOCATED else None
    layouts = tuple(
        replace(
            part.layout,
            dp=part.num_replicas,
            joint_replicas=1,
            rank_offset=offset,
            stage_layers=step.llm_layers if name == llm and job.schedule.virtual_stages == 1 else (),
        )
        for name, part in parts.items()
    )
    modules = tuple(
        job.settings.of(name)
        .sharded(_sharding(choice.mode, part), part.instances if part.shards_state else 1)
        .recomputing(part.recompute, part.recompute_layers)
        for name, part in parts.items()
    )
    schedule = replace(job.schedule, offload=True) if choice.offload else job.schedule
    settings = replace(job.settings, modules=modules)
    return replace(with_layouts(job, layouts), schedule=schedule, settings=settings)


def _sharding(mode: Mode, part: ModuleChoice) -> Sharding:
    if mode in (Mode.SHARDED, Mode.HYBRID):
        return Sharding.PARAMETERS
    return Sharding.OPTIMIZER if part.shards_state else Sharding.NONE
