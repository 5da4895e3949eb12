"""Single edits of a plan's exchanges: of rounds of sharded weights, of moves to the host, of degrees."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from experiments.fidelity.mutant_operators import Operator, with_program
from workbench.plan.plan import KeyExchange, Plan, Sharding
from workbench.schedule.action import COMPUTE, Action, Pass

Edit = Callable[[list[Action], Action], list[Action] | None]  # None: the program has nothing of the kind
ROUND = (Pass.ALL_GATHER, Pass.FREE, Pass.REDUCE_SCATTER)
AWAY = (Pass.ONLOAD, Pass.OFFLOAD, Pass.REDUCE_GRAD)  # what does the like for whole weights, without a number
MOVES = (*ROUND[:2], *AWAY[:2])
EXCHANGES = (*MOVES, Pass.REDUCE_SCATTER)


def _exchange(plan: Plan, rng: random.Random, kinds: Sequence[Pass] = MOVES) -> Action | None:
    found = [action for action in plan.program_actions if action.kind in kinds]
    return rng.choice(found) if found else None


def _alike(action: Action) -> tuple[Pass, ...]:
    """Kinds of the same round, or of the same time away."""
    return ROUND if action.kind in ROUND else AWAY


def _edited(plan: Plan, rng: random.Random, action: Action | None, edit: Edit) -> Plan | None:
    """On one program alone, or on all in which a stage of the same layers does the same."""
    if action is None:
        return None
    stage = plan.stage[action.stage or 0]
    twins = {
        action._replace(stage=other.id)
        for other in plan.stages
        if (other.module, other.layers) == (stage.module, stage.layers)
    }
    if rng.random() < 0.5:
        twins = {action}
    found = plan
    for index in reversed(range(len(plan.programs))):  # a program that is cut in two moves those behind it
        for twin in twins & set(plan.programs[index].actions):
            actions = edit(list(plan.programs[index].actions), twin)
            if actions is None:
                return None
            is_alone = twins == {action}
            found = with_program(found, index, actions, rng if is_alone else None)
    return found


def _moved(actions: list[Action], at: int, to: int) -> list[Action]:
    action = actions.pop(at)
    actions.insert(max(0, min(to, len(actions))), action)
    return actions


def _renumbered(actions: Sequence[Action], stage: int | None, first: int, by: int) -> list[Action]:
    """Rounds of a stage from `first` on."""
    return [
        action._replace(microbatch=action.microbatch + by)
        if action.stage == stage
        and action.kind in ROUND
        and action.microbatch is not None
        and action.microbatch >= first
        else action
        for action in actions
    ]


def drop_exchange(plan: Plan, rng: random.Random) -> Plan | None:
    return _edited(
        plan, rng, _exchange(plan, rng, EXCHANGES), lambda actions, mine: [a for a in actions if a != mine]
    )


def move_exchange(plan: Plan, rng: random.Random) -> Plan | None:
    """By some places."""
    by = rng.choice((-6, -3, -2, -1, 1, 2, 3, 6))

    def edit(actions: list[Action], mine: Action) -> list[Action]:
        at = actions.index(mine)
        return _moved(actions, at, at + by)

    return _edited(plan, rng, _exchange(plan, rng, EXCHANGES), edit)


def renumber_exchange(plan: Plan, rng: random.Random) -> Plan | None:
    """Another round's number; or a round where weights leave the device, or the other way round."""
    number = rng.choice((None, 0, 1, 2, 3))
    others = AWAY if number is None else ROUND

    def edit(actions: list[Action], mine: Action) -> list[Action]:
        other = Action(mine.stage, others[_alike(mine).index(mine.kind)], number)
        return [other if a == mine else a for a in actions]

    return _edited(plan, rng, _exchange(plan, rng, EXCHANGES), edit)


def reshard_early(plan: Plan, rng: random.Random) -> Plan | None:
    """Weights go before their last use."""

    def edit(actions: list[Action], mine: Action) -> list[Action] | None:
        at = actions.index(mine)
        uses = [i for i in range(at) if actions[i].stage == mine.stage and actions[i].kind in COMPUTE]
        return _moved(actions, at, uses[-1]) if uses else None

    return _edited(plan, rng, _exchange(plan, rng, (Pass.FREE, Pass.OFFLOAD)), edit)


def unshard_late(plan: Plan, rng: random.Random) -> Plan | None:
    """Weights come just before their first use, or just behind it."""
    behind = rng.choice((0, 1))

    def edit(actions: list[Action], mine: Action) -> list[Action] | None:
        at = actions.index(mine)
        uses = [
            i
            for i in range(at, len(actions))
            if actions[i].stage == mine.stage and actions[i].kind in COMPUTE
        ]
        return _moved(actions, at, uses[0] - 1 + behind) if uses else None

    return _edited(plan, rng, _exchange(plan, rng, (Pass.ALL_GATHER, Pass.ONLOAD)), edit)


def delay_dealing(plan: Plan, rng: random.Random) -> Plan | None:
    """Gradients wait for a later action of the same stage, or for the end."""
    to_end = rng.random() < 0.5

    def edit(actions: list[Action], mine: Action) -> list[Action] | None:
        at = actions.index(mine)
        later = [i for i in range(at + 1, len(actions)) if actions[i].stage == mine.stage]
        if to_end:
            return _moved(actions, at, len(actions) - 2)
        return _moved(actions, at, later[0]) if later else None

    return _edited(plan, rng, _exchange(plan, rng, (Pass.REDUCE_SCATTER,)), edit)


def swap_exchanges(plan: Plan, rng: random.Random) -> Plan | None:
    """An exchange and the next one of another stage change places."""

    def edit(actions: list[Action], mine: Action) -> list[Action] | None:
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

    return _edited(plan, rng, _exchange(plan, rng, EXCHANGES), edit)


def drop_round(plan: Plan, rng: random.Random) -> Plan | None:
    """All but its passes; those behind it are counted anew, or keep their numbers."""
    by = rng.choice((0, -1))

    def edit(actions: list[Action], mine: Action) -> list[Action]:
        gone = {mine._replace(kind=kind) for kind in _alike(mine)}
        left = [action for action in actions if action not in gone]
        return _renumbered(left, mine.stage, (mine.microbatch or 0) + 1, by)

    return _edited(plan, rng, _exchange(plan, rng), edit)


def double_round(plan: Plan, rng: random.Random) -> Plan | None:
    """Weights come and go once more behind a round; those behind it are counted anew, or not."""
    by = rng.choice((0, 1))

    def edit(actions: list[Action], mine: Action) -> list[Action] | None:
        number = mine.microbatch
        if number is not None:
            actions = _renumbered(actions, mine.stage, number + 1, by)
            number += 1
        last = max(
            i
            for i, a in enumerate(actions)
            if a.stage == mine.stage and a.kind in _alike(mine) and a.microbatch == mine.microbatch
        )
        again = [Action(mine.stage, kind, number) for kind in _alike(mine)[:2]]
        if mine.microbatch is None:
            again.reverse()
        return [*actions[: last + 1], *again, *actions[last + 1 :]]

    return _edited(plan, rng, _exchange(plan, rng), edit)


def join_rounds(plan: Plan, rng: random.Random) -> Plan | None:
    """Weights stay from one round to the next, which deals out for both."""

    def edit(actions: list[Action], mine: Action) -> list[Action] | None:
        if mine.microbatch is None:
            return None
        number = mine.microbatch
        gone = {
            mine._replace(kind=Pass.FREE),
            mine._replace(kind=Pass.REDUCE_SCATTER),
            mine._replace(kind=Pass.ALL_GATHER, microbatch=number + 1),
        }
        if mine._replace(microbatch=number + 1) not in actions:
            return None
        return _renumbered([a for a in actions if a not in gone], mine.stage, number + 1, -1)

    return _edited(plan, rng, _exchange(plan, rng), edit)


def re_set(plan: Plan, rng: random.Random) -> Plan:
    """How one module is run."""
    name = rng.choice(plan.model.modules).name
    found = plan.settings.of(name)
    changed = rng.choice(
        (
            replace(found, sharding=rng.choice(list(Sharding))),
            replace(found, instances=rng.choice((1, 2, 3))),
            replace(found, sequence_parallel=not found.sequence_parallel),
            replace(found, key_exchange=rng.choice(list(KeyExchange))),
        )
    )
    others = tuple(settings for settings in plan.settings.modules if settings.module != name)
    return replace(plan, settings=replace(plan.settings, modules=(*others, changed)))


def re_deal_experts(plan: Plan, rng: random.Random) -> Plan | None:
    """Among other numbers of ranks, in one stage or in all of its module."""
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


EXCHANGE_OPERATORS: tuple[Operator, ...] = (
    drop_exchange,
    move_exchange,
    renumber_exchange,
    reshard_early,
    unshard_late,
    delay_dealing,
    swap_exchanges,
    drop_round,
    double_round,
    join_rounds,
    re_set,
    re_deal_experts,
)
