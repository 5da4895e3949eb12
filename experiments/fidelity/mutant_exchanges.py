"""Single edits of a plan's exchanges: of rounds of sharded weights, of moves to the host, of degrees."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

from experiments.fidelity.mutant_operators import Operator, operator, with_program
from workbench.plan.plan import KeyExchange, Plan, Sharding
from workbench.plan.stage import Stage
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


def _uses(actions: Sequence[Action], exchange: Action, positions: range) -> list[int]:
    """Indices of these actions at which the stage computes."""
    return [i for i in positions if actions[i].stage == exchange.stage and actions[i].kind in COMPUTE]


def choice(*options: Any) -> Callable[[random.Random], Any]:
    return lambda rng: rng.choice(options)


@of_exchange(EXCHANGES)
def drop_exchange(actions: list[Action], exchange: Action, _: None) -> list[Action]:
    return [action for action in actions if action != exchange]


@of_exchange(EXCHANGES, choice(-6, -3, -2, -1, 1, 2, 3, 6))
def move_exchange(actions: list[Action], exchange: Action, by: int) -> list[Action]:
    """Move an exchange by some positions."""
    index = actions.index(exchange)
    return _moved(actions, index, index + by)


@of_exchange(EXCHANGES, choice(None, 0, 1, 2, 3))
def renumber_exchange(actions: list[Action], exchange: Action, number: int | None) -> list[Action]:
    """Change the round's number, or turn a round's exchange into an on- or offload and vice versa."""
    others = AWAY if number is None else ROUND
    other = Action(exchange.stage, others[_alike(exchange).index(exchange.kind)], number)
    return [other if action == exchange else action for action in actions]


@of_exchange((Pass.FREE, Pass.OFFLOAD))
def reshard_early(actions: list[Action], exchange: Action, _: None) -> list[Action] | None:
    """Free weights before their last use."""
    index = actions.index(exchange)
    uses = _uses(actions, exchange, range(index))
    return _moved(actions, index, uses[-1]) if uses else None


@of_exchange((Pass.ALL_GATHER, Pass.ONLOAD), choice(0, 1))
def unshard_late(actions: list[Action], exchange: Action, offset: int) -> list[Action] | None:
    """Gather weights just before their first use, or just after it."""
    index = actions.index(exchange)
    uses = _uses(actions, exchange, range(index, len(actions)))
    return _moved(actions, index, uses[0] - 1 + offset) if uses else None


@of_exchange((Pass.REDUCE_SCATTER,), lambda rng: rng.random() < 0.5)
def delay_dealing(actions: list[Action], exchange: Action, to_end: bool) -> list[Action] | None:  # noqa: FBT001  (drawn)
    """Delay a reduce-scatter to a later action of the same stage, or to the end."""
    index = actions.index(exchange)
    later = [i for i in range(index + 1, len(actions)) if actions[i].stage == exchange.stage]
    if to_end:
        return _moved(actions, index, len(actions) - 2)
    return _moved(actions, index, later[0]) if later else None


@of_exchange(EXCHANGES)
def swap_exchanges(actions: list[Action], exchange: Action, _: None) -> list[Action] | None:
    """Swap an exchange with the next one of another stage."""
    index = actions.index(exchange)
    others = [
        i
        for i in range(index + 1, len(actions))
        if actions[i].kind in (*ROUND, *AWAY) and actions[i].stage != exchange.stage
    ]
    if not others:
        return None
    actions[index], actions[others[0]] = actions[others[0]], actions[index]
    return actions


@of_exchange(MOVES, choice(0, -1))
def drop_round(actions: list[Action], exchange: Action, by: int) -> list[Action]:
    """Drop a round except its passes; later rounds are renumbered, or keep their numbers."""
    dropped = {exchange._replace(kind=kind) for kind in _alike(exchange)}
    others = [action for action in actions if action not in dropped]
    return _renumbered(others, exchange.stage, (exchange.microbatch or 0) + 1, by)


@of_exchange(MOVES, choice(0, 1))
def double_round(actions: list[Action], exchange: Action, by: int) -> list[Action]:
    """Repeat the first two exchanges after a round; later rounds are renumbered, or not."""
    number = exchange.microbatch
    if number is not None:
        actions = _renumbered(actions, exchange.stage, number + 1, by)
        number += 1
    last = max(
        i
        for i, a in enumerate(actions)
        if a.stage == exchange.stage and a.kind in _alike(exchange) and a.microbatch == exchange.microbatch
    )
    repeated = [Action(exchange.stage, kind, number) for kind in _alike(exchange)[:2]]
    if exchange.microbatch is None:
        repeated.reverse()
    return [*actions[: last + 1], *repeated, *actions[last + 1 :]]


@of_exchange()
def join_rounds(actions: list[Action], exchange: Action, _: None) -> list[Action] | None:
    """Keep weights from one round to the next, which reduce-scatters for both."""
    if exchange.microbatch is None:
        return None
    number = exchange.microbatch
    removed = {
        exchange._replace(kind=Pass.FREE),
        exchange._replace(kind=Pass.REDUCE_SCATTER),
        exchange._replace(kind=Pass.ALL_GATHER, microbatch=number + 1),
    }
    if exchange._replace(microbatch=number + 1) not in actions:
        return None
    return _renumbered([a for a in actions if a not in removed], exchange.stage, number + 1, -1)


@operator
def re_set(plan: Plan, rng: random.Random) -> Plan:
    """Change how one module is run."""
    name = rng.choice(plan.model.modules).name
    settings_of_module = plan.settings.of(name)
    changed = rng.choice(
        (
            settings_of_module.sharded(rng.choice(list(Sharding)), settings_of_module.instances),
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
    candidates = [stage for stage in plan.stages if stage.ep > 1]
    if not candidates:
        return None
    ep = rng.choice((1, 2, 3, 4, 8))
    return _with_changed(plan, rng, candidates, lambda stage: replace(stage, ep=ep))


@operator
def join_otherwise(plan: Plan, rng: random.Random) -> Plan | None:
    """Count another number of joint replicas in the grid of one stage or of the whole module."""
    candidates = [stage for stage in plan.stages if stage.num_shares > 1]
    if not candidates:
        return None
    count = rng.choice((1, 2, 3, 4))
    return _with_changed(plan, rng, candidates, lambda stage: replace(stage, joint_replicas=count))


def _with_changed(
    plan: Plan, rng: random.Random, candidates: Sequence[Stage], changed: Callable[[Stage], Stage]
) -> Plan:
    """Change one of the candidates, or all stages of its module."""
    chosen, is_alone = rng.choice(candidates), rng.random() < 0.5
    return replace(
        plan,
        stages=tuple(
            changed(stage) if stage is chosen or (not is_alone and stage.module == chosen.module) else stage
            for stage in plan.stages
        ),
    )
