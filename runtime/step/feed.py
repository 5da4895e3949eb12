"""Input data of one rank's stages in a step, for all its forwards."""

from collections.abc import Callable, Mapping

import torch

from runtime.data.batches import DataSource, microbatch_data
from runtime.models.adapter import MicrobatchData
from runtime.parallel.context.group import ContextGroup
from runtime.world.mesh import Mesh
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
    """(stage, microbatch) -> data of every F on this rank, made before timing starts."""
    feed = {}
    for action in plan.program.get(mesh.rank, ()):
        if action.kind is Pass.F:
            assert action.stage is not None
            assert action.microbatch is not None
            stage = plan.stage[action.stage]
            microbatch = plan.microbatches_of[stage.module, stage.replica][action.microbatch]
            feed[stage.id, microbatch.index] = microbatch_data(
                plan,
                stage,
                microbatch,
                source,
                dtype=dtype,
                device=mesh.device,
                context=join(mesh, stage),
            )
    return feed
