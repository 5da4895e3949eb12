"""Lets a mixture with experts distributed over ranks compute the same as the whole mixture.

A rank chooses experts for its own tokens, sends each token to the ranks of its experts, runs its own experts
on the rows that arrive and sends the results back. Ranks that share tokens (tensor parallelism) each choose
for a part of them, so no token is sent twice. No capacity: no token is dropped, and an expert without tokens
runs on no rows, because its rank still takes part in every exchange, also in the backward.

Source: Lepikhin et al. 2021, "GShard", section 3.2 (dispatch and combine as all-to-alls); Shazeer et al.
2017, "Outrageously Large Neural Networks", section 3.1 (experts over ranks that are otherwise replicas).
Differs: the shares of a token stay on its rank, so only rows of hidden width are sent.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.models.adapter import StageLayer
from runtime.models.grouped import Groups
from runtime.models.mixture import Mixture, MixtureForward, routed
from runtime.models.sorted_rows import order_by
from runtime.parallel.expert.group import ExpertGroup, RowCounts, exchange_counts, exchange_rows
from runtime.parallel.tensor.group import TensorGroup
from runtime.parallel.tensor.sequence import Talk, TokenParts

# Shape suffixes: T = tokens, S = tokens of one tensor-parallel member, K = experts of a token, P = S x K
# rows that leave, R = rows that arrive, M = members, E = experts of one member, D = hidden width.


def parallelize_experts(
    layer: StageLayer, group: ExpertGroup, tensor: TensorGroup | None, talk: Talk | None
) -> None:
    """Let every mixture of a layer, with this member's experts only, use those of all members.

    Args:
        layer: as built, with its weights cut.
        group: the members, all of which call this.
        tensor: ranks with the same tokens; None: this one has its own.
        talk: how they share tokens around the layer's regions: the group, or parts of tokens. None where
            `tensor` is.
    """
    for mixture in layer.mixtures().values():
        mixture.module.forward = _ParallelForward(mixture, group, tensor, talk)


@dataclass(frozen=True, slots=True)
class _ParallelForward(MixtureForward):
    """The forward of a mixture's module, with experts on all members."""

    group: ExpertGroup
    tensor: TensorGroup | None
    talk: Talk | None

    def _for_all(self, x_TD: Tensor) -> Tensor | None:
        """[T, D] of the shared expert, which tensor-parallel ranks cut like any MLP."""
        expert = self.mixture.for_all
        if expert is None:
            return None
        y_TD: Tensor = expert(x_TD if self.talk is None else self.talk.enter(x_TD))
        return y_TD if self.talk is None else self.talk.leave(y_TD)

    def _chosen(self, x_TD: Tensor) -> Tensor:
        """[T, D] sums over each token's experts; of this rank's tokens, where tokens are divided."""
        if self.tensor is None:
            return routed(x_TD, self.mixture, ExchangingDispatch(self.group))
        if isinstance(self.talk, TokenParts):
            return self._own_part(x_TD, self.talk)
        parts = TokenParts(self.tensor, len(x_TD))
        x_SD = parts.divide(x_TD)
        if self.mixture.for_all is None:
            x_SD = x_SD.clone()  # as a view would keep all tokens for the router's backward
        return parts.join(self._own_part(x_SD, parts))

    def _own_part(self, x_SD: Tensor, parts: TokenParts) -> Tensor:
        """Results of this rank's tokens, of which padding is not sent."""
        num_unpadded = min(max(parts.num_tokens - parts.position * parts.num_own, 0), parts.num_own)
        y_SD = routed(x_SD[:num_unpadded], self.mixture, ExchangingDispatch(self.group))
        return torch.cat([y_SD, y_SD.new_zeros(len(x_SD) - num_unpadded, x_SD.shape[1])])


@dataclass(frozen=True, slots=True)
class ExchangingDispatch:
    """Experts are distributed over a group's members: rows go to theirs and come back."""

    group: ExpertGroup

    @property
    def num_ranks(self) -> int:
        return self.group.size

    def destination(self, expert_P: Tensor, num_held: int) -> Tensor:
        """[P] by member, in the order of the process group, then by expert."""
        senders_M = torch.tensor(self.group.senders, device=expert_P.device)
        return senders_M.argsort()[expert_P // num_held] * num_held + expert_P % num_held

    def run(self, x_PD: Tensor, destination_P: Tensor, mixture: Mixture) -> Tensor:
        """[P, D] results of rows, on all members.

        Raises:
            RankError: an exchange did not end in time, or a peer is gone.
        """
        num_held, group = mixture.num_held, self.group
        leaving_ME = torch.bincount(destination_P, minlength=group.size * num_held).view(group.size, num_held)
        arriving_ME = exchange_counts(leaving_ME, group)
        counts = RowCounts(leaving_ME.sum(1).tolist(), arriving_ME.sum(1).tolist())
        arrived_RD = exchange_rows(x_PD, counts, group)
        return exchange_rows(_by_expert(arrived_RD, arriving_ME, mixture), counts.back(), group)


def _by_expert(arrived_RD: Tensor, counts_ME: Tensor, mixture: Mixture) -> Tensor:
    """[R, D] results in the order of arrival: by member, then by expert."""
    num_members, num_held = counts_ME.shape
    expert_R = torch.arange(num_held, device=counts_ME.device).repeat(num_members)
    rows = order_by(expert_R.repeat_interleave(counts_ME.reshape(-1)))
    groups = Groups(counts_ME.sum(0).cumsum(0, dtype=torch.int32))
    return rows.restore(mixture.experts(rows.sort(arrived_RD), groups))
