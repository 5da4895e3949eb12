"""Valid plans, as diverse as possible, from which mutants are made."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from experiments.demo_job import STRATEGIES
from experiments.fidelity.memory import TINY_MIXES
from experiments.fidelity.mutant_kinds import newer_plans, small, with_layouts
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.plan.plan import Plan
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.strategies import cornstarch, encoders_colocated, encoders_replicated

SCHEDULES = (
    Schedule(kind=ScheduleKind.GPIPE),
    Schedule(kind=ScheduleKind.INTERLEAVED, virtual_stages=2),
    Schedule(kind=ScheduleKind.ZB_H1),
    Schedule(kind=ScheduleKind.ZB_H2),
    Schedule(kind=ScheduleKind.ZB_V, virtual_stages=2),
)


def pool(mixes: Sequence[str] = tuple(TINY_MIXES)) -> tuple[tuple[str, Plan], ...]:
    """Names and distinct plans, all of the tiny model on at most `NUM_RANKS` ranks.

    Args:
        mixes: frozen modules of the plans that are made for every strategy and schedule.
    """
    contents: list[tuple[object, ...]] = []
    plans = []
    for name, plan in _all(mixes):
        content = (
            plan.model,
            plan.stages,
            plan.programs,
            plan.microbatches,
            plan.token_shards,
            plan.settings,
        )
        if content not in contents:
            contents.append(content)
            plans.append((name, plan))
    return tuple(plans)


def _all(mixes: Sequence[str]) -> Iterator[tuple[str, Plan]]:
    cost = CostModel(load_profile("A40"))
    for mix in mixes:
        job = small(mix)
        for strategy in STRATEGIES:
            plan = strategy(job, cost)
            yield f"{mix}, {plan.strategy}", plan
    job = small("all")
    yield "microbatches of 2", cornstarch.plan(replace(job, microbatch_samples=2), cost)
    shared = with_layouts(job, encoders=1, llm=2)
    yield "2 replicas, encoders replicated", encoders_replicated.plan(replace(shared, replicas=2), cost)
    yield "2 replicas", cornstarch.plan(replace(shared, replicas=2), cost)
    yield "encoders of 2 stages", encoders_colocated.plan(with_layouts(job, encoders=2, llm=3), cost)
    for mix in mixes:
        sharded = with_layouts(small(mix), encoders=1, llm=2, cp=2)
        yield f"{mix}, cp 2", cornstarch.plan(sharded, cost)
        for schedule in SCHEDULES:
            scheduled = replace(with_layouts(small(mix), encoders=1, llm=2), schedule=schedule)
            yield f"{mix}, {schedule.kind}", cornstarch.plan(scheduled, cost)
    yield from newer_plans(cost)
