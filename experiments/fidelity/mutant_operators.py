"""Single edits of a plan: one thing dropped, swapped, doubled, moved, given to another, cut differently."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from workbench.plan.plan import Microbatch, Plan, Program, Stage, TokenShard
from workbench.schedule.action import STEP, Action, Pass

Operator = Callable[[Plan, random.Random], Plan | None]  # None: the plan has nothing of the kind


def _program(plan: Plan, rng: random.Random) -> tuple[int, list[Action]]:
    index = rng.randrange(len(plan.programs))
    return index, list(plan.programs[index].actions)


def with_program(plan: Plan, index: int, actions: Sequence[Action], rng: random.Random | None = None) -> Plan:
    """On all ranks of the program, or, with an `rng`, one time in three, on one of them alone."""
    program = plan.programs[index]
    made = [Program(ranks=program.ranks, actions=tuple(actions))]
    if rng is not None and len(program.ranks) > 1 and rng.random() < 1 / 3:
        alone = rng.choice(program.ranks)
        rest = tuple(rank for rank in program.ranks if rank != alone)
        made = [
            Program(ranks=(alone,), actions=tuple(actions)),
            Program(ranks=rest, actions=program.actions),
        ]
    return replace(plan, programs=(*plan.programs[:index], *made, *plan.programs[index + 1 :]))


def drop_action(plan: Plan, rng: random.Random) -> Plan:
    index, actions = _program(plan, rng)
    actions.pop(rng.randrange(len(actions)))
    return with_program(plan, index, actions, rng)


def duplicate_action(plan: Plan, rng: random.Random) -> Plan:
    index, actions = _program(plan, rng)
    actions.insert(rng.randrange(len(actions) + 1), rng.choice(actions))
    return with_program(plan, index, actions, rng)


def swap_neighbours(plan: Plan, rng: random.Random) -> Plan | None:
    index, actions = _program(plan, rng)
    if len(actions) < 2:
        return None
    at = rng.randrange(len(actions) - 1)
    actions[at], actions[at + 1] = actions[at + 1], actions[at]
    return with_program(plan, index, actions, rng)


def swap_actions(plan: Plan, rng: random.Random) -> Plan | None:
    index, actions = _program(plan, rng)
    if len(actions) < 2:
        return None
    one, other = rng.sample(range(len(actions)), 2)
    actions[one], actions[other] = actions[other], actions[one]
    return with_program(plan, index, actions, rng)


def move_action(plan: Plan, rng: random.Random) -> Plan:
    index, actions = _program(plan, rng)
    action = actions.pop(rng.randrange(len(actions)))
    actions.insert(rng.randrange(len(actions) + 1), action)
    return with_program(plan, index, actions, rng)


def retype_action(plan: Plan, rng: random.Random) -> Plan:
    """Another pass, microbatch or stage."""
    index, actions = _program(plan, rng)
    at = rng.randrange(len(actions))
    found = actions[at]
    actions[at] = rng.choice(
        (
            found._replace(kind=rng.choice(list(Pass))),
            found._replace(microbatch=rng.randrange(4)),
            found._replace(stage=rng.choice(plan.stages).id),
            STEP,
        )
    )
    return with_program(plan, index, actions, rng)


def give_action_away(plan: Plan, rng: random.Random) -> Plan | None:
    """To another program."""
    if len(plan.programs) < 2:
        return None
    one, other = rng.sample(range(len(plan.programs)), 2)
    actions, taker = list(plan.programs[one].actions), list(plan.programs[other].actions)
    taker.insert(rng.randrange(len(taker) + 1), actions.pop(rng.randrange(len(actions))))
    first = with_program(plan, one, actions)
    return replace(
        plan,
        programs=tuple(
            replace(program, actions=tuple(taker)) if index == other else first.programs[index]
            for index, program in enumerate(plan.programs)
        ),
    ) if len(first.programs) == len(plan.programs) else None  # fmt: skip


def split_backward(plan: Plan, rng: random.Random) -> Plan | None:
    """A B as I and W, W anywhere later; or only one of them."""
    index, actions = _program(plan, rng)
    whole = [at for at, action in enumerate(actions) if action.kind is Pass.B]
    if not whole:
        return None
    at = rng.choice(whole)
    found = actions[at]
    actions[at] = found._replace(kind=Pass.I)
    if rng.random() < 0.8:
        actions.insert(rng.randrange(at + 1, len(actions) + 1), found._replace(kind=Pass.W))
    return with_program(plan, index, actions, rng)


def _stage(plan: Plan, rng: random.Random) -> tuple[int, Stage]:
    index = rng.randrange(len(plan.stages))
    return index, plan.stages[index]


def _with_stages(plan: Plan, stages: Sequence[Stage]) -> Plan:
    return replace(plan, stages=tuple(stages))


def re_peer_stage(plan: Plan, rng: random.Random) -> Plan:
    """One of its ranks becomes another rank."""
    index, stage = _stage(plan, rng)
    rows = [list(row) for row in stage.ranks]
    row = rng.choice(rows)
    row[rng.randrange(len(row))] = rng.randrange(-1, plan.cluster.num_ranks + 1)
    moved = replace(stage, ranks=tuple(map(tuple, rows)))
    return _with_stages(plan, [moved if i == index else s for i, s in enumerate(plan.stages)])


def swap_ranks(plan: Plan, rng: random.Random) -> Plan | None:
    """Two stages take each other's ranks, their programs with them or not."""
    if len(plan.stages) < 2:
        return None
    one, other = rng.sample(range(len(plan.stages)), 2)
    stages = list(plan.stages)
    first, second = stages[one].ranks, stages[other].ranks
    stages[one], stages[other] = replace(stages[one], ranks=second), replace(stages[other], ranks=first)
    return _with_stages(plan, stages)


def reverse_grid(plan: Plan, rng: random.Random) -> Plan | None:
    """Context-parallel places in another order."""
    wide = [index for index, stage in enumerate(plan.stages) if stage.cp > 1]
    if not wide:
        return None
    at = rng.choice(wide)
    turned = replace(plan.stages[at], ranks=tuple(reversed(plan.stages[at].ranks)))
    return _with_stages(plan, [turned if i == at else s for i, s in enumerate(plan.stages)])


def cut_elsewhere(plan: Plan, rng: random.Random) -> Plan:
    """A boundary moves by one layer, on one side or on both."""
    index, stage = _stage(plan, rng)
    by = rng.choice((-1, 1))
    first, last = stage.layers
    moved = replace(stage, layers=(first, last + by))
    stages = [moved if i == index else s for i, s in enumerate(plan.stages)]
    if rng.random() < 0.5:
        stages = [
            replace(s, layers=(s.layers[0] + by, s.layers[1]))
            if (s.module, s.replica, s.layers[0]) == (stage.module, stage.replica, last)
            else s
            for s in stages
        ]
    return _with_stages(plan, stages)


def drop_stage(plan: Plan, rng: random.Random) -> Plan:
    index, _ = _stage(plan, rng)
    return _with_stages(plan, [s for i, s in enumerate(plan.stages) if i != index])


def duplicate_stage(plan: Plan, rng: random.Random) -> Plan:
    _, stage = _stage(plan, rng)
    number = stage.id if rng.random() < 0.5 else len(plan.stages)
    return _with_stages(plan, (*plan.stages, replace(stage, id=number)))


def rename_stage(plan: Plan, rng: random.Random) -> Plan:
    """Another id, module or replica."""
    index, stage = _stage(plan, rng)
    other = rng.choice(plan.stages)
    changed = rng.choice(
        (
            replace(stage, id=other.id),
            replace(stage, module=other.module),
            replace(stage, replica=stage.replica + rng.choice((-1, 1))),
        )
    )
    return _with_stages(plan, [changed if i == index else s for i, s in enumerate(plan.stages)])


def reorder_stages(plan: Plan, rng: random.Random) -> Plan:
    return _with_stages(plan, rng.sample(plan.stages, len(plan.stages)))


def _with_microbatch(plan: Plan, index: int, microbatch: Microbatch) -> Plan:
    changed = [microbatch if i == index else m for i, m in enumerate(plan.microbatches)]
    return replace(plan, microbatches=tuple(changed))


def drop_item(plan: Plan, rng: random.Random) -> Plan:
    index = rng.randrange(len(plan.microbatches))
    microbatch = plan.microbatches[index]
    gone = rng.choice(microbatch.items)
    rows = tuple(tuple(item for item in row if item != gone) for row in microbatch.rows)
    return _with_microbatch(plan, index, replace(microbatch, rows=rows))


def move_item(plan: Plan, rng: random.Random) -> Plan | None:
    """To another microbatch of its module, of any replica; empty rows go."""
    index = rng.randrange(len(plan.microbatches))
    giver = plan.microbatches[index]
    takers = [i for i, m in enumerate(plan.microbatches) if i != index and m.module == giver.module]
    if not takers:
        return None
    item = rng.choice(giver.items)
    rows = tuple(kept for row in giver.rows if (kept := tuple(i for i in row if i != item)))
    taker = rng.choice(takers)
    grown = (*plan.microbatches[taker].rows[:-1], (*plan.microbatches[taker].rows[-1], item))
    shrunk = _with_microbatch(plan, index, replace(giver, rows=rows))
    return _with_microbatch(shrunk, taker, replace(plan.microbatches[taker], rows=grown))


def swap_items(plan: Plan, rng: random.Random) -> Plan | None:
    """Two items of one module, of any microbatches."""
    module = rng.choice(plan.microbatches).module
    items = [item for m in plan.microbatches if m.module == module for item in m.items]
    if len(set(items)) < 2:
        return None
    one, other = rng.sample(sorted(set(items)), 2)
    pair = {one: other, other: one}
    return replace(
        plan,
        microbatches=tuple(
            replace(m, rows=tuple(tuple(pair.get(item, item) for item in row) for row in m.rows))
            if m.module == module
            else m
            for m in plan.microbatches
        ),
    )


def repeat_item(plan: Plan, rng: random.Random) -> Plan:
    """The same again, or one of another sample."""
    index = rng.randrange(len(plan.microbatches))
    microbatch = plan.microbatches[index]
    donor = rng.choice(plan.microbatches)
    row = (*microbatch.rows[0], rng.choice(donor.items))
    return _with_microbatch(plan, index, replace(microbatch, rows=(row, *microbatch.rows[1:])))


def regroup_rows(plan: Plan, rng: random.Random) -> Plan:
    """All items of a microbatch in one row, each in its own, or in another order."""
    index = rng.randrange(len(plan.microbatches))
    microbatch = plan.microbatches[index]
    items = list(microbatch.items)
    rng.shuffle(items)
    rows = rng.choice(((tuple(items),), tuple((item,) for item in items)))
    return _with_microbatch(plan, index, replace(microbatch, rows=rows))


def renumber_microbatch(plan: Plan, rng: random.Random) -> Plan:
    """Another index, replica or module; or two of one replica change places."""
    index = rng.randrange(len(plan.microbatches))
    microbatch, other = plan.microbatches[index], rng.choice(plan.microbatches)
    if rng.random() < 0.5 and other.module == microbatch.module:
        swapped = _with_microbatch(plan, index, replace(microbatch, rows=other.rows))
        return _with_microbatch(swapped, plan.microbatches.index(other), replace(other, rows=microbatch.rows))
    changed = rng.choice(
        (
            replace(microbatch, index=other.index),
            replace(microbatch, replica=microbatch.replica + 1),
            replace(microbatch, module=other.module),
        )
    )
    return _with_microbatch(plan, index, changed)


def drop_microbatch(plan: Plan, rng: random.Random) -> Plan:
    gone = rng.choice(plan.microbatches)
    return replace(plan, microbatches=tuple(m for m in plan.microbatches if m is not gone))


def reorder_microbatches(plan: Plan, rng: random.Random) -> Plan:
    """Of the file alone: their indices stay."""
    return replace(plan, microbatches=tuple(rng.sample(plan.microbatches, len(plan.microbatches))))


def _shards(plan: Plan, index: int, shard: TokenShard) -> Plan:
    changed = [shard if i == index else s for i, s in enumerate(plan.token_shards)]
    return replace(plan, token_shards=tuple(changed))


def re_own_tokens(plan: Plan, rng: random.Random) -> Plan | None:
    """A block to another owner, which may not exist."""
    if not plan.token_shards:
        return None
    index = rng.randrange(len(plan.token_shards))
    owners = list(plan.token_shards[index].owners)
    owners[rng.randrange(len(owners))] = rng.choice((0, 1, 1, 0, 2, -1))
    return _shards(plan, index, replace(plan.token_shards[index], owners=tuple(owners)))


def re_shape_tokens(plan: Plan, rng: random.Random) -> Plan | None:
    """Other block sizes, or a block more or less."""
    if not plan.token_shards:
        return None
    index = rng.randrange(len(plan.token_shards))
    shard = plan.token_shards[index]
    changed = rng.choice(
        (
            replace(shard, block_tokens=shard.block_tokens + rng.choice((-1, 1))),
            replace(shard, owners=shard.owners[:-1]),
            replace(shard, owners=(*shard.owners, 0)),
            replace(shard, microbatch=shard.microbatch + 1),
            replace(shard, row=shard.row + 1),
        )
    )
    return _shards(plan, index, changed)


def drop_tokens(plan: Plan, rng: random.Random) -> Plan | None:
    """A row goes back to zigzag; or its owners stand twice."""
    if not plan.token_shards:
        return None
    index = rng.randrange(len(plan.token_shards))
    kept = [s for i, s in enumerate(plan.token_shards) if i != index]
    doubled = (*plan.token_shards, plan.token_shards[index])
    return replace(plan, token_shards=tuple(kept) if rng.random() < 0.5 else doubled)


def shrink_memory(plan: Plan, rng: random.Random) -> Plan:
    """Of every node, by up to a million times."""
    factor = 10 ** rng.uniform(0, 6)
    nodes = tuple(replace(n, memory_bytes=max(1, int(n.memory_bytes / factor))) for n in plan.cluster.nodes)
    return replace(plan, cluster=replace(plan.cluster, nodes=nodes))


OPERATORS: tuple[Operator, ...] = (
    drop_action,
    duplicate_action,
    swap_neighbours,
    swap_actions,
    move_action,
    retype_action,
    give_action_away,
    split_backward,
    re_peer_stage,
    swap_ranks,
    reverse_grid,
    cut_elsewhere,
    drop_stage,
    duplicate_stage,
    rename_stage,
    reorder_stages,
    drop_item,
    move_item,
    swap_items,
    repeat_item,
    regroup_rows,
    renumber_microbatch,
    drop_microbatch,
    reorder_microbatches,
    re_own_tokens,
    re_shape_tokens,
    drop_tokens,
    shrink_memory,
)
