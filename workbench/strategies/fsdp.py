"""FSDP and HSDP, searched: every module on every rank, each a replica, with sharded weights.

Source: Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 16(12);
Liang et al. 2025, "TorchTitan", section 2.1 (FSDP2). Hybrid sharding, HSDP, is of section 3.2.2: several
instances of all weights, each on nearby ranks. Experts may be distributed over ranks and replicas first;
then they are sharded among those that hold the same ones. Differs: a unit is a layer of the model's graph, so
embedding and head are units of their own.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.plan.plan import Plan, Sharding
from workbench.plan.stage import Stage
from workbench.planner.assembly import (
    check_apart,
    check_ranks,
    dp_of,
    module_stages,
    scheduled,
    shared_draft,
)
from workbench.planner.layout_choice import LayoutChoice, Mode
from workbench.planner.layout_plan import searched_plans
from workbench.planner.layout_search import fastest_layout, has_layouts
from workbench.planner.layout_space import divisors
from workbench.planner.layout_step import steps_of
from workbench.planner.stage_counts import PlannerStopped, Progress, silent
from workbench.planner.strategy_spec import Chooser, First, OwnSpace, StrategySpec
from workbench.schedule.choice import ScheduleKind

NAME, HYBRID_NAME = "fsdp", "hsdp"


def shortlist(job: Job, cost: CostModel, progress: Progress, most: int) -> tuple[Plan, ...]:
    """The fastest plans that fit, with weights sharded over all ranks used; see `_fastest`."""
    return _fastest(job, cost, Mode.SHARDED, progress, most)


plan = First(shortlist)


def shortlist_hybrid(job: Job, cost: CostModel, progress: Progress, most: int) -> tuple[Plan, ...]:
    """The fastest plans with several instances of all weights, of at least two ranks each; see `_fastest`."""
    return _fastest(job, cost, Mode.HYBRID, progress, most)


plan_hybrid = First(shortlist_hybrid)


def _fastest(job: Job, cost: CostModel, mode: Mode, progress: Progress, most: int) -> tuple[Plan, ...]:
    """The fastest plan that fits of each microbatch size, over recomputation of every module.

    A replica's samples of a step are cut into equal microbatches, whatever size the job states for
    pipelines: fewer, larger ones gather less often, smaller ones need less memory. Fewer ranks than the job
    may use are tried too, at least two, if their replicas divide the batch: they may be faster, for
    instance one node of two. Steps are compared by `sharded_step`, to twelve digits; ties go to more ranks,
    then to fewer context-parallel ones, as the host's launches may hide their exchanges in the estimate
    alone, then to larger microbatches.

    Raises:
        ValueError: none fits, another schedule than 1F1B, a layout that cuts a module, or unequal cp.
    """
    _check(mode, job)
    plans: dict[int, Plan] = {}
    for sized_job, num_ranks in _fastest_first(job, cost, mode, progress):
        if sized_job.microbatch_samples in plans:
            continue
        try:
            _, plan = fastest_of_size(sized_job, cost, mode, progress, num_ranks)
        except ValueError:
            continue
        except PlannerStopped:
            if not plans:
                raise
            break
        plans[sized_job.microbatch_samples] = plan
        if len(plans) == most:
            break
    if not plans:  # raises the refusal for all ranks and the smallest microbatches
        return (fastest_of_size(replace(job, microbatch_samples=1), cost, mode, progress)[1],)
    return tuple(plans.values())


def _fastest_first(job: Job, cost: CostModel, mode: Mode, progress: Progress) -> list[tuple[Job, int]]:
    """Microbatch sizes and numbers of ranks with a layout that fits, the shortest step first.

    If the planner is stopped: those found so far, or PlannerStopped if there are none.
    """
    smallest = replace(job, microbatch_samples=1)
    fewest = min(2, job.usable_ranks)
    counts = [n for n in range(job.usable_ranks, fewest - 1, -1) if has_layouts(smallest, cost, mode, n)]
    priced: list[_Priced] = []
    for num_ranks in counts:
        for samples in reversed(divisors(len(job.batch))):
            sized_job = replace(job, microbatch_samples=samples)
            try:
                best = fastest_layout(sized_job, cost, mode, num_ranks=num_ranks, progress=progress)
            except ValueError:
                continue
            except PlannerStopped:
                if not priced:
                    raise
                return _by_seconds(priced)
            priced.append(_Priced(best.step.step_s, best.choice.llm.cp, sized_job, num_ranks))
    return _by_seconds(priced)


class _Priced(NamedTuple):
    """The best layout of a microbatch size on a number of ranks, `cp` of which share tokens."""

    step_s: float
    cp: int
    sized_job: Job
    num_ranks: int


def _by_seconds(priced: Sequence[_Priced]) -> list[tuple[Job, int]]:
    ordered = sorted(priced, key=lambda each: (float(f"{each.step_s:.12g}"), -each.num_ranks, each.cp))
    return [(each.sized_job, each.num_ranks) for each in ordered]


def _name(mode: Mode) -> str:
    return HYBRID_NAME if mode is Mode.HYBRID else NAME


def _check(mode: Mode, job: Job) -> None:
    """Raise ValueError for schedules and layouts that no sharded plan has."""
    name = _name(mode)
    if job.schedule.kind is not ScheduleKind.ONE_F_ONE_B:
        raise ValueError(
            f"{name}: a rank does all layers of a microbatch one after the other, got schedule "
            f"{job.schedule.kind}; nearest: {ScheduleKind.ONE_F_ONE_B}"
        )
    _check_layouts(job, name)
    check_apart(job, name)


def _check_layouts(job: Job, strategy: str) -> None:
    for layout in job.layouts:
        for name, degree in (("pp", layout.pp), ("tp", layout.tp)):
            if (degree or 1) > 1:
                raise ValueError(
                    f"{strategy}: every rank does all layers of {layout.module!r} whole, but its layout has "
                    f"{name} {degree}; nearest: {name} 1"
                )
        if layout.cp != job.layouts[0].cp:
            first = job.layouts[0]
            raise ValueError(
                f"{strategy}: all modules have the same replicas, but {first.module!r} has cp {first.cp} and "
                f"{layout.module!r} cp {layout.cp}; nearest: cp {first.cp} for both"
            )


def fastest_of_size(
    job: Job,
    cost: CostModel,
    mode: Mode = Mode.SHARDED,
    progress: Progress = silent,
    num_ranks: int | None = None,
) -> tuple[float, Plan]:
    """The best plan of the job's microbatch size, and the seconds of its step."""
    built: list[tuple[Plan, LayoutChoice]] = []

    def build(laid_out: Job, choice: LayoutChoice) -> Plan:
        built.append((sharded_plan(laid_out, cost, choice.llm.instances), choice))
        return built[-1][0]

    (best,) = searched_plans(job, cost, mode, build, progress, 1, num_ranks)
    choice = next(choice for candidate, choice in built if candidate is best)
    return steps_of(job, cost).step(choice).step_s, best


def sharded_plan(job: Job, cost: CostModel, instances: int = 1) -> Plan:
    """The plan of a job whose layouts give all modules the same replicas of one stage.

    Args:
        instances: of all weights.

    Raises:
        ValueError: more ranks than there are, or a batch that does not divide.
    """
    modules = tuple(
        job.settings.of(module.name).sharded(Sharding.PARAMETERS, instances) for module in job.model.modules
    )
    sharded_job = replace(job, settings=replace(job.settings, modules=modules))
    draft = shared_draft(sharded_job, NAME if instances == 1 else HYBRID_NAME)
    stages: list[Stage] = []
    for replica in range(dp_of(job, job.layouts[0].module)):
        for module in job.model.modules:
            stages += module_stages(
                sharded_job,
                module.name,
                ((0, len(module.layers)),),
                replica=replica,
                first_id=len(stages),
                first_rank=replica * job.layouts[0].stage_ranks,
            )
    check_ranks(job, 1 + max(rank for stage in stages for rank in stage.flat_ranks))
    return scheduled(replace(draft, stages=tuple(stages)), job.schedule, cost)


_OWN_SPACE = OwnSpace(
    degrees=Chooser.ITSELF,
    where="Zhao et al. 2023, section 3.2.1; TorchTitan, section 2.1",
    says_memory=True,
    reshards=True,
    sizes_microbatches=True,
    effort=40.0,
)

SPEC = StrategySpec(
    name=NAME,
    planner=plan,
    shortlist=shortlist,
    searches_layouts=True,
    summary="FSDP: parameters of every layer sharded over all used ranks; "
    "number of ranks, expert parallelism, recomputation and microbatch size searched",
    own_space=_OWN_SPACE,
    placing=None,
    check=partial(_check, Mode.SHARDED),
)

SPEC_HYBRID = StrategySpec(
    name=HYBRID_NAME,
    planner=plan_hybrid,
    shortlist=shortlist_hybrid,
    searches_layouts=True,
    summary="as fsdp, but sharded within instances of nearby ranks, with gradients reduced between them; "
    "number of instances searched",
    own_space=replace(_OWN_SPACE, where="Zhao et al. 2023, section 3.2.2"),
    placing=None,
    check=partial(_check, Mode.HYBRID),
)
