"""Durations of tasks, from prices of actions."""

from collections.abc import Mapping

from workbench.plan.lowered import Lowered
from workbench.schedule.action import Action, TaskKind


def task_durations_s(
    lowered: Lowered, duration_s: Mapping[Action, float], step_s: Mapping[int, float]
) -> list[float]:
    """[T] seconds of every task of the lowered plan.

    An all-gather or reduce-scatter of sharded parameters takes the highest price of any replica's action. For
    a gradient reduction, `duration_s[action]` is the price of all its groups on the rank of the stage that
    reduces most. Each group takes its part of that, in proportion to its elements; where stages of several
    replicas give a group different parts, all its ranks take the longest. A reduction without groups takes
    the whole price on each of its ranks.

    Args:
        duration_s: price of each action.
        step_s: price of each rank's STEP.
    """
    graph = lowered.tasks
    seconds = [0.0] * graph.num_tasks
    for action, index in graph.passes.items():
        seconds[index] = duration_s[action]
    for rank, index in graph.steps.items():
        seconds[index] = step_s[rank]
    for joined in (joined for program in graph.fsdp for joined in program):
        (index,) = joined.tasks
        seconds[index] = max(seconds[index], duration_s[joined.action])
    groups_s = _groups_s(lowered, duration_s)
    for index, task in enumerate(graph.tasks):
        if task.kind is TaskKind.ALL_REDUCE:
            if task.group is not None:
                seconds[index] = groups_s[task.group]
            elif task.action not in lowered.reductions:
                seconds[index] = duration_s[task.action]
    return seconds


def _groups_s(lowered: Lowered, duration_s: Mapping[Action, float]) -> dict[int, float]:
    """Seconds of every gradient group."""
    elements = {group.index: group.num_elements for group in lowered.groups}
    seconds_of_group = dict.fromkeys(elements, 0.0)
    for action, reducers in lowered.reducers.items():
        if action not in duration_s:
            continue
        most = max((sum(map(elements.__getitem__, each.groups)) for each in reducers), default=0)
        for index in lowered.reductions[action] if most else ():
            part_s = duration_s[action] * (elements[index] / most)
            seconds_of_group[index] = max(seconds_of_group[index], part_s)
    return seconds_of_group
