"""Joint replicas: which rows of a microbatch each of them has.

Experts may be distributed among more ranks than one data-parallel replica has in a stage. Then every pass of
these replicas waits for all of them, layer by layer. So they are one stage, whose microbatch is those of all
of them, and each has whole rows of it: no attention crosses from one to another.

Source: Megatron Core, `parallel_state.initialize_model_parallel`: expert-parallel groups are cut from the
tensor-, context- and data-parallel ranks of a pipeline stage.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from workbench.plan.plan import Microbatch, Plan
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


def rows_on(plan: Plan, stage: Stage, microbatch: Microbatch, rank: int) -> Microbatch:
    """The rows of a microbatch whose tokens a rank of the stage has, whole or in part."""
    share = next(index for index, row in enumerate(stage.ranks) if rank in row)
    return own_rows(plan, microbatch, share // stage.cp)


def in_turn(microbatch: Microbatch, num_replicas: int) -> tuple[Microbatch, ...]:
    """The microbatches of joint replicas that take rows in turn, without those that have none."""
    if num_replicas == 1:
        return (microbatch,)
    parts = (microbatch.rows[first::num_replicas] for first in range(num_replicas))
    return tuple(replace(microbatch, rows=rows) for rows in parts if rows)


def replicas_apart(plan: Plan) -> Plan:
    """The plan with each joint replica as one of its own, without programs: what one of them alone computes.

    Experts that joint replicas distribute are whole then, on each of the ranks or cut by tp.
    """
    if all(stage.joint_replicas == 1 for stage in plan.stages):
        return plan
    stages = (part for stage in plan.stages for part in _stages_apart(stage))
    return replace(
        plan,
        stages=tuple(replace(stage, id=number) for number, stage in enumerate(stages)),
        microbatches=tuple(
            part for name in plan.microbatches_of for part in _microbatches_apart(plan, *name)
        ),
        programs=(),
        token_shards=tuple(
            shard
            for shard in plan.token_shards
            if plan.chain[shard.module, shard.replica][0].joint_replicas == 1
        ),
    )


def _stages_apart(stage: Stage) -> Iterator[Stage]:
    num_replicas, cp = stage.joint_replicas, stage.cp
    ep = stage.ep if stage.tp * cp % stage.ep == 0 else 1
    for replica in range(num_replicas):
        yield replace(
            stage,
            replica=stage.replica * num_replicas + replica,
            ranks=stage.ranks[replica * cp : (replica + 1) * cp],
            ep=ep,
            joint_replicas=1,
        )


def _microbatches_apart(plan: Plan, module: str, replica: int) -> Iterator[Microbatch]:
    num_replicas = plan.chain[module, replica][0].joint_replicas
    for number in range(num_replicas):
        parts = (own_rows(plan, each, number) for each in plan.microbatches_of[module, replica])
        for index, part in enumerate(part for part in parts if part.rows):
            yield replace(part, replica=replica * num_replicas + number, index=index)


def check_joint(stage: Stage) -> None:
    """Raise ValueError for joint replicas that do not divide the grid, or have context-parallel ranks."""
    num_replicas = stage.joint_replicas
    if num_replicas < 1 or stage.num_shares % num_replicas:
        raise ValueError(
            f"stage {stage.id}: joint_replicas must divide the {stage.num_shares} rows of its grid, got "
            f"{num_replicas}; nearest: {stage.num_shares}"
        )
    if num_replicas > 1 and stage.cp > 1:
        raise ValueError(
            f"stage {stage.id}: joint replicas have no context parallelism, got cp {stage.cp}; want 1"
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
