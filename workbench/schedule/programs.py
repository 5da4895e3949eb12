"""From a choice of schedule to the programs of all groups of stages."""

from collections.abc import Sequence

from workbench.schedule.action import Action, Pass
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.schedule.graph_aware import ScheduleNode, graph_aware_1f1b

Group = tuple[int, ...]


def programs_of(
    nodes: Sequence[ScheduleNode], groups: Sequence[Group], schedule: Schedule
) -> dict[Group, tuple[Action, ...]]:
    """The passes of every group of stages in issue order, by the kind of the schedule.

    Whatever the kind, all programs are restrictions of one total order in which every pass comes
    after its inputs, so none of them can deadlock.

    Args:
        nodes: the stages; any order.
        groups: stages that share the same ranks, in forward order. Each stage stands in one.
        schedule: the choice.

    Raises:
        ValueError: as `graph_aware_1f1b`, or a kind that these stages cannot follow.
    """
    if schedule.kind is ScheduleKind.ONE_F_ONE_B:
        return graph_aware_1f1b(nodes, groups)
    if schedule.kind is ScheduleKind.GPIPE:
        return _forwards_first(graph_aware_1f1b(nodes, groups))
    raise ValueError(f"schedule {schedule.kind}: not for these stages, want 1f1b or gpipe")


def _forwards_first(programs: dict[Group, tuple[Action, ...]]) -> dict[Group, tuple[Action, ...]]:
    """GPipe on any DAG: each program's forwards, then its backwards, both in the order they had.

    Source: Huang et al. 2019, "GPipe", NeurIPS. Within forwards, and within backwards, the total
    order of graph-aware 1F1B still has every pass after its inputs.
    """
    return {
        group: tuple(sorted(actions, key=lambda action: action.kind is not Pass.F))
        for group, actions in programs.items()
    }
