"""The longest path through a lowered plan: its time if links never queue and each rank has one lane."""

from collections.abc import Callable

from workbench.plan.lowered import Lowered, Route, Transfer
from workbench.plan.order import one_by_one
from workbench.schedule.action import Action
from workbench.schedule.precedence import longest_path


def critical_path_s(lowered: Lowered, duration_s: Callable[[Action], float]) -> float:
    """Return the seconds from the first action to the last end, with messages but without contention.

    A lower bound of the simulated time, and equal to it where no two messages meet on a link and no ranks
    share cores; but collectives of weights and gradients have their turn among the passes, beside which
    they are simulated. For search, not for predictions.

    Raises ValueError when some action can never run.

    Complexity: O(actions + rows).
    """
    actions = list(lowered.plan.program_actions)
    number = {action: index for index, action in enumerate(actions)}
    consecutive = one_by_one(lowered.plan, lambda action: action.stage is not None)
    edges = {(number[before], number[after]): 0.0 for before, after in consecutive}
    arrival_s: dict[int, float] = {}  # row -> seconds after its producer's end
    for row in lowered.transfers:
        before_s = 0.0 if row.after is None else arrival_s[row.after]
        arrival_s[row.row] = before_s + _transfer_s(lowered, row)
        edge = (number[row.producer], number[row.consumer])
        edges[edge] = max(edges.get(edge, 0.0), arrival_s[row.row])
    followers: list[list[int]] = [[] for _ in actions]
    delays_s: list[list[float]] = [[] for _ in actions]
    for (before, after), delay_s in edges.items():
        followers[before].append(after)
        delays_s[before].append(delay_s)
    durations_s = [duration_s(action) for action in actions]
    starts_s = longest_path(followers, durations_s, delays_s)
    if len(starts_s) < len(actions):
        stuck = next(action for index, action in enumerate(actions) if index not in starts_s)
        raise ValueError(f"action {stuck} can never run: its inputs wait for it")
    return max((start_s + durations_s[index] for index, start_s in starts_s.items()), default=0.0)


def _transfer_s(lowered: Lowered, row: Transfer) -> float:
    """Return the seconds of one row on an idle link."""
    if row.route is Route.LOCAL:
        return 0.0
    link = lowered.plan.cluster.joining((row.source_rank, *row.destination_ranks))
    return row.num_bytes / link.bytes_per_s + link.latency_s
