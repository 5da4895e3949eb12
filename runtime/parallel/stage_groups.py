"""Groups of ranks that share a stage's tokens, weights or experts."""

from collections.abc import Mapping
from typing import TypeVar

import torch.distributed as dist

from runtime.parallel.context.group import ContextGroup
from runtime.parallel.expert.group import ExpertGroup
from runtime.parallel.tensor.group import TensorGroup
from runtime.world.mesh import Mesh
from workbench.plan.stage import Stage

Group = TypeVar("Group", bound=ContextGroup)
ProcessGroups = Mapping[tuple[int, ...], dist.ProcessGroup]


class StageGroups:
    """Finds the groups of one rank in one stage; each is None where the rank is alone.

    Ranks are separate processes: their mesh has the process groups.
    """

    def context(self, mesh: Mesh, stage: Stage) -> ContextGroup | None:
        """The ranks that share its tokens."""
        if stage.cp == 1:
            return None
        ranks = next(column for column in stage.context_ranks if mesh.rank in column)
        return self.join(ContextGroup, mesh, tuple(sorted(ranks)), mesh.context)

    def tensor(self, mesh: Mesh, stage: Stage) -> TensorGroup | None:
        """The ranks that share its weights."""
        if stage.tp == 1:
            return None
        ranks = next(row for row in stage.ranks if mesh.rank in row)
        return self.join(TensorGroup, mesh, ranks, mesh.tensor)

    def experts(self, mesh: Mesh, stage: Stage) -> ExpertGroup | None:
        """The ranks that distribute its experts."""
        if stage.ep == 1:
            return None
        ranks = next(group for group in stage.expert_ranks if mesh.rank in group)
        return self.join(ExpertGroup, mesh, ranks, mesh.experts)

    def join(self, kind: type[Group], mesh: Mesh, ranks: tuple[int, ...], held: ProcessGroups) -> Group:
        """A group of these ranks, of the given kind."""
        return kind(ranks, mesh.rank, held[ranks], clock=mesh.clock)
