"""In which order one device can do the actions of all ranks, one at a time."""

from workbench.plan.lowered import Lowered
from workbench.schedule.action import Action, Pass

MOST_NAMED = 8

_CONTINUES = {Pass.B: Pass.F, Pass.I: Pass.F, Pass.W: Pass.I}


def legal_order(lowered: Lowered) -> tuple[Action, ...]:
    """All actions of a plan, each once, after everything that it depends on.

    An action comes when it is next on all ranks of its stage (STEP: on all ranks), the actions
    that produce its rows are done, and a backward's forward. Among those that could come, the one
    that could first does; at a tie the lower rank's. So two calls give the same order.

    Raises:
        ValueError: programs that cannot go on; the message names ranks, actions and what is missing.

    Complexity: O(actions x ranks of a stage + rows).
    """
    programs = lowered.plan.program
    place = dict.fromkeys(lowered.plan.ranks, 0)
    done: dict[Action, None] = {}
    needs = {action: _needed(lowered, action) for program in programs.values() for action in program}
    ready = list(lowered.plan.ranks)
    readers: dict[Action, list[int]] = {}  # action -> ranks to look at again
    for rank in ready:  # grows while we walk it
        action = _next(programs, place, rank)
        if action is None:
            continue
        ranks = ranks_of(lowered, action)
        missing = [needed for needed in needs[action] if needed not in done]
        for needed in missing:
            readers.setdefault(needed, []).append(rank)
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


def _needed(lowered: Lowered, action: Action) -> dict[Action, None]:
    """What produces its rows, and the pass of its own stage that it continues."""
    found = dict.fromkeys(lowered.transfers[row].producer for row in lowered.inputs.get(action, ()))
    before = _CONTINUES.get(action.kind)
    if before is not None:
        found[action._replace(kind=before)] = None
    return found


def _next(programs: dict[int, tuple[Action, ...]], place: dict[int, int], rank: int) -> Action | None:
    program = programs.get(rank, ())
    return program[place[rank]] if place[rank] < len(program) else None


def _report(lowered: Lowered, place: dict[int, int], stuck: list[int], done: dict[Action, None]) -> str:
    programs = lowered.plan.program
    told = []
    for rank in stuck[:MOST_NAMED]:
        action = _next(programs, place, rank)
        assert action is not None
        needed = next((needed for needed in _needed(lowered, action) if needed not in done), None)
        others = [r for r in ranks_of(lowered, action) if _next(programs, place, r) != action]
        missing = f"ranks {others}" if needed is None else str(needed)
        told.append(f"rank {rank} before {action} waits for {missing}")
    more = f" and {len(stuck) - MOST_NAMED} more ranks" if len(stuck) > MOST_NAMED else ""
    return f"the programs cannot go on: {'; '.join(told)}{more}"
