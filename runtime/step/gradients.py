"""Gradients after the last backward: summed over ranks, copies and ties, then clipped."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.step.flat_part import FlatPart
from runtime.step.fsdp.weights import split_flat
from runtime.step.optimizer import clip_factor, squared_norm
from runtime.step.pooled_updates import Counts
from runtime.step.timing import Recorder
from runtime.step.weight_bucket import HoldsWeights, WeightBucket, copies_of
from runtime.world.clock import Awaited, Channel, Stamp, Traffic
from runtime.world.mesh import Mesh
from runtime.world.tensor_collectives import free
from workbench.plan.lowered import GradientGroup, Lowered, Weights
from workbench.schedule.action import STEP, Action
from workbench.trace import Lane


class _Reduction(NamedTuple):
    """A reduction in flight, from `sent` to `result` (the same tensor where weights are whole).

    Where its end is not reported, `is_noted` is False and its span ends when it is waited for.
    """

    action: Action
    group: GradientGroup
    start: Stamp
    work: dist.Work
    sent: Tensor
    result: Tensor
    is_noted: bool = False


class Gradients:
    """All gradients of one rank. A weight in several stages of the rank is one weight with copies.

    Args:
        modules: stages of this rank, in the plan's order.
        buckets: by gradient group, weights of which this rank updates a part, or a wide copy.
    """

    def __init__(
        self,
        lowered: Lowered,
        mesh: Mesh,
        modules: Sequence[HoldsWeights],
        *,
        recorder: Recorder,
        buckets: Mapping[Weights, WeightBucket] = MappingProxyType({}),
    ) -> None:
        self._shared = [module.shared for module in modules if module.shared is not None]
        self._elsewhere = frozenset(id(weight) for shared in self._shared for weight in shared.elsewhere)
        self._partial = {id(weight): shared.group for shared in self._shared for weight in shared.partial}
        self._lowered = lowered
        self._mesh, self._clock = mesh, mesh.clock
        self._recorder = recorder
        self._copies = copies_of(modules)
        self._buckets = buckets
        self._pending: list[_Reduction] = []

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the optimizer: every trainable one once, including copies, in a fixed order."""
        for weights, all_copies in self._copies.items():
            if weights in self._buckets:
                yield self._buckets[weights].own
                continue
            for copies in all_copies:
                yield from copies

    def flat_parts(self) -> Iterator[FlatPart]:
        """Those of them that are parts of flat tensors."""
        yield from (bucket.flat_part() for bucket in self._buckets.values())

    def exchange(self, received: Tensor, sent: Tensor, counts: Counts, ranks: tuple[int, ...]) -> None:
        """In STEP, an all-to-all of elements among ranks that hold parts of the same weights.

        Args:
            received: elements from the ranks, in their order.
            sent: elements to the ranks.
            counts: of both, by rank.

        Raises:
            RankError: it did not end in time, or a peer is gone.
        """
        work = self._mesh.start_exchange(received, sent, counts, ranks)
        self._wait(work, ranks, f"in {STEP}, exchanging matrices")

    def clear(self) -> None:
        """Clear gradients before the next step."""
        for parameter in self.parameters():
            parameter.grad = None

    def accumulate(self) -> None:
        """After a backward, add gradients to the wide sums of weights that have one."""
        for bucket in self._buckets.values():
            if bucket.is_wide:
                bucket.accumulate()

    def reduce(self, action: Action) -> None:
        """Start the reduction of every group of an action; without items the gradient is zero."""
        for index in self._lowered.reductions.get(action, ()):
            group = self._lowered.groups[index]
            if self._mesh.rank in group.ranks:  # else of another tensor-parallel rank of the stage
                self._start(action, group)

    def proceed(self) -> None:
        """Start reductions that other exchanges of this rank have held up; here there are none."""

    def _start(self, action: Action, group: GradientGroup) -> None:
        """Start the reduction of one group."""
        start = self._clock.stamp()
        self._send(action, group, start, self._flat(group.weights[0]))

    def _send(self, action: Action, group: GradientGroup, start: Stamp, given_N: Tensor) -> None:
        """Start the reduction of one group's gradient [N]."""
        bucket = self._buckets.get(group.weights[0])
        if bucket is None or len(bucket.share.instance) == 1:
            ranks, traffic, result = group.ranks, Traffic.SUM, given_N
            work = self._mesh.start_all_reduce(given_N, ranks)
        else:
            ranks, traffic, result = bucket.share.instance, Traffic.SCATTER, bucket.empty_part()
            work = self._mesh.start_reduce_scatter(result, given_N, ranks)
        pending = _Reduction(action, group, start, work, given_N, result)
        awaited, note = self._awaited(ranks, f"in {action}"), partial(self._note_span, pending)
        is_noted = self._clock.follow(work, Channel(traffic, ranks), awaited, note)
        self._pending.append(pending._replace(is_noted=is_noted))

    def _note_span(self, pending: _Reduction, end: Stamp) -> None:
        self._recorder.span(Lane.REDUCE, pending.action, pending.start, end)

    def _flat(self, weights: Weights) -> Tensor:
        """[N] this rank's gradient of a group, with partial gradients summed over tensor-parallel ranks."""
        bucket, all_copies = self._buckets.get(weights), self._copies[weights]
        if bucket is not None:
            flat_N = bucket.take()
        else:
            flat_N = torch.cat([_summed(copies).reshape(-1) for copies in all_copies])
        firsts = [copies[0] for copies in all_copies]
        parts = zip(split_flat(flat_N, firsts), firsts, strict=True)
        partial = [part_N for part_N, weight in parts if id(weight) in self._partial]
        if partial:
            group = next(self._partial[id(weight)] for weight in firsts if id(weight) in self._partial)
            total = torch.cat(partial)
            group.sum(total)
            for piece, summed in zip(partial, split_flat(total, partial), strict=True):
                piece.copy_(summed)
        return flat_N

    def finish(self) -> None:
        """Wait for the reductions; then every weight and copy has its complete gradient.

        Where the optimizer updates a part of weights, that part has its gradient. A trainable weight without
        any has a zero gradient, so that weight decay does not depend on the distribution of the batch.

        Raises:
            RankError: a reduction did not end in time, or a peer is gone.
        """
        results: dict[Weights, Tensor] = {}
        for pending in self._pending:
            weights, what = pending.group.weights[0], f"in {pending.action}"
            self._wait(pending.work, pending.group.ranks, what)
            if not pending.is_noted:
                self._note_span(pending, self._clock.stamp())
            results[weights] = pending.result
            if pending.sent is not pending.result:
                free(pending.sent)
            bucket = self._buckets.get(weights)
            if bucket is not None and len(bucket.share.instance) > 1 and len(bucket.share.peers) > 1:
                peers = bucket.share.peers
                self._wait(self._mesh.start_all_reduce(pending.result, peers), peers, what)
        self._pending.clear()
        for weights, all_copies in self._copies.items():
            if weights in self._buckets:
                self._buckets[weights].own.grad = (
                    results[weights] if weights in results else self._flat(weights)
                )
            elif weights in results or any(id(copies[0]) in self._partial for copies in all_copies):
                _set_views(results[weights] if weights in results else self._flat(weights), all_copies)
            else:  # in place
                for copies in all_copies:
                    _set(copies, _summed(copies))

    def _wait(self, work: dist.Work, ranks: tuple[int, ...], what: str) -> None:
        self._clock.wait(work, self._awaited(ranks, what))

    def _awaited(self, ranks: tuple[int, ...], what: str) -> Awaited:
        return Awaited.among(self._mesh.rank, what, ranks)

    def publish(self) -> None:
        """After the optimizer's step, gather the parts that other ranks updated.

        Raises:
            RankError: a gather did not end in time, or a peer is gone.
        """
        started: list[tuple[WeightBucket, dist.Work, Tensor]] = []
        for bucket in self._in_plan_order():
            own_S = bucket.updated()
            if len(bucket.share.instance) > 1:
                given_S = own_S.clone()  # a copy, as it is part of the gather's output
                work = self._mesh.start_all_gather(bucket.weights, given_S, bucket.share.instance)
                started.append((bucket, work, given_S))
        for bucket, work, given_S in started:
            self._wait(work, bucket.share.instance, f"in {STEP}, collecting updated weights")
            free(given_S)
        for bucket in self._buckets.values():
            bucket.renew_copies()

    def whole(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield (weight or copy, its whole gradient) after `finish`; a collective with sharded optimizers."""
        for weights, all_copies in self._copies.items():
            if weights not in self._buckets:
                yield from ((copy, _gradient(copy)) for copies in all_copies for copy in copies)
        for bucket in self._in_plan_order():
            own_S = _gradient(bucket.own)
            flat_N = own_S
            if len(bucket.share.instance) > 1:
                flat_N = torch.empty_like(bucket.weights, dtype=own_S.dtype)
                work = self._mesh.start_all_gather(flat_N, own_S, bucket.share.instance)
                self._wait(work, bucket.share.instance, "collecting gradients")
            yield from bucket.whole(flat_N)

    def _in_plan_order(self) -> Iterator[WeightBucket]:
        """Yield buckets in the same order on all ranks of a group."""
        for group in self._lowered.groups:
            if self._mesh.rank in group.ranks and group.weights[0] in self._buckets:
                yield self._buckets[group.weights[0]]

    def clip(self, clip_norm: float) -> None:
        """Clip all gradients by the global norm. A collective over all ranks.

        The first rank of a group counts it; of parts, the first rank with each part; copies on one rank count
        once.
        """
        total = squared_norm(self._counted(), self._mesh.device)
        self._mesh.sum_over_all(total)
        factor = clip_factor(total, clip_norm)
        if isinstance(factor, float) and factor == 1.0:
            return
        for parameter in self.parameters():
            _gradient(parameter).mul_(factor)

    def _counted(self) -> Iterator[Tensor]:
        firsts = {group.weights[0] for group in self._lowered.groups if group.ranks[0] == self._mesh.rank}
        for weights, all_copies in self._copies.items():
            bucket = self._buckets.get(weights)
            if bucket is None and weights in firsts:
                pieces = [(copies[0], _gradient(copies[0])) for copies in all_copies]
            elif bucket is not None and bucket.share.counts:
                pieces = list(bucket.pieces(_gradient(bucket.own)))
            else:
                continue
            yield from (piece for weight, piece in pieces if id(weight) not in self._elsewhere)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _summed(copies: Sequence[nn.Parameter]) -> Tensor:
    total = _gradient(copies[0])
    for copy in copies[1:]:
        total = total + _gradient(copy)
    return total


def _set(copies: Sequence[nn.Parameter], gradient: Tensor) -> None:
    """Give every copy a gradient tensor of its own, as clipping scales each in place."""
    copies[0].grad = gradient
    for copy in copies[1:]:
        copy.grad = gradient.clone()


def _set_views(bucket_N: Tensor, weights: Sequence[Sequence[nn.Parameter]]) -> None:
    """Set gradients to views of the reduced bucket, without copies."""
    for copies, part_N in zip(weights, split_flat(bucket_N, (copies[0] for copies in weights)), strict=True):
        _set(copies, part_N.view_as(copies[0]))
