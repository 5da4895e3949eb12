"""Which schedule a plan's programs follow; a plan stores the order of passes, not the name of a schedule."""

from workbench.export.placed import llm_of, placed_modules
from workbench.plan.plan import Plan
from workbench.schedule.action import Action, Pass
from workbench.schedule.choice import Schedule, ScheduleKind, usual, usual_in_phases


def schedule_like(plan: Plan) -> Schedule:
    """The schedule that the language model's programs look like; its parameters as usual.

    Split backwards on one stage a rank are ZB-H1, in a V ZB-V: their order is the plan's own.

    Raises:
        ValueError: as `placed_modules`.

    Complexity: O(actions).
    """
    placed = placed_modules(plan)
    llm = placed[llm_of(plan).name]
    splits = any(action.kind is Pass.I for action in plan.program_actions)
    if llm.virtual > 1:
        is_vee = llm.blocks[0] == (0, 2 * llm.pp - 1) and llm.virtual == 2 and llm.pp > 1
        if splits or is_vee:
            return usual(ScheduleKind.ZB_V)
        return Schedule(kind=ScheduleKind.INTERLEAVED, virtual_stages=llm.virtual)
    if splits:
        return usual(ScheduleKind.ZB_H1)
    if _in_phases(plan):
        return usual_in_phases()
    return usual(ScheduleKind.GPIPE if llm.pp > 1 and _forwards_first(plan) else ScheduleKind.ONE_F_ONE_B)


def _forwards_first(plan: Plan) -> bool:
    """Every rank of several microbatches does all its forwards, then all its backwards."""
    programs = [_passes(program.actions) for program in plan.programs]
    several = [kinds for kinds in programs if kinds.count(Pass.F) > 1]
    return bool(several) and all(kinds == sorted(kinds, key=lambda k: k is not Pass.F) for kinds in several)


def _passes(actions: tuple[Action, ...]) -> list[Pass]:
    return [action.kind for action in actions if action.kind in (Pass.F, Pass.B, Pass.I)]


def _in_phases(plan: Plan) -> bool:
    """Ranks that hold several modules, cut over several ranks or not all alike, as phases hold them."""
    placed = placed_modules(plan)
    shares = any(len({stage.module for stage in stages}) > 1 for stages in plan.stages_on.values())
    grids = {(each.layout.tp, each.layout.cp, each.pp, each.dp) for each in placed.values()}
    return shares and (len(grids) > 1 or any(each.pp > 1 for each in placed.values()))
