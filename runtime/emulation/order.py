"""In which order one device can do the actions of all ranks, one at a time."""

from collections.abc import Collection
from itertools import chain

from workbench.plan.lowered import Lowered
from workbench.plan.order import followers_of, one_by_one
from workbench.schedule.action import Action
from workbench.schedule.precedence import in_order

MOST_NAMED = 8


def legal_order(lowered: Lowered) -> tuple[Action, ...]:
    """All actions of a plan, each once, after everything that it depends on.

    An action comes when it is next on all ranks of its stage (STEP: on all ranks), the actions
    that produce its rows are done, and a backward's forward. Among those that could come, the one
    that could first does; at a tie the one whose program stands first. So two calls give the same order.

    Raises:
        ValueError: programs that cannot go on; the message names ranks, actions and what is missing.

    Complexity: O(actions + rows).
    """
    there = lowered.plan.program_actions
    needed = [(needed, action) for action in there for needed in _needed(lowered, action)]
    nowhere = {earlier for earlier, _ in needed}.difference(there)  # each waits for itself, forever
    actions = (*there, *nowhere)
    edges = chain(one_by_one(lowered.plan, lambda _: True), needed, zip(nowhere, nowhere, strict=True))
    order = in_order(followers_of(actions, edges))
    if len(order) < len(actions):
        raise ValueError(_report(lowered, {actions[place] for place in order}))
    return tuple(actions[place] for place in order)


def _needed(lowered: Lowered, action: Action) -> dict[Action, None]:
    """What produces its rows, and the pass of its own stage that it continues."""
    found = dict.fromkeys(lowered.transfers[row].producer for row in lowered.inputs.get(action, ()))
    return found if action.continues is None else found | {action.continues: None}


def _report(lowered: Lowered, done: Collection[Action]) -> str:
    plan = lowered.plan
    left = {rank: [a for a in program if a not in done] for rank, program in sorted(plan.program.items())}
    stuck = {rank: actions[0] for rank, actions in left.items() if actions}
    told = []
    for rank, action in list(stuck.items())[:MOST_NAMED]:
        needed = next((needed for needed in _needed(lowered, action) if needed not in done), None)
        others = [other for other in plan.ranks_of(action) if stuck.get(other) != action]
        missing = f"ranks {others}" if needed is None else str(needed)
        told.append(f"rank {rank} before {action} waits for {missing}")
    more = f" and {len(stuck) - MOST_NAMED} more ranks" if len(stuck) > MOST_NAMED else ""
    return f"the programs cannot go on: {'; '.join(told)}{more}"
