"""Gradients between the last backward and the step: summed over ranks, copies and ties, then clipped."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.failure import RankError
from runtime.mesh import Mesh
from runtime.optimizer import clip_factor, squared_norm
from runtime.tensor_group import SharedWeights
from runtime.timing import Recorder
from runtime.transfers import first_line, wait
from workbench.plan.lowered import GradientGroup, Lowered, Weights
from workbench.schedule.action import STEP, Action
from workbench.trace import Lane


class HoldsWeights(Protocol):
    """A stage module, as far as gradients care."""

    def weights(self) -> Mapping[Weights, Sequence[nn.Parameter]]:
        """Every weight of the stage by gradient group, each group's in the same order on every rank."""

    @property
    def shared(self) -> SharedWeights | None:
        """What to do together with tensor-parallel ranks; None: this one has whole weights."""


class _Reduction(NamedTuple):
    action: Action
    group: GradientGroup
    work: dist.Work
    bucket: Tensor


class Gradients:
    """All gradients of one rank. A weight held by several stages here is one weight with copies.

    Args:
        modules: stages of this rank, in the plan's order.
    """

    def __init__(
        self,
        lowered: Lowered,
        mesh: Mesh,
        modules: Sequence[HoldsWeights],
        *,
        recorder: Recorder,
        timeout_s: float,
    ) -> None:
        self._shared = [module.shared for module in modules if module.shared is not None]
        self._elsewhere = frozenset(id(weight) for shared in self._shared for weight in shared.elsewhere)
        self._lowered = lowered
        self._mesh = mesh
        self._recorder = recorder
        self._timeout = timedelta(seconds=timeout_s)
        self._copies: dict[Weights, list[list[nn.Parameter]]] = {}
        self._pending: list[_Reduction] = []
        for module in modules:
            for weights, held in module.weights().items():
                trainable = [parameter for parameter in held if parameter.requires_grad]
                copies = self._copies.setdefault(weights, [[] for _ in trainable])
                for place, parameter in zip(copies, trainable, strict=True):
                    place.append(parameter)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every trainable parameter once, copies included, in a fixed order."""
        for held in self._copies.values():
            for copies in held:
                yield from copies

    def reduce(self, action: Action) -> None:
        """Start the all-reduce of every group of a REDUCE_GRAD; zeros where this rank had no items."""
        for index in self._lowered.reductions.get(action, ()):
            group = self._lowered.groups[index]
            if self._mesh.rank not in group.ranks:
                continue  # another tensor-parallel place of the stage
            start_s = time.perf_counter()
            bucket_N = torch.cat([_summed(copies).reshape(-1) for copies in self._of(group)])
            work = self._mesh.start_sum(bucket_N, group.ranks)
            self._pending.append(_Reduction(action, group, work, bucket_N))
            self._note_end(action, start_s, work)

    def _note_end(self, action: Action, start_s: float, work: dist.Work) -> None:
        """A span of the reduce lane, ended by whichever thread finishes the collective."""

        def done(_: object) -> None:
            self._recorder.span(Lane.REDUCE, action, start_s, time.perf_counter())

        work.get_future().add_done_callback(done)

    def _of(self, group: GradientGroup) -> list[list[nn.Parameter]]:
        return [copies for weights in group.weights for copies in self._copies[weights]]

    def finish(self) -> None:
        """Wait for the reductions; afterwards every weight and every copy has its whole gradient.

        A trainable weight that nothing reached has a zero gradient, so that weight decay does
        not depend on how the batch was spread.

        Raises:
            RankError: a reduction did not end in time, or a peer is gone.
        """
        reduced: set[Weights] = set()
        for action, group, work, bucket in self._pending:
            try:
                wait(work, self._timeout, self._mesh.device)
            except RuntimeError as error:
                peers = tuple(rank for rank in group.ranks if rank != self._mesh.rank)
                message = f"rank {self._mesh.rank} in {action} with ranks {list(peers)}: {first_line(error)}"
                raise RankError(message, peers=peers) from error
            _hand_out(bucket, self._of(group))
            reduced.update(group.weights)
        self._pending.clear()
        for weights, held in self._copies.items():
            if weights not in reduced:
                for copies in held:
                    _set(copies, _summed(copies))
        for shared in self._shared:
            if shared.partial:
                bucket_N = torch.cat([_gradient(parameter).reshape(-1) for parameter in shared.partial])
                shared.group.sum(bucket_N)
                _hand_out(bucket_N, [[parameter] for parameter in shared.partial])

    def clip(self, clip_norm: float) -> float:
        """Scale all gradients to the global norm; returns the norm. Collective over all ranks.

        The first rank of a group counts it; copies on one rank count once.
        """
        counted = {
            weights
            for group in self._lowered.groups
            if group.ranks[0] == self._mesh.rank
            for weights in group.weights
        }
        mine = [
            _gradient(copies[0])
            for weights, held in self._copies.items()
            if weights in counted
            for copies in held
            if id(copies[0]) not in self._elsewhere
        ]
        total = squared_norm(mine).to(self._mesh.device)
        try:
            self._mesh.sum_over_all(total)
        except RuntimeError as error:
            message = f"rank {self._mesh.rank} in {STEP}, summing the norm: {first_line(error)}"
            raise RankError(message, peers=self._mesh.peers) from error
        norm = float(total) ** 0.5
        factor = clip_factor(norm, clip_norm)
        if factor < 1.0:
            for parameter in self.parameters():
                _gradient(parameter).mul_(factor)
        return norm


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


def _hand_out(bucket_N: Tensor, weights: Iterable[Sequence[nn.Parameter]]) -> None:
    """Views into the reduced bucket become the gradients; nothing is copied."""
    start = 0
    for copies in weights:
        count = copies[0].numel()
        _set(copies, bucket_N.narrow(0, start, count).view_as(copies[0]))
        start += count
