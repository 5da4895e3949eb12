"""Sums each layer's gradients over its ranks while earlier layers are still in their backward."""

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
    """Gradients whose sums start inside the last backward of their stage.

    Oobleck chapter, section 2.6.1: layers are synchronised one by one, each with the peers that hold
    it, and the communication overlaps the computation. A hook on every weight says when its gradient is
    whole. All ranks start their sums in the plan's order of groups, so that ranks of two groups never wait
    for each other; a layer that is whole before its turn waits for it. What no hook reports, a
    weight that the last microbatch did not reach, follows where the program reduces the stage.
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
        """The stage's last backward is next: a gradient that it adds to is whole."""
        for weight in self._modules[stage].parameters():
            if id(weight) in self._group_of:
                hook = weight.register_post_accumulate_grad_hook(self._note_whole)
                self._hooks.append(hook)

    def reduce(self, action: Action) -> None:
        """Start the sums of the action's groups that have not started, in their turn."""
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
    """Position in a rank's program -> stage whose gradients are whole when the backward there has run.

    None for a stage whose weight gradients come apart from its input gradients.

    Args:
        equal: stage -> those that add to the same gradients, where there are several.
    """
    stages = dict.fromkeys(action.stage for action in program if action.stage is not None)
    last = {stage: last_backward(program, equal.get(stage, (stage,))) for stage in stages}
    return {program.index(action): stage for stage, action in last.items() if action is not None}
