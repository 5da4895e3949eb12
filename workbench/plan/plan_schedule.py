"""Finds the schedule that gives a plan its programs; a plan stores the order of passes alone."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import dropwhile, takewhile

from workbench.model.model_graph import TEXT
from workbench.plan.build import with_programs
from workbench.plan.plan import Plan
from workbench.schedule.action import COMPUTE, Pass
from workbench.schedule.choice import Schedule, ScheduleKind, usual


def schedule_of(plan: Plan, scheduled: Callable[[Plan, Schedule], Plan] = with_programs) -> Schedule | None:
    """Return the first likely schedule that gives the plan's stages the plan's programs.

    None where no schedule does: a strategy put passes into an order of its own.

    Args:
        plan: any plan.
        scheduled: gives a plan without programs those of a schedule.

    Complexity: one set of programs for every likely schedule.
    """
    bare = replace(plan, programs=())
    for schedule in likely_schedules(plan):
        try:
            if scheduled(bare, schedule).programs == plan.programs:
                return schedule
        except ValueError:  # the plan's ranks or modules are not for this schedule
            continue
    return None


def likely_schedules(plan: Plan) -> Iterator[Schedule]:
    """Yield schedules with the plan's kind of backward and stages per rank, the plainest first."""
    splits = any(action.kind is Pass.I for action in plan.program_actions)
    virtual = _virtual_stages(plan)
    for kind in ScheduleKind:
        schedule = usual(kind)
        if kind.splits_backward != splits:
            continue
        if virtual > 1 and kind.spec.takes_more_stages:
            yield replace(schedule, virtual_stages=virtual)
        elif schedule.virtual_stages == virtual:
            yield schedule
            if kind.spec.shares_ranks_in_part:
                yield replace(schedule, offload=True)
                yield replace(schedule, window=_window_of(plan))


def _virtual_stages(plan: Plan) -> int:
    """Return the language model's stages per rank; 1 where its weights are sharded layer by layer."""
    llm = plan.model.llm.name
    if plan.settings.of(llm).shards_parameters:
        return 1
    chain = plan.chain[llm, plan.replicas(llm)[0]]
    return len(chain) // len({stage.flat_ranks for stage in chain})


def _window_of(plan: Plan) -> int | None:
    """Return the language model's forwards between other passes on the same rank; None: no such window."""
    llm = {stage.id for stage in plan.stages if plan.model.module(stage.module).modality == TEXT}
    for program in plan.programs:
        passes = [action for action in program.actions if action.kind in COMPUTE]
        after = dropwhile(lambda action: action.stage not in llm, passes)
        window = sum(action.kind is Pass.F for action in takewhile(lambda action: action.stage in llm, after))
        if window and not llm.issuperset(action.stage for action in passes):
            return window
    return None
