"""Single edits of a plan's exchanges: of rounds of sharded weights, of moves to the host, of degrees."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

from experiments.fidelity.mutant_operators import Operator, operator, with_program
from workbench.plan.plan import KeyExchange, Plan, Sharding
from workbench.schedule.action import COMPUTE, Action, Pass

# Of a program, an action of it, and what was drawn; None: the program has nothing of the kind.
Edit = Callable[[list[Action], Action, Any], list[Action] | None]
ROUND = (Pass.ALL_GATHER, Pass.FREE, Pass.REDUCE_SCATTER)
AWAY = (Pass.ONLOAD, Pass.OFFLOAD, Pass.REDUCE_GRAD)  # what does the like for whole weights, without a number
MOVES = (*ROUND[:2], *AWAY[:2])
EXCHANGES = (*MOVES, Pass.REDUCE_SCATTER)


def of_exchange(
    kinds: Sequence[Pass] = MOVES, drawn: Callable[[random.Random], Any] = lambda rng: None
) -> Callable[[Edit], Operator]:
    """Make an operator that edits at an action of these kinds, in one program or in all in which a stage
    with the same layers has that action.

    Args:
        drawn: draws the edit's parameter, once for all programs and before the action.
    """

    def declared(edit: Edit) -> Operator:
        @operator
        @wraps(edit)
        def edited(plan: Plan, rng: random.Random) -> Plan | None:
            parameter = drawn(rng)
            actions = [action for action in plan.program_actions if action.kind in kinds]
            if not actions:
                return None
            action = rng.choice(actions)
            return _edited(plan, rng, action, lambda program, mine: edit(program, mine, parameter))

        return edited

    return declared


def _alike(action: Action) -> tuple[Pass, ...]:
    """Kinds of action that exchange weights like this one: those of a round, or to and from the host."""
    return ROUND if action.kind in ROUND else AWAY


def _edited(
    plan: Plan,
    rng: random.Random,
    action: Action,
    edit: Callable[[list[Action], Action], list[Action] | None],
) -> Plan | None:
    stage = plan.stage[action.stage or 0]
    twins = {
        action._replace(stage=other.id)
        for other in plan.stages
        if (other.module, other.layers) == (stage.module, stage.layers)
    }
    if rng.random() < 0.5:
        twins = {action}
    mutant = plan
    for index in reversed(range(len(plan.programs))):  # a program that is cut in two moves those behind it
        for twin in twins & set(plan.programs[index].actions):
            actions = edit(list(plan.programs[index].actions), twin)
            if actions is None:
                return None
            is_alone = twins == {action}
            mutant = with_program(mutant, index, actions, rng if is_alone else None)
    return mutant


def _moved(actions: list[Action], at: int, to: int) -> list[Action]:
    action = actions.pop(at)
    actions.insert(max(0, min(to, len(actions))), action)
    return actions


def _renumbered(actions: Sequence[Action], stage: int | None, first: int, by: int) -> list[Action]:
    """Renumber a stage's rounds from `first` on."""
    return [
        action._replace(microbatch=action.microbatch + by)
        if action.stage == stage
        and action.kind in ROUND
        and action.microbatch is not None
        and action.microbatch >= first
        else action
        for action in actions
    ]


def _uses(actions: Sequence[Action], mine: Action, positions: range) -> list[int]:
    """Indices of these actions at which the stage computes."""
    return [i for i in positions if actions[i].stage == mine.stage and actions[i].kind in COMPUTE]


def choice(*options: Any) -> Callable[[random.Random], Any]:
    return lambda rng: rng.choice(options)


@of_exchange(EXCHANGES)
def drop_exchange(actions: list[Action], mine: Action, _: None) -> list[Action]:
    return [action for action in actions if action != mine]


@of_exchange(EXCHANGES, choice(-6, -3, -2, -1, 1, 2, 3, 6))
def move_exchange(actions: list[Action], mine: Action, by: int) -> list[Action]:
    """Move an exchange by some positions."""
    at = actions.index(mine)
    return _moved(actions, at, at + by)


@of_exchange(EXCHANGES, choice(None, 0, 1, 2, 3))
def renumber_exchange(actions: list[Action], mine: Action, number: int | None) -> list[Action]:
    """Change the round's number, or turn a round's exchange into an on- or offload and vice versa."""
    others = AWAY if number is None else ROUND
    other = Action(mine.stage, others[_alike(mine).index(mine.kind)], number)
    return [other if action == mine else action for action in actions]


@of_exchange((Pass.FREE, Pass.OFFLOAD))
def reshard_early(actions: list[Action], mine: Action, _: None) -> list[Action] | None:
    """Free weights before their last use."""
    at = actions.index(mine)
    uses = _uses(actions, mine, range(at))
    return _moved(actions, at, uses[-1]) if uses else None


@of_exchange((Pass.ALL_GATHER, Pass.ONLOAD), choice(0, 1))
def unshard_late(actions: list[Action], mine: Action, behind: int) -> list[Action] | None:
    """Gather weights just before their first use, or just after it."""
    at = actions.index(mine)
    uses = _uses(actions, mine, range(at, len(actions)))
    return _moved(actions, at, uses[0] - 1 + behind) if uses else None


@of_exchange((Pass.REDUCE_SCATTER,), lambda rng: rng.random() < 0.5)
def delay_dealing(actions: list[Action], mine: Action, to_end: bool) -> list[Action] | None:  # noqa: FBT001  (drawn)
    """Delay a reduce-scatter to a later action of the same stage, or to the end."""
    at = actions.index(mine)
    later = [i for i in range(at + 1, len(actions)) if actions[i].stage == mine.stage]
    if to_end:
        return _moved(actions, at, len(actions) - 2)
    return _moved(actions, at, later[0]) if later else None


@of_exchange(EXCHANGES)
def swap_exchanges(actions: list[Action], mine: Action, _: None) -> list[Action] | None:
    """Swap an exchange with the next one of another stage."""
    at = actions.index(mine)
    others = [
        i
        for i in range(at + 1, len(actions))
        if actions[i].kind in (*ROUND, *AWAY) and actions[i].stage != mine.stage
    ]
    if not others:
        return None
    actions[at], actions[others[0]] = actions[others[0]], actions[at]
    return actions


@of_exchange(MOVES, choice(0, -1))
def drop_round(actions: list[Action], mine: Action, by: int) -> list[Action]:
    """Drop a round except its passes; later rounds are renumbered, or keep their numbers."""
    dropped = {mine._replace(kind=kind) for kind in _alike(mine)}
    others = [action for action in actions if action not in dropped]
    return _renumbered(others, mine.stage, (mine.microbatch or 0) + 1, by)


@of_exchange(MOVES, choice(0, 1))
def double_round(actions: list[Action], mine: Action, by: int) -> list[Action]:
    """Repeat the first two exchanges after a round; later rounds are renumbered, or not."""
    number = mine.microbatch
    if number is not None:
        actions = _renumbered(actions, mine.stage, number + 1, by)
        number += 1
    last = max(
        i
        for i, a in enumerate(actions)
        if a.stage == mine.stage and a.kind in _alike(mine) and a.microbatch == mine.microbatch
    )
    repeated = [Action(mine.stage, kind, number) for kind in _alike(mine)[:2]]
    if mine.microbatch is None:
        repeated.reverse()
    return [*actions[: last + 1], *repeated, *actions[last + 1 :]]


@of_exchange()
def join_rounds(actions: list[Action], mine: Action, _: None) -> list[Action] | None:
    """Keep weights from one round to the next, which reduce-scatters for both."""
    if mine.microbatch is None:
        return None
    number = mine.microbatch
    removed = {
        mine._replace(kind=Pass.FREE),
        mine._replace(kind=Pass.REDUCE_SCATTER),
        mine._replace(kind=Pass.ALL_GATHER, microbatch=number + 1),
    }
    if mine._replace(microbatch=number + 1) not in actions:
        return None
    return _renumbered([a for a in actions if a not in removed], mine.stage, number + 1, -1)


@operator
def re_set(plan: Plan, rng: random.Random) -> Plan:
    """Change how one module is run."""
    name = rng.choice(plan.model.modules).name
    settings_of_module = plan.settings.of(name)
    changed = rng.choice(
        (
            replace(settings_of_module, sharding=rng.choice(list(Sharding))),
            replace(settings_of_module, instances=rng.choice((1, 2, 3))),
            replace(settings_of_module, sequence_parallel=not settings_of_module.sequence_parallel),
            replace(settings_of_module, key_exchange=rng.choice(list(KeyExchange))),
        )
    )
    others = tuple(settings for settings in plan.settings.modules if settings.module != name)
    return replace(plan, settings=replace(plan.settings, modules=(*others, changed)))


@operator
def re_deal_experts(plan: Plan, rng: random.Random) -> Plan | None:
    """Distribute experts over another number of ranks, in one stage or in the whole module."""
    dealing = [stage for stage in plan.stages if stage.ep > 1]
    if not dealing:
        return None
    mine, ep, is_alone = rng.choice(dealing), rng.choice((1, 2, 3, 4, 8)), rng.random() < 0.5
    return replace(
        plan,
        stages=tuple(
            replace(stage, ep=ep)
            if stage is mine or (not is_alone and stage.module == mine.module)
            else stage
            for stage in plan.stages
        ),
    )
