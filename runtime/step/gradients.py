"""Gradients between the last backward and the step: summed over ranks, copies and ties, then clipped."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.step.optimizer import clip_factor, squared_norm
from runtime.step.timing import Recorder
from runtime.step.weight_bucket import HoldsWeights, WeightBucket, copies_of, places
from runtime.world.clock import Awaited, Channel, Stamp, Traffic
from runtime.world.mesh import Mesh
from workbench.plan.lowered import GradientGroup, Lowered, Weights
from workbench.schedule.action import STEP, Action
from workbench.trace import Lane


class _Reduction(NamedTuple):
    """A sum under way; `given` goes in, `result` comes out (the same tensor where weights are whole).

    Where nobody tells when it ended, `is_noted` is False and its span ends when it is waited for.
    """

    action: Action
    group: GradientGroup
    start: Stamp
    work: dist.Work
    given: Tensor
    result: Tensor
    is_noted: bool = False


class Gradients:
    """All gradients of one rank. A weight held by several stages here is one weight with copies.

    Args:
        modules: stages of this rank, in the plan's order.
        buckets: weights of which this rank updates a part, or a wide copy, by gradient group.
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
        """What the optimizer updates: every trainable parameter once, copies included, in a fixed order."""
        for weights, held in self._copies.items():
            if weights in self._buckets:
                yield self._buckets[weights].own
                continue
            for copies in held:
                yield from copies

    def clear(self) -> None:
        """No gradients, for the next step."""
        for parameter in self.parameters():
            parameter.grad = None

    def accumulate(self) -> None:
        """After a backward: add gradients of weights that have a wide sum to it."""
        for bucket in self._buckets.values():
            if bucket.is_wide:
                bucket.accumulate()

    def reduce(self, action: Action) -> None:
        """Start the sum of every group that an action reduces; zeros where this rank had no items."""
        for index in self._lowered.reductions.get(action, ()):
            group = self._lowered.groups[index]
            if self._mesh.rank in group.ranks:  # else another tensor-parallel place of the stage
                self._start(action, group)

    def _start(self, action: Action, group: GradientGroup) -> None:
        """Start the sum of one group."""
        start = self._clock.stamp()
        given_N = self._flat(group.weights[0])
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
        """[N] this rank's gradient of a group; tensor-parallel ranks have added up their parts of it."""
        bucket, held = self._buckets.get(weights), self._copies[weights]
        if bucket is not None:
            flat_N = bucket.take()
        else:
            flat_N = torch.cat([_summed(copies).reshape(-1) for copies in held])
        firsts = [copies[0] for copies in held]
        lying = zip(places(flat_N, firsts), firsts, strict=True)
        partial = [place_N for place_N, weight in lying if id(weight) in self._partial]
        if partial:
            group = next(self._partial[id(weight)] for weight in firsts if id(weight) in self._partial)
            total = torch.cat(partial)
            group.sum(total)
            for piece, summed in zip(partial, places(total, partial), strict=True):
                piece.copy_(summed)
        return flat_N

    def finish(self) -> None:
        """Wait for the reductions; afterwards every weight and every copy has its whole gradient.

        Where the optimizer updates a part of some weights, that part has its own. A trainable
        weight that nothing reached has a zero gradient, so that weight decay does not depend on how
        the batch was spread.

        Raises:
            RankError: a reduction did not end in time, or a peer is gone.
        """
        found: dict[Weights, Tensor] = {}
        for pending in self._pending:
            weights, what = pending.group.weights[0], f"in {pending.action}"
            self._wait(pending.work, pending.group.ranks, what)
            if not pending.is_noted:
                self._note_span(pending, self._clock.stamp())
            found[weights] = pending.result
            bucket = self._buckets.get(weights)
            if bucket is not None and len(bucket.share.instance) > 1 and len(bucket.share.peers) > 1:
                peers = bucket.share.peers
                self._wait(self._mesh.start_all_reduce(pending.result, peers), peers, what)
        self._pending.clear()
        for weights, held in self._copies.items():
            if weights in self._buckets:
                self._buckets[weights].own.grad = found[weights] if weights in found else self._flat(weights)
            elif weights in found or any(id(copies[0]) in self._partial for copies in held):
                _hand_out(found[weights] if weights in found else self._flat(weights), held)
            else:  # in place
                for copies in held:
                    _set(copies, _summed(copies))

    def _wait(self, work: dist.Work, ranks: tuple[int, ...], what: str) -> None:
        self._clock.wait(work, self._awaited(ranks, what))

    def _awaited(self, ranks: tuple[int, ...], what: str) -> Awaited:
        return Awaited.among(self._mesh.rank, what, ranks)

    def publish(self) -> None:
        """After the optimizer's step: collect what others updated.

        Raises:
            RankError: a collection did not end in time, or a peer is gone.
        """
        started: list[tuple[WeightBucket, dist.Work, Tensor]] = []
        for bucket in self._in_plan_order():
            own_S = bucket.updated()
            if len(bucket.share.instance) > 1:
                given_S = own_S.clone()  # it lies where the others' parts are collected
                work = self._mesh.start_all_gather(bucket.weights, given_S, bucket.share.instance)
                started.append((bucket, work, given_S))
        for bucket, work, _ in started:
            self._wait(work, bucket.share.instance, f"in {STEP}, collecting updated weights")
        for bucket in self._buckets.values():
            bucket.renew_copies()

    def whole(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """(Weight or copy, its whole gradient) after `finish`; a collective where parts are scattered."""
        for weights, held in self._copies.items():
            if weights not in self._buckets:
                yield from ((copy, _gradient(copy)) for copies in held for copy in copies)
        for bucket in self._in_plan_order():
            own_S = _gradient(bucket.own)
            flat_N = own_S
            if len(bucket.share.instance) > 1:
                flat_N = torch.empty_like(bucket.weights, dtype=own_S.dtype)
                work = self._mesh.start_all_gather(flat_N, own_S, bucket.share.instance)
                self._wait(work, bucket.share.instance, "collecting gradients")
            yield from bucket.whole(flat_N)

    def _in_plan_order(self) -> Iterator[WeightBucket]:
        """All ranks of a group come to it in the same order."""
        for group in self._lowered.groups:
            if self._mesh.rank in group.ranks and group.weights[0] in self._buckets:
                yield self._buckets[group.weights[0]]

    def clip(self, clip_norm: float) -> None:
        """Scale all gradients to the global norm. Collective over all ranks.

        The first rank of a group counts it, of its parts the first that has one; copies on one
        rank count once.
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
        for weights, held in self._copies.items():
            bucket = self._buckets.get(weights)
            if bucket is None and weights in firsts:
                pieces = [(copies[0], _gradient(copies[0])) for copies in held]
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
    """Give every copy a gradient of its own: clipping scales each in place."""
    copies[0].grad = gradient
    for copy in copies[1:]:
        copy.grad = gradient.clone()


def _hand_out(bucket_N: Tensor, weights: Sequence[Sequence[nn.Parameter]]) -> None:
    """Views into the reduced bucket become the gradients; nothing is copied."""
    for copies, place_N in zip(weights, places(bucket_N, (copies[0] for copies in weights)), strict=True):
        _set(copies, place_N.view_as(copies[0]))
