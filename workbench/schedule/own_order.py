"""Checks what the functions of a schedule of one's own return; tests check those that are registered."""

from collections.abc import Mapping, Sequence

from workbench.schedule.action import Action, Pass
from workbench.schedule.parts import Group, Programs
from workbench.schedule.spec import ScheduleSpec

_ORDERS = ((Pass.F, Pass.B), (Pass.F, Pass.I, Pass.W))  # of the passes of one microbatch on a stage


def checked_chain(
    spec: ScheduleSpec, programs: object, stages_of_rank: Sequence[Sequence[int]], num_microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    """Return the programs that `chain` made.

    Args:
        spec: the schedule.
        programs: what `chain` returned.
        stages_of_rank: [p] the stages of every set of ranks.
        num_microbatches: m.

    Raises:
        TypeError: not a sequence of sequences of actions.
        ValueError: not one program for every set of ranks, or one that does not have, for each microbatch on
            each of its stages, F and then B, or F, I and then W, and nothing else.

    Complexity: O(passes).
    """
    checked = tuple(
        _actions(spec, f"program {index}", each) for index, each in enumerate(_listed(spec, programs))
    )
    if len(checked) != len(stages_of_rank):
        raise ValueError(
            f"schedule {spec}: want one program for each of {len(stages_of_rank)} sets of ranks, got "
            f"{len(checked)}"
        )
    for index, (program, stages) in enumerate(zip(checked, stages_of_rank, strict=True)):
        _check_program(spec, f"program {index}", program, stages, num_microbatches)
    return checked


def checked_dag(spec: ScheduleSpec, programs: object, groups: Sequence[Group]) -> Programs:
    """Return the programs that `dag` made; the plan's check says which passes are missing.

    Raises:
        TypeError: not a mapping to sequences of actions.
        ValueError: not one program for every group.
    """
    if not isinstance(programs, Mapping):
        raise TypeError(
            f"schedule {spec}: want programs by group of stages from dag, got {type(programs).__name__}"
        )
    wanted = list(map(tuple, groups))
    if set(programs) != set(wanted):
        raise ValueError(
            f"schedule {spec}: want a program for each of the groups of stages {wanted}, got {list(programs)}"
        )
    return {group: _actions(spec, f"program of stages {group}", programs[group]) for group in wanted}


def _listed(spec: ScheduleSpec, programs: object) -> Sequence[object]:
    if not isinstance(programs, Sequence) or isinstance(programs, str):
        raise TypeError(
            f"schedule {spec}: want a tuple of programs from chain, got {type(programs).__name__}"
        )
    return programs


def _actions(spec: ScheduleSpec, what: str, program: object) -> tuple[Action, ...]:
    if not isinstance(program, Sequence) or isinstance(program, str):
        raise TypeError(f"schedule {spec}: {what} must be a tuple of Action, got {type(program).__name__}")
    for action in program:
        if not isinstance(action, Action):
            raise TypeError(
                f"schedule {spec}: {what} must be a tuple of Action, got {action!r:.60} in it; nearest: "
                "Action(0, Pass.F, 0)"
            )
    return tuple(program)


def _check_program(
    spec: ScheduleSpec, what: str, program: Sequence[Action], stages: Sequence[int], num_microbatches: int
) -> None:
    kinds_of: dict[tuple[int | None, int | None], list[Pass]] = {
        (stage, microbatch): [] for stage in stages for microbatch in range(num_microbatches)
    }
    for action in program:
        kinds = kinds_of.get((action.stage, action.microbatch))
        if kinds is None:
            raise ValueError(
                f"schedule {spec}: {what} has {action}, but its ranks have stages {list(stages)} and "
                f"microbatches 0..{num_microbatches - 1}"
            )
        kinds.append(action.kind)
    orders = _ORDERS if spec.splits_backward else _ORDERS[:1]
    for (stage, microbatch), kinds in kinds_of.items():
        if tuple(kinds) not in orders:
            got = " ".join(kinds) or "nothing"
            wanted = " or ".join(" ".join(order) for order in orders)
            hint = "" if spec.splits_backward or Pass.I not in kinds else "; nearest: splits_backward=True"
            raise ValueError(
                f"schedule {spec}: {what} does {got} for microbatch {microbatch} of stage {stage}, want "
                f"{wanted}{hint}"
            )
