"""Structural checks of a schedule, on plain data: nothing missing, nothing twice, everything in order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from workbench.schedule.action import COMPUTE, Action, Pass
from workbench.schedule.text import Cell, Programs, Rows, marked_error


@dataclass(frozen=True, slots=True)
class StageShape:
    """What a schedule must do for a stage.

    Args:
        stage: its id.
        ranks: all of its ranks.
        backward: [microbatches] whether each has a backward here.
    """

    stage: int
    ranks: tuple[int, ...]
    backward: tuple[bool, ...]


def check_schedule(programs: Programs, stages: Sequence[StageShape]) -> None:
    """Refuse schedules that no executor could run.

    Rules: on every rank of a stage each microbatch has one F; one B, or one I and one W, iff it has
    a backward; F before B and I; I before W. No action of a stage or microbatch that is not there.
    Ranks that share several stages run their actions in the same order.

    Args:
        programs: ranks -> actions in issue order; a rank stands in one key. Actions other than
            passes are not looked at.
        stages: all stages.

    Raises:
        ValueError: the rule, the rank and the action, followed by the grid with the cell marked.

    Complexity: O(actions), times the number of distinct programs of a stage.
    """
    shapes = {shape.stage: shape for shape in stages}
    row_of = _row_of(programs, stages)
    for ranks, actions in programs.items():
        for position, action in enumerate(actions):
            if action.kind in COMPUTE:
                _check_known(programs, Cell(ranks, position), action, shapes)
        _check_row(programs, ranks, shapes)
    _check_compatible(programs, stages, row_of)


def _row_of(programs: Programs, stages: Sequence[StageShape]) -> dict[int, Rows]:
    row_of: dict[int, Rows] = {}
    for ranks in programs:
        for rank in ranks:
            if rank in row_of:
                raise ValueError(f"rank {rank} must have one program, got two")
            row_of[rank] = ranks
    for shape in stages:
        for rank in shape.ranks:
            if rank not in row_of:
                raise ValueError(f"rank {rank} of stage {shape.stage} has no program")
    return row_of


def _check_known(programs: Programs, cell: Cell, action: Action, shapes: Mapping[int, StageShape]) -> None:
    shape = shapes.get(action.stage) if action.stage is not None else None
    if shape is None:
        raise marked_error(
            f"ranks {list(cell.ranks)}: {action} is of no stage, stages are {sorted(shapes)}", programs, cell
        )
    if not set(cell.ranks) <= set(shape.ranks):
        raise marked_error(
            f"ranks {list(cell.ranks)}: {action} is of a stage on ranks {list(shape.ranks)}", programs, cell
        )
    if action.microbatch is None or action.microbatch >= len(shape.backward):
        raise marked_error(
            f"ranks {list(cell.ranks)}: {action} is of no microbatch, stage {shape.stage} has "
            f"{len(shape.backward)}",
            programs,
            cell,
        )


def _check_row(programs: Programs, ranks: Rows, shapes: Mapping[int, StageShape]) -> None:
    """One program against the stages on its ranks."""
    actions, place = programs[ranks], dict[Action, int]()
    for position, action in enumerate(actions):
        if action.kind not in COMPUTE:
            continue
        cell = Cell(ranks, position)
        if action in place:
            raise marked_error(f"ranks {list(ranks)}: {action} stands twice", programs, cell)
        for rule in _broken(action, place, shapes):
            raise marked_error(f"ranks {list(ranks)}: {rule}", programs, cell)
        place[action] = position
    for shape in shapes.values():
        if not set(shape.ranks) & set(ranks):
            continue
        for action in _missing(shape, place):
            raise marked_error(
                f"ranks {list(ranks)}: {action} is missing", programs, Cell(ranks, len(actions))
            )


def _broken(action: Action, place: Mapping[Action, int], shapes: Mapping[int, StageShape]) -> list[str]:
    """Rules that this action breaks where it stands."""
    if action.kind is Pass.F:
        return []
    assert action.stage is not None
    assert action.microbatch is not None
    rules = []
    if not shapes[action.stage].backward[action.microbatch]:
        rules.append(f"{action} has no gradient to compute, microbatch {action.microbatch} has no backward")
    needs = Pass.I if action.kind is Pass.W else Pass.F
    if action._replace(kind=needs) not in place:
        rules.append(f"{action} stands before {action._replace(kind=needs)}")
    rivals = (Pass.I, Pass.W) if action.kind is Pass.B else (Pass.B,)
    rules += [
        f"{action} stands beside {action._replace(kind=rival)}: a backward is whole or split"
        for rival in rivals
        if action._replace(kind=rival) in place
    ]
    return rules


def _missing(shape: StageShape, place: Mapping[Action, int]) -> list[Action]:
    missing = []
    for microbatch, has_backward in enumerate(shape.backward):
        forward = Action(shape.stage, Pass.F, microbatch)
        if forward not in place:
            missing.append(forward)
        whole = forward._replace(kind=Pass.B)
        if not has_backward or whole in place:
            continue
        if forward._replace(kind=Pass.I) not in place:
            missing.append(whole)
        elif forward._replace(kind=Pass.W) not in place:
            missing.append(forward._replace(kind=Pass.W))
    return missing


def _check_compatible(programs: Programs, stages: Sequence[StageShape], row_of: Mapping[int, Rows]) -> None:
    """Two programs run the actions of the stages that they share in the same order."""
    shared: dict[tuple[Rows, Rows], set[int]] = {}
    for shape in stages:
        rows = list(dict.fromkeys(row_of[rank] for rank in shape.ranks))
        for pair in combinations(rows, 2):
            shared.setdefault(pair, set()).add(shape.stage)
    for (one, other), common in shared.items():
        mine, theirs = (
            [
                (action, place)
                for place, action in enumerate(programs[row])
                if action.kind in COMPUTE and action.stage in common
            ]
            for row in (one, other)
        )
        for (expected, _), (action, place) in zip(mine, theirs, strict=True):
            if action != expected:
                raise marked_error(
                    f"ranks {list(one)} and {list(other)} share stages {sorted(common)} but ranks "
                    f"{list(other)} run {action} where the others run {expected}",
                    programs,
                    Cell(other, place),
                )
