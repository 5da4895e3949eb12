"""Single edits of a plan: one thing dropped, swapped, doubled, moved, reassigned, or cut differently."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

from workbench.plan.plan import Microbatch, Plan, Program, TokenShard
from workbench.plan.stage import Stage
from workbench.schedule.action import STEP, Action, Pass

T = TypeVar("T")
Operator = Callable[[Plan, random.Random], Plan | None]  # None: the plan has nothing of the kind
OPERATORS: list[Operator] = []  # in the order in which they stand here


class NothingError(Exception):
    """The plan has nothing that the operator could edit."""


def operator(edit: Operator) -> Operator:
    """Register an edit that mutants are made by."""
    OPERATORS.append(edit)
    return edit


def of_program(edit: Callable[[list[Action], random.Random, Plan], None]) -> Operator:
    """Make an operator of an in-place edit of one program's actions; NothingError: not applicable."""

    @operator
    @wraps(edit)
    def edited(plan: Plan, rng: random.Random) -> Plan | None:
        index = rng.randrange(len(plan.programs))
        actions = list(plan.programs[index].actions)
        try:
            edit(actions, rng, plan)
        except NothingError:
            return None
        return with_program(plan, index, actions, rng)

    return edited


def of_one(field: str) -> Callable[[Callable[[Any, random.Random, Plan], Any]], Operator]:
    """Declare operators of edits of one item of a field of the plan, if there is any."""

    def declared(edit: Callable[[Any, random.Random, Plan], Any]) -> Operator:
        @operator
        @wraps(edit)
        def edited(plan: Plan, rng: random.Random) -> Plan | None:
            items: tuple[Any, ...] = getattr(plan, field)
            if not items:
                return None
            index = rng.randrange(len(items))
            changed: dict[str, Any] = {field: with_one(items, index, edit(items[index], rng, plan))}
            return replace(plan, **changed)

        return edited

    return declared


of_stage, of_microbatch, of_token_shard = map(of_one, ("stages", "microbatches", "token_shards"))


def with_one(items: Sequence[T], index: int, changed: T | None) -> tuple[T, ...]:
    """Replace or remove the item at that index."""
    return (*items[:index], *(() if changed is None else (changed,)), *items[index + 1 :])


def with_program(plan: Plan, index: int, actions: Sequence[Action], rng: random.Random | None = None) -> Plan:
    """Set the program on all its ranks or, with an `rng`, one time in three, on only one of them."""
    program = plan.programs[index]
    edited = [Program(ranks=program.ranks, actions=tuple(actions))]
    if rng is not None and len(program.ranks) > 1 and rng.random() < 1 / 3:
        alone = rng.choice(program.ranks)
        rest = tuple(rank for rank in program.ranks if rank != alone)
        edited = [
            Program(ranks=(alone,), actions=tuple(actions)),
            Program(ranks=rest, actions=program.actions),
        ]
    return replace(plan, programs=(*plan.programs[:index], *edited, *plan.programs[index + 1 :]))


@of_program
def drop_action(actions: list[Action], rng: random.Random, _: Plan) -> None:
    actions.pop(rng.randrange(len(actions)))


@of_program
def duplicate_action(actions: list[Action], rng: random.Random, _: Plan) -> None:
    actions.insert(rng.randrange(len(actions) + 1), rng.choice(actions))


@of_program
def swap_neighbours(actions: list[Action], rng: random.Random, _: Plan) -> None:
    if len(actions) < 2:
        raise NothingError
    at = rng.randrange(len(actions) - 1)
    actions[at], actions[at + 1] = actions[at + 1], actions[at]


@of_program
def swap_actions(actions: list[Action], rng: random.Random, _: Plan) -> None:
    if len(actions) < 2:
        raise NothingError
    first, other = rng.sample(range(len(actions)), 2)
    actions[first], actions[other] = actions[other], actions[first]


@of_program
def move_action(actions: list[Action], rng: random.Random, _: Plan) -> None:
    action = actions.pop(rng.randrange(len(actions)))
    actions.insert(rng.randrange(len(actions) + 1), action)


@of_program
def retype_action(actions: list[Action], rng: random.Random, plan: Plan) -> None:
    """Change the pass, microbatch or stage of an action."""
    at = rng.randrange(len(actions))
    action = actions[at]
    actions[at] = rng.choice(
        (
            action._replace(kind=rng.choice(list(Pass))),
            action._replace(microbatch=rng.randrange(4)),
            action._replace(stage=rng.choice(plan.stages).id),
            STEP,
        )
    )


@operator
def give_action_away(plan: Plan, rng: random.Random) -> Plan | None:
    """Move an action to another program."""
    if len(plan.programs) < 2:
        return None
    source, other = rng.sample(range(len(plan.programs)), 2)
    actions, taker = list(plan.programs[source].actions), list(plan.programs[other].actions)
    taker.insert(rng.randrange(len(taker) + 1), actions.pop(rng.randrange(len(actions))))
    return with_program(with_program(plan, source, actions), other, taker)


@of_program
def split_backward(actions: list[Action], rng: random.Random, _: Plan) -> None:
    """Split a B into I and a W at any later position, or into only one of them."""
    whole = [at for at, action in enumerate(actions) if action.kind is Pass.B]
    if not whole:
        raise NothingError
    at = rng.choice(whole)
    backward = actions[at]
    actions[at] = backward._replace(kind=Pass.I)
    if rng.random() < 0.8:
        actions.insert(rng.randrange(at + 1, len(actions) + 1), backward._replace(kind=Pass.W))


@of_stage
def re_peer_stage(stage: Stage, rng: random.Random, plan: Plan) -> Stage:
    """Replace one rank of a stage by another."""
    rows = [list(row) for row in stage.ranks]
    row = rng.choice(rows)
    row[rng.randrange(len(row))] = rng.randrange(-1, plan.cluster.num_ranks + 1)
    return replace(stage, ranks=tuple(map(tuple, rows)))


@operator
def swap_ranks(plan: Plan, rng: random.Random) -> Plan | None:
    """Swap the ranks of two stages, with or without their programs."""
    if len(plan.stages) < 2:
        return None
    one, other = rng.sample(range(len(plan.stages)), 2)
    first, second = plan.stages[one], plan.stages[other]
    stages = with_one(plan.stages, one, replace(first, ranks=second.ranks))
    return replace(plan, stages=with_one(stages, other, replace(second, ranks=first.ranks)))


@operator
def reverse_grid(plan: Plan, rng: random.Random) -> Plan | None:
    """Reorder the context-parallel positions, or the joint replicas."""
    wide = [index for index, stage in enumerate(plan.stages) if stage.num_shares > 1]
    if not wide:
        return None
    at = rng.choice(wide)
    turned = replace(plan.stages[at], ranks=tuple(reversed(plan.stages[at].ranks)))
    return replace(plan, stages=with_one(plan.stages, at, turned))


@operator
def cut_elsewhere(plan: Plan, rng: random.Random) -> Plan:
    """Move a boundary by one layer, on one side or on both."""
    index = rng.randrange(len(plan.stages))
    stage, by = plan.stages[index], rng.choice((-1, 1))
    first, last = stage.layers
    stages = with_one(plan.stages, index, replace(stage, layers=(first, last + by)))
    if rng.random() < 0.5:
        stages = tuple(
            replace(s, layers=(s.layers[0] + by, s.layers[1]))
            if (s.module, s.replica, s.layers[0]) == (stage.module, stage.replica, last)
            else s
            for s in stages
        )
    return replace(plan, stages=stages)


@operator
def drop_stage(plan: Plan, rng: random.Random) -> Plan:
    return replace(plan, stages=with_one(plan.stages, rng.randrange(len(plan.stages)), None))


@operator
def duplicate_stage(plan: Plan, rng: random.Random) -> Plan:
    stage = plan.stages[rng.randrange(len(plan.stages))]
    number = stage.id if rng.random() < 0.5 else len(plan.stages)
    return replace(plan, stages=(*plan.stages, replace(stage, id=number)))


@of_stage
def rename_stage(stage: Stage, rng: random.Random, plan: Plan) -> Stage:
    """Change the id, module or replica."""
    other = rng.choice(plan.stages)
    return rng.choice(
        (
            replace(stage, id=other.id),
            replace(stage, module=other.module),
            replace(stage, replica=stage.replica + rng.choice((-1, 1))),
        )
    )


@operator
def reorder_stages(plan: Plan, rng: random.Random) -> Plan:
    return replace(plan, stages=tuple(rng.sample(plan.stages, len(plan.stages))))


@of_microbatch
def drop_item(microbatch: Microbatch, rng: random.Random, _: Plan) -> Microbatch:
    dropped = rng.choice(microbatch.items)
    return replace(
        microbatch, rows=tuple(tuple(item for item in row if item != dropped) for row in microbatch.rows)
    )


@operator
def move_item(plan: Plan, rng: random.Random) -> Plan | None:
    """Move an item to another microbatch of its module, of any replica; empty rows are removed."""
    index = rng.randrange(len(plan.microbatches))
    giver = plan.microbatches[index]
    takers = [i for i, m in enumerate(plan.microbatches) if i != index and m.module == giver.module]
    if not takers:
        return None
    item = rng.choice(giver.items)
    rows = tuple(kept for row in giver.rows if (kept := tuple(i for i in row if i != item)))
    taker = rng.choice(takers)
    grown = (*plan.microbatches[taker].rows[:-1], (*plan.microbatches[taker].rows[-1], item))
    shrunk = with_one(plan.microbatches, index, replace(giver, rows=rows))
    return replace(plan, microbatches=with_one(shrunk, taker, replace(shrunk[taker], rows=grown)))


@operator
def swap_items(plan: Plan, rng: random.Random) -> Plan | None:
    """Swap two items of one module, of any microbatches."""
    module = rng.choice(plan.microbatches).module
    items = [item for m in plan.microbatches if m.module == module for item in m.items]
    if len(set(items)) < 2:
        return None
    first, other = rng.sample(sorted(set(items)), 2)
    pair = {first: other, other: first}
    return replace(
        plan,
        microbatches=tuple(
            replace(m, rows=tuple(tuple(pair.get(item, item) for item in row) for row in m.rows))
            if m.module == module
            else m
            for m in plan.microbatches
        ),
    )


@of_microbatch
def repeat_item(microbatch: Microbatch, rng: random.Random, plan: Plan) -> Microbatch:
    """Repeat an item, or add one of another sample."""
    donor = rng.choice(plan.microbatches)
    row = (*microbatch.rows[0], rng.choice(donor.items))
    return replace(microbatch, rows=(row, *microbatch.rows[1:]))


@of_microbatch
def regroup_rows(microbatch: Microbatch, rng: random.Random, _: Plan) -> Microbatch:
    """Put all items of a microbatch in one row, each in its own, or reorder them."""
    items = list(microbatch.items)
    rng.shuffle(items)
    return replace(microbatch, rows=rng.choice(((tuple(items),), tuple((item,) for item in items))))


@operator
def renumber_microbatch(plan: Plan, rng: random.Random) -> Plan:
    """Change the index, replica or module, or swap two microbatches of one replica."""
    index = rng.randrange(len(plan.microbatches))
    microbatch, other = plan.microbatches[index], rng.choice(plan.microbatches)
    if rng.random() < 0.5 and other.module == microbatch.module:
        swapped = with_one(plan.microbatches, index, replace(microbatch, rows=other.rows))
        moved = replace(other, rows=microbatch.rows)
        return replace(plan, microbatches=with_one(swapped, plan.microbatches.index(other), moved))
    changed = rng.choice(
        (
            replace(microbatch, index=other.index),
            replace(microbatch, replica=microbatch.replica + 1),
            replace(microbatch, module=other.module),
        )
    )
    return replace(plan, microbatches=with_one(plan.microbatches, index, changed))


@operator
def drop_microbatch(plan: Plan, rng: random.Random) -> Plan:
    dropped = rng.choice(plan.microbatches)
    return replace(plan, microbatches=tuple(m for m in plan.microbatches if m is not dropped))


@operator
def reorder_microbatches(plan: Plan, rng: random.Random) -> Plan:
    """Change only their order in the file; indices stay."""
    return replace(plan, microbatches=tuple(rng.sample(plan.microbatches, len(plan.microbatches))))


@of_token_shard
def re_own_tokens(shard: TokenShard, rng: random.Random, _: Plan) -> TokenShard:
    """Give a block to another owner, which may not exist."""
    owners = list(shard.owners)
    owners[rng.randrange(len(owners))] = rng.choice((0, 1, 1, 0, 2, -1))
    return replace(shard, owners=tuple(owners))


@of_token_shard
def re_shape_tokens(shard: TokenShard, rng: random.Random, _: Plan) -> TokenShard:
    """Change block sizes or the number of blocks by one."""
    return rng.choice(
        (
            replace(shard, block_tokens=shard.block_tokens + rng.choice((-1, 1))),
            replace(shard, owners=shard.owners[:-1]),
            replace(shard, owners=(*shard.owners, 0)),
            replace(shard, microbatch=shard.microbatch + 1),
            replace(shard, row=shard.row + 1),
        )
    )


@operator
def drop_tokens(plan: Plan, rng: random.Random) -> Plan | None:
    """Revert a row to zigzag, or list its owners twice."""
    if not plan.token_shards:
        return None
    index = rng.randrange(len(plan.token_shards))
    doubled = (*plan.token_shards, plan.token_shards[index])
    shards = with_one(plan.token_shards, index, None) if rng.random() < 0.5 else doubled
    return replace(plan, token_shards=shards)


@operator
def shrink_memory(plan: Plan, rng: random.Random) -> Plan:
    """Shrink the memory of every node by up to a million times."""
    factor = 10 ** rng.uniform(0, 6)
    nodes = tuple(replace(n, memory_bytes=max(1, int(n.memory_bytes / factor))) for n in plan.cluster.nodes)
    return replace(plan, cluster=replace(plan.cluster, nodes=nodes))
