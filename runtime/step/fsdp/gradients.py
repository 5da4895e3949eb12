"""Gradients of a rank with sharded weights among others: one norm, one optimizer, one step."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from torch import Tensor, nn

from runtime.step.fsdp.stages import ShardedStages
from runtime.step.fsdp.weights import ShardedWeights
from runtime.step.gradients import Gradients
from runtime.step.stage_module import StageModule
from runtime.step.timing import Recorder
from runtime.step.weight_bucket import WeightBucket
from runtime.world.mesh import Mesh
from workbench.plan.lowered import Lowered, Weights


class ShardedGradients(Gradients):
    """As `Gradients`, including stages with sharded weights.

    Args:
        sharded: these stages.
        modules: all of this rank.
    """

    def __init__(
        self,
        sharded: ShardedStages,
        lowered: Lowered,
        mesh: Mesh,
        modules: Sequence[StageModule],
        *,
        recorder: Recorder,
        buckets: Mapping[Weights, WeightBucket] = MappingProxyType({}),
    ) -> None:
        whole = [module for module in modules if module.stage.id not in sharded]
        super().__init__(lowered, mesh, whole, recorder=recorder, buckets=buckets)
        self._sharded = sharded
        sharded.follow(lowered.plan.program.get(mesh.rank, ()), recorder)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of whole weights, then this rank's parts of sharded ones."""
        yield from super().parameters()
        yield from self._sharded.parameters()

    def accumulate(self) -> None:
        """After a backward, add gradients to wide sums; a round of one backward needs none."""
        super().accumulate()
        self._sharded.accumulate()

    def finish(self) -> None:
        """Wait for all reductions; errors as `Gradients.finish`."""
        self._sharded.finish()
        super().finish()

    def publish(self) -> None:
        """Distribute updated weights; errors as `Gradients.publish`."""
        super().publish()
        self._sharded.publish()

    def whole(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield (weight or copy, its whole gradient) after `finish`; a collective."""
        yield from super().whole()
        yield from self._sharded.whole_gradients()

    def _flat(self, weights: Weights) -> Tensor:
        sharded = self._sharded.holding(weights)
        return super()._flat(weights) if sharded is None else sharded.gradient()

    def _counted(self) -> Iterator[Tensor]:
        yield from super()._counted()
        counted: dict[int, ShardedWeights] = {}
        for group in self._lowered.groups:
            if group.ranks[0] == self._mesh.rank:  # of the ranks with this part
                sharded = self._sharded.holding(group.weights[0])
                if sharded is not None:
                    counted[id(sharded.own)] = sharded
        for sharded in counted.values():
            yield from sharded.counted()
