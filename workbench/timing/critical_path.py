"""The longest path through a lowered plan: its time when links never queue."""

from collections.abc import Callable
from itertools import pairwise

from workbench.plan.lowered import Lowered, Route, Transfer
from workbench.schedule.action import Action


def critical_path_s(lowered: Lowered, duration_s: Callable[[Action], float]) -> float:
    """Seconds from the first action to the last end, messages counted, contention not.

    A lower bound of the simulated time and equal to it where no two messages meet on a
    link and no ranks share cores. For search, not for predictions.

    Raises ValueError when some action can never run.

    Complexity: O(actions + rows).
    """
    actions = list(lowered.plan.program_actions)
    followers: dict[Action, list[tuple[Action, float]]] = {action: [] for action in actions}
    waiting = dict.fromkeys(actions, 0)
    edges = {
        (before, after): 0.0
        for program in lowered.plan.programs
        for before, after in pairwise(program.actions)
        if before.stage is not None and after.stage is not None
    }
    arrival_s: dict[int, float] = {}  # row -> seconds after its producer's end
    for row in lowered.transfers:
        before_s = 0.0 if row.after is None else arrival_s[row.after]
        arrival_s[row.row] = before_s + _transfer_s(lowered, row)
        key = (row.producer, row.consumer)
        edges[key] = max(edges.get(key, 0.0), arrival_s[row.row])
    for (before, after), delay_s in edges.items():
        followers[before].append((after, delay_s))
        waiting[after] += 1
    start_s = dict.fromkeys(actions, 0.0)
    ready = [action for action in actions if waiting[action] == 0]
    finish_s = 0.0
    for action in ready:  # grows while we walk it
        end_s = start_s[action] + duration_s(action)
        finish_s = max(finish_s, end_s)
        for follower, delay_s in followers[action]:
            start_s[follower] = max(start_s[follower], end_s + delay_s)
            waiting[follower] -= 1
            if waiting[follower] == 0:
                ready.append(follower)
    if len(ready) < len(actions):
        stuck = next(action for action in actions if waiting[action])
        raise ValueError(f"action {stuck} can never run: its inputs wait for it")
    return finish_s


def _transfer_s(lowered: Lowered, row: Transfer) -> float:
    """Seconds of one row when it has its link to itself."""
    if row.route is Route.LOCAL:
        return 0.0
    link = lowered.plan.cluster.joining((row.source_rank, *row.destination_ranks))
    return row.num_bytes / link.bytes_per_s + link.latency_s
