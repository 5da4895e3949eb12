"""Gradients of a rank with sharded weights among others: one norm, one optimizer, one step."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor, nn

from runtime.step.flat_part import FlatPart
from runtime.step.fsdp.stages import ShardedStages
from runtime.step.fsdp.weights import ShardedWeights
from runtime.step.gradients import Gradients
from runtime.step.stage_module import StageModule
from runtime.step.timing import Recorder
from runtime.step.weight_bucket import WeightBucket
from runtime.world.clock import Channel, Stamp, Traffic
from runtime.world.mesh import Mesh
from workbench.plan.lowered import GradientGroup, Lowered, Weights
from workbench.plan.parameter_shards import stages_reduced_once
from workbench.schedule.action import Action

_BESIDE = Channel(Traffic.SUM, ("behind reduce-scatters",))


class _Due(NamedTuple):
    """A reduction of a group over replicas that waits for its reduce-scatter, and passes until `since`."""

    action: Action
    since: Stamp
    send: Callable[[], None]


class ShardedGradients(Gradients):
    """As `Gradients`, including stages with sharded weights.

    A reduction over replicas behind a reduce-scatter that no pass waits for starts when that has ended: on a
    device in its side stream, on the host between two actions, in the program's order on all ranks.

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
        self._due: deque[_Due] = deque()
        plan = lowered.plan
        sharded.follow(plan.program.get(mesh.rank, ()), stages_reduced_once(plan), recorder)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of whole weights, then this rank's parts of sharded ones."""
        yield from super().parameters()
        yield from self._sharded.parameters()

    def flat_parts(self) -> Iterator[FlatPart]:
        """Those of them that are parts of flat tensors."""
        yield from super().flat_parts()
        yield from self._sharded.flat_parts()

    def accumulate(self) -> None:
        """After a backward, add gradients to wide sums; a round of one backward needs none."""
        super().accumulate()
        self._sharded.accumulate()

    def proceed(self) -> None:
        """Start the next reductions whose reduce-scatters have ended."""
        while self._due and self._sharded.can_follow(self._due[0].action):
            self._start_due()

    def _start_due(self) -> None:
        due = self._due.popleft()
        with self._clock.side_stream(_BESIDE, due.since):
            self._sharded.finish_before(due.action, _BESIDE)
            due.send()

    def _start(self, action: Action, group: GradientGroup) -> None:
        """Start the reduction of one group, or let it wait for its reduce-scatter and for earlier ones."""
        if not self._due and not self._sharded.is_beside(action):
            super()._start(action, group)
            return
        weights, since = group.weights[0], self._clock.stamp()
        if self._sharded.holding(weights) is None:  # partial gradients are summed in the order of computation
            send = partial(self._send, action, group, since, self._flat(weights))
        else:
            send = partial(super()._start, action, group)
        self._due.append(_Due(action, since, send))
        self.proceed()

    def finish(self) -> None:
        """Wait for all reductions; errors as `Gradients.finish`."""
        while self._due:
            self._start_due()
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
