"""Input data of one rank's stages in a step, for all its forwards."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from runtime.data.batches import DataSource, microbatch_data
from runtime.models.adapter import MicrobatchData
from runtime.parallel.context.batch import carries_from
from runtime.parallel.context.group import ContextGroup
from runtime.world.mesh import Mesh
from workbench.plan.joint import microbatch_apart, replicas_apart, stage_apart
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage
from workbench.schedule.action import Pass

Join = Callable[[Mesh, Stage], ContextGroup | None]  # the context-parallel group of a rank in a stage


def feed_of(
    plan: Plan,
    mesh: Mesh,
    source: DataSource,
    dtype: torch.dtype,
    join: Join,
) -> Mapping[tuple[int, int], MicrobatchData]:
    """(stage, microbatch) -> data of every F on this rank, made before timing starts.

    A joint replica has the data of its own rows; a pass without any is absent.
    """
    feed = {}
    for action in plan.program.get(mesh.rank, ()):
        if action.kind is Pass.F:
            assert action.stage is not None
            assert action.microbatch is not None
            stage = plan.stage[action.stage]
            microbatch = plan.microbatches_of[stage.module, stage.replica][action.microbatch]
            number = stage.share_of(mesh.rank) // stage.cp
            own = microbatch_apart(plan, microbatch, number)
            if not own.rows:
                continue
            data = microbatch_data(
                replicas_apart(plan),
                stage_apart(stage, number),
                own,
                source,
                dtype=dtype,
                device=mesh.device,
                context=join(mesh, stage),
            )
            if stage.joint_replicas > 1:  # others may need a gradient to pass through here
                data = replace(data, carries_from=carries_from(plan, stage, microbatch))
            feed[stage.id, microbatch.index] = data
    return feed
