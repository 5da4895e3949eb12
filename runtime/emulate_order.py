"""In which order one device can do the actions of all ranks, one at a time."""

from workbench.plan.lowered import Lowered
from workbench.schedule.action import Action

MOST_NAMED = 4


def legal_order(lowered: Lowered) -> tuple[Action, ...]:
    """All actions of a plan, each once, after everything that it depends on.

    An action comes when it is next on all ranks of its stage (STEP: on all ranks) and the
    actions that produce its rows are done. Among those that could come, the one that could
    first does; at a tie the lower rank's. So two calls give the same order.

    Raises:
        ValueError: programs that cannot go on; the message names ranks, actions and what is missing.

    Complexity: O(actions x ranks of a stage + rows).
    """
    programs = lowered.plan.program
    place = dict.fromkeys(lowered.plan.ranks, 0)
    done: dict[Action, None] = {}
    waiting = {
        action: {lowered.transfers[row].producer for row in rows} for action, rows in lowered.inputs.items()
    }
    ready = list(lowered.plan.ranks)
    readers: dict[Action, list[int]] = {}  # producer -> ranks to look at again
    for rank in ready:  # grows while we walk it
        action = _next(programs, place, rank)
        if action is None:
            continue
        ranks = ranks_of(lowered, action)
        missing = [producer for producer in waiting.get(action, ()) if producer not in done]
        for producer in missing:
            readers.setdefault(producer, []).append(rank)
        if missing or any(_next(programs, place, other) != action for other in ranks):
            continue
        done[action] = None
        for other in ranks:
            place[other] += 1
        ready.extend(ranks)
        ready.extend(readers.pop(action, ()))
    stuck = [rank for rank in lowered.plan.ranks if _next(programs, place, rank) is not None]
    if stuck:
        raise ValueError(_report(lowered, place, stuck, done))
    return tuple(done)


def ranks_of(lowered: Lowered, action: Action) -> tuple[int, ...]:
    """Who does an action: the ranks of its stage, for STEP all."""
    plan = lowered.plan
    return plan.ranks if action.stage is None else plan.stage[action.stage].flat_ranks


def _next(programs: dict[int, tuple[Action, ...]], place: dict[int, int], rank: int) -> Action | None:
    program = programs.get(rank, ())
    return program[place[rank]] if place[rank] < len(program) else None


def _report(lowered: Lowered, place: dict[int, int], stuck: list[int], done: dict[Action, None]) -> str:
    programs = lowered.plan.program
    told = []
    for rank in stuck[:MOST_NAMED]:
        action = _next(programs, place, rank)
        assert action is not None
        rows = [lowered.transfers[row] for row in lowered.inputs.get(action, ())]
        row = next((row for row in rows if row.producer not in done), None)
        others = [r for r in ranks_of(lowered, action) if _next(programs, place, r) != action]
        missing = f"{row.edge} from {row.producer}" if row is not None else f"ranks {others}"
        told.append(f"rank {rank} before {action} waits for {missing}")
    more = f" and {len(stuck) - MOST_NAMED} more ranks" if len(stuck) > MOST_NAMED else ""
    return f"the programs cannot go on: {'; '.join(told)}{more}"
