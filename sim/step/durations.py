"""From prices of actions to seconds of tasks."""

from collections.abc import Mapping

from workbench.plan.lowered import Lowered
from workbench.schedule.action import Action, TaskKind


def task_durations_s(
    lowered: Lowered, duration_s: Mapping[Action, float], step_s: Mapping[int, float]
) -> list[float]:
    """[T] seconds of every task of the lowered plan.

    An all-gather or reduce-scatter of sharded parameters takes the most that any replica's action is priced
    at. `duration_s[action]` of a sum of gradients is the price of the whole on the rank of its stage that
    reduces most. Each group takes its part of that, in proportion to its elements; where stages of several
    replicas give a group different parts, all its ranks take the longest. A sum that no group
    belongs to holds each of its ranks for the whole price.

    Args:
        duration_s: price of each action.
        step_s: price of each rank's STEP.
    """
    graph = lowered.tasks
    seconds = [0.0] * graph.num_tasks
    for action, task in graph.passes.items():
        seconds[task] = duration_s[action]
    for rank, task in graph.steps.items():
        seconds[task] = step_s[rank]
    for joined in (joined for program in graph.fsdp for joined in program):
        (task,) = joined.tasks
        seconds[task] = max(seconds[task], duration_s[joined.action])
    groups_s = _groups_s(lowered, duration_s)
    for task, found in enumerate(graph.tasks):
        if found.kind is TaskKind.ALL_REDUCE:
            if found.group is not None:
                seconds[task] = groups_s[found.group]
            elif found.action not in lowered.reductions:
                seconds[task] = duration_s[found.action]
    return seconds


def _groups_s(lowered: Lowered, duration_s: Mapping[Action, float]) -> dict[int, float]:
    """Of every gradient group."""
    groups = {group.index: group for group in lowered.groups}
    found = dict.fromkeys(groups, 0.0)
    for action, indices in lowered.reductions.items():
        if action not in duration_s:
            continue
        of_rank = dict.fromkeys(lowered.plan.stage[action.stage or 0].flat_ranks, 0)
        for index in indices:
            for rank in groups[index].members.intersection(of_rank):
                of_rank[rank] += groups[index].num_elements
        most = max(of_rank.values())
        for index in indices:
            part_s = duration_s[action] * (groups[index].num_elements / most) if most else 0.0
            found[index] = max(found[index], part_s)
    return found
