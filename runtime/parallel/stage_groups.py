"""How a rank joins the ranks with which it shares a stage's tokens, weights or experts."""

from typing import Protocol

from runtime.parallel.context.group import ContextGroup, context_group
from runtime.parallel.expert.group import ExpertGroup, expert_group
from runtime.parallel.tensor.group import TensorGroup, tensor_group
from runtime.world.mesh import Mesh
from workbench.plan.plan import Stage


class StageGroups(Protocol):
    """Groups of one rank in one stage; each is None where the rank is alone."""

    def context(self, mesh: Mesh, stage: Stage) -> ContextGroup | None:
        """Those that share its tokens."""
        ...

    def tensor(self, mesh: Mesh, stage: Stage) -> TensorGroup | None:
        """Those that share its weights."""
        ...

    def experts(self, mesh: Mesh, stage: Stage) -> ExpertGroup | None:
        """Those that distribute its experts."""
        ...


class ProcessGroups:
    """Ranks in processes of their own: the process groups of their mesh."""

    def context(self, mesh: Mesh, stage: Stage) -> ContextGroup | None:
        return context_group(mesh, stage)

    def tensor(self, mesh: Mesh, stage: Stage) -> TensorGroup | None:
        return tensor_group(mesh, stage)

    def experts(self, mesh: Mesh, stage: Stage) -> ExpertGroup | None:
        return expert_group(mesh, stage)
