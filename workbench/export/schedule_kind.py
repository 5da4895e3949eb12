"""Which schedule a plan's programs follow; a plan stores the order of passes, not the name of a schedule."""

from collections.abc import Sequence

from workbench.export.placed import llm_of, placed_modules
from workbench.plan.plan import Plan
from workbench.schedule.action import Action, Pass
from workbench.schedule.choice import Schedule, ScheduleKind, usual
from workbench.schedule.spec import StagePlacement


def schedule_like(plan: Plan) -> Schedule:
    """The first schedule whose properties the language model's programs have; its parameters as usual.

    Split backwards on one stage a rank are ZB-H1, in a V ZB-V: their order is the plan's own.

    Raises:
        ValueError: as `placed_modules`.

    Complexity: O(actions).
    """
    placed = placed_modules(plan)
    llm = placed[llm_of(plan).name]
    splits = any(action.kind is Pass.I for action in plan.program_actions)
    several = llm.virtual > 1
    turns = llm.virtual == 2 and llm.pp > 1 and llm.blocks[0] == (0, 2 * llm.pp - 1)
    is_vee = several and (splits or turns)
    layout = StagePlacement.VEE if is_vee else StagePlacement.ROUND
    kinds = [
        kind
        for kind in ScheduleKind
        if kind.spec.layout is layout
        and (kind.usual_virtual_stages > 1) is several
        and (is_vee or kind.splits_backward is splits)
    ]
    if not several and not splits:
        in_phases = _in_phases(plan)
        forwards_first = not in_phases and llm.pp > 1 and _forwards_first([p.actions for p in plan.programs])
        kinds = [
            kind
            for kind in kinds
            if kind.spec.shares_ranks_in_part is in_phases and _is_forwards_first(kind) is forwards_first
        ]
    kind = kinds[0]
    return Schedule(kind=kind, virtual_stages=llm.virtual) if kind.spec.takes_more_stages else usual(kind)


def _is_forwards_first(kind: ScheduleKind) -> bool:
    return _forwards_first(kind.spec.chain((0, 1), 2, 2))


def _forwards_first(programs: Sequence[Sequence[Action]]) -> bool:
    """Every rank of several microbatches does all its forwards, then all its backwards."""
    several = [kinds for kinds in map(_passes, programs) if kinds.count(Pass.F) > 1]
    return bool(several) and all(kinds == sorted(kinds, key=lambda k: k is not Pass.F) for kinds in several)


def _passes(actions: Sequence[Action]) -> list[Pass]:
    return [action.kind for action in actions if action.kind in (Pass.F, Pass.B, Pass.I)]


def _in_phases(plan: Plan) -> bool:
    """Ranks that hold several modules, cut over several ranks or not all alike, as phases hold them."""
    placed = placed_modules(plan)
    shares = any(len({stage.module for stage in stages}) > 1 for stages in plan.stages_on.values())
    grids = {(each.layout.tp, each.layout.cp, each.pp, each.dp) for each in placed.values()}
    return shares and (len(grids) > 1 or any(each.pp > 1 for each in placed.values()))
