"""Sums each layer's gradients over its ranks, overlapping the backward of earlier layers."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from runtime.step.gradients import Gradients
from runtime.step.stage_module import StageModule
from runtime.step.timing import Recorder
from runtime.world.mesh import Mesh
from workbench.elastic.layerwise import last_backward
from workbench.plan.lowered import Lowered
from workbench.schedule.action import Action


class LayerwiseGradients(Gradients):
    """Gradients whose reduction starts within the last backward of their stage.

    Oobleck chapter, section 2.6.1: layers are synchronised one by one, each with the peers that have it,
    and communication overlaps computation. A hook on every weight reports that its gradient is complete. All
    ranks start their sums in the plan's order of groups, so that ranks of two groups never wait for each
    other; a layer that completes early waits for its turn. A weight that the last microbatch did not reach
    triggers no hook; it follows where the program reduces the stage.
    """

    def __init__(
        self,
        lowered: Lowered,
        mesh: Mesh,
        modules: Sequence[StageModule],
        *,
        recorder: Recorder,
    ) -> None:
        super().__init__(lowered, mesh, modules, recorder=recorder)
        self._groups = lowered.groups
        self._action = {
            index: action
            for action in lowered.plan.program.get(mesh.rank, ())
            for index in lowered.reductions.get(action, ())
            if mesh.rank in lowered.groups[index].ranks
        }
        self._order = sorted(self._action)
        self._missing = {
            index: {id(copy) for copies in self._copies[lowered.groups[index].weights[0]] for copy in copies}
            for index in self._order
        }
        self._group_of = {weight: index for index, missing in self._missing.items() for weight in missing}
        self._modules = {module.stage.id: module for module in modules}
        self._hooks: list[RemovableHandle] = []

    def watch(self, stage: int) -> None:
        """Announce the stage's last backward, after which gradients are complete."""
        for weight in self._modules[stage].parameters():
            if id(weight) in self._group_of:
                hook = weight.register_post_accumulate_grad_hook(self._note_whole)
                self._hooks.append(hook)

    def reduce(self, action: Action) -> None:
        """Start the sums of those of the action's groups that have not started yet, in order."""
        for index, planned in self._action.items():
            if planned == action:
                self._missing[index].clear()
        self._start_whole()

    def finish(self) -> None:
        """As `Gradients.finish`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        super().finish()

    def _note_whole(self, weight: Tensor) -> None:
        self._missing[self._group_of[id(weight)]].discard(id(weight))
        self._start_whole()

    def _start_whole(self) -> None:
        while self._order and not self._missing[self._order[0]]:
            index = self._order.pop(0)
            self._start(self._action[index], self._groups[index])


def last_backwards(
    program: Sequence[Action], equal: Mapping[int, tuple[int, ...]] = MappingProxyType({})
) -> dict[int, int]:
    """Position of a backward in a rank's program -> stage whose gradients it completes.

    Stages whose weight gradients are computed apart from input gradients are absent.

    Args:
        equal: stage -> stages that accumulate into the same gradients, where there are several.
    """
    stages = dict.fromkeys(action.stage for action in program if action.stage is not None)
    last = {stage: last_backward(program, equal.get(stage, (stage,))) for stage in stages}
    return {program.index(action): stage for stage, action in last.items() if action is not None}
