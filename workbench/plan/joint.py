"""Joint replicas: which rows of a microbatch each of them has.

Experts may be distributed among more ranks than one data-parallel replica has in a stage. Then every pass of
these replicas waits for all of them, layer by layer. So they are one stage, whose microbatch is those of all
of them, and each has whole rows of it: no attention crosses from one to another. What a replica computes in a
pass is what it computes in the plan with `replicas_apart`; only its experts' rows come from all of them.

Source: Megatron Core, `parallel_state.initialize_model_parallel`: expert-parallel groups are cut from the
tensor-, context- and data-parallel ranks of a pipeline stage.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from workbench.plan.instance_cache import cached_on_instance
from workbench.plan.plan import Microbatch, Plan, TokenShard
from workbench.plan.stage import Stage


def row_replicas(plan: Plan, microbatch: Microbatch) -> tuple[int, ...]:
    """[rows] joint replica of each row: that of its token shard's owners; without a shard one after another.

    Complexity: O(rows).
    """
    stage = plan.chain[microbatch.module, microbatch.replica][0]
    num_replicas, cp = stage.joint_replicas, stage.cp
    key = microbatch.module, microbatch.replica, microbatch.index
    shards = (plan.token_shard.get((*key, row)) for row in range(len(microbatch.rows)))
    return tuple(
        row % num_replicas if shard is None else shard.owners[0] // cp for row, shard in enumerate(shards)
    )


def own_rows(plan: Plan, microbatch: Microbatch, replica: int) -> Microbatch:
    """The microbatch with the rows of one joint replica alone; its rows are numbered anew.

    Args:
        plan: with stages.
        microbatch: of the plan.
        replica: index among the joint replicas.
    """
    if plan.chain[microbatch.module, microbatch.replica][0].joint_replicas == 1:
        return microbatch
    pairs = zip(microbatch.rows, row_replicas(plan, microbatch), strict=True)
    return replace(microbatch, rows=tuple(row for row, owner in pairs if owner == replica))


def turns(num_rows: int, num_replicas: int) -> tuple[range, ...]:
    """[joint replicas] rows of each where they take rows in turn; a replica may have none."""
    return tuple(range(first, num_rows, num_replicas) for first in range(num_replicas))


def in_turn(microbatch: Microbatch, num_replicas: int) -> tuple[Microbatch, ...]:
    """The microbatches of joint replicas that take rows in turn, without those that have none."""
    if num_replicas == 1:
        return (microbatch,)
    parts = turns(len(microbatch.rows), num_replicas)
    return tuple(
        replace(microbatch, rows=tuple(microbatch.rows[row] for row in part)) for part in parts if part
    )


@cached_on_instance
def replicas_apart(plan: Plan) -> Plan:
    """The plan with each joint replica as one of its own, without programs: what one of them alone computes.

    A microbatch keeps its index, and is absent from a replica without rows. Experts that joint replicas
    distribute are whole then, on each of the ranks or cut by tp.
    """
    if not plan.has_joint_replicas:
        return plan
    stages = (stage_apart(stage, number) for stage in plan.stages for number in range(stage.joint_replicas))
    microbatches = (
        (microbatch, number)
        for microbatch in plan.microbatches
        for number in range(plan.chain[microbatch.module, microbatch.replica][0].joint_replicas)
    )
    parts = (microbatch_apart(plan, microbatch, number) for microbatch, number in microbatches)
    return replace(
        plan,
        stages=tuple(replace(stage, id=number) for number, stage in enumerate(stages)),
        microbatches=tuple(part for part in parts if part.rows),
        programs=(),
        token_shards=tuple(_shards_apart(plan)),
    )


def stage_apart(stage: Stage, number: int) -> Stage:
    """One joint replica of a stage, by its number among them, as a stage of a replica of its own."""
    if stage.joint_replicas == 1:
        return stage
    first = number * stage.cp
    return replace(
        stage,
        replica=stage.replica * stage.joint_replicas + number,
        ranks=stage.ranks[first : first + stage.cp],
        ep=stage.ep if stage.tp * stage.cp % stage.ep == 0 else 1,
        joint_replicas=1,
    )


def microbatch_apart(plan: Plan, microbatch: Microbatch, number: int) -> Microbatch:
    """The rows of one joint replica as a microbatch of `replicas_apart`; it may have none."""
    num_replicas = plan.chain[microbatch.module, microbatch.replica][0].joint_replicas
    own = own_rows(plan, microbatch, number)
    return replace(own, replica=microbatch.replica * num_replicas + number)


def _shards_apart(plan: Plan) -> Iterator[TokenShard]:
    """Token shards with the replicas, rows and owners of `replicas_apart`."""
    microbatches = {(each.module, each.replica, each.index): each for each in plan.microbatches}
    for shard in plan.token_shards:
        stage = plan.chain[shard.module, shard.replica][0]
        owner_of = row_replicas(plan, microbatches[shard.module, shard.replica, shard.microbatch])
        number = owner_of[shard.row]
        yield replace(
            shard,
            replica=shard.replica * stage.joint_replicas + number,
            row=owner_of[: shard.row].count(number),
            owners=tuple(owner - number * stage.cp for owner in shard.owners),
        )


def check_joint(stage: Stage) -> None:
    """Raise ValueError for joint replicas that do not divide the grid."""
    num_replicas = stage.joint_replicas
    if num_replicas < 1 or stage.num_shares % num_replicas:
        raise ValueError(
            f"stage {stage.id}: joint_replicas must divide the {stage.num_shares} rows of its grid, got "
            f"{num_replicas}; nearest: {stage.num_shares}"
        )


def check_equally_joint(chain: Sequence[Stage]) -> None:
    """Raise ValueError unless the stages of a replica have equally many joint replicas."""
    counts = sorted({stage.joint_replicas for stage in chain})
    if len(counts) > 1:
        raise ValueError(
            f"module {chain[0].module!r} replica {chain[0].replica}: joint_replicas must not change inside a "
            f"replica, got {counts}"
        )


def check_joint_rows(plan: Plan) -> None:
    """Raise ValueError where a joint replica has no row of a microbatch whose experts it holds.

    All ranks that distribute experts meet in every layer with experts. Elsewhere, a replica without rows
    skips the pass.
    """
    for key, microbatches in plan.microbatches_of.items():
        stage = plan.chain[key][0]
        if stage.ep <= stage.tp * stage.cp:
            continue
        for microbatch in microbatches:
            missing = set(range(stage.joint_replicas)) - set(row_replicas(plan, microbatch))
            if missing:
                raise ValueError(
                    f"module {stage.module!r} replica {stage.replica} microbatch {microbatch.index}: each of "
                    f"{stage.joint_replicas} joint replicas wants a row, number {min(missing)} has none; "
                    f"nearest: {stage.joint_replicas} samples per microbatch, or a multiple"
                )
