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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.models.adapter import StageLayer
from runtime.models.mixture import Choice, Mixture
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
        mixture.module.forward = _ParallelMixture(mixture, group, tensor, talk)


@dataclass(frozen=True, slots=True)
class _ParallelMixture:
    """Replaces the forward of a mixture's module."""

    mixture: Mixture
    group: ExpertGroup
    tensor: TensorGroup | None
    talk: Talk | None

    def __call__(self, hidden_states: Tensor) -> Any:
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        y_TD, for_all_TD = self._chosen(x_TD), self._for_all(x_TD)
        return self.mixture.returned(y_TD if for_all_TD is None else for_all_TD + y_TD, hidden_states)

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
            return routed(x_TD, self.mixture, self.group)
        if isinstance(self.talk, TokenParts):
            return self._own_part(x_TD, self.talk)
        parts = TokenParts(self.tensor, len(x_TD))
        return parts.join(self._own_part(parts.divide(x_TD), parts))

    def _own_part(self, x_SD: Tensor, parts: TokenParts) -> Tensor:
        """Results of this rank's tokens, of which padding is not sent."""
        num_unpadded = min(max(parts.num_tokens - parts.position * parts.num_own, 0), parts.num_own)
        y_SD = routed(x_SD[:num_unpadded], self.mixture, self.group)
        return torch.cat([y_SD, y_SD.new_zeros(len(x_SD) - num_unpadded, x_SD.shape[1])])


def routed(x_SD: Tensor, mixture: Mixture, group: ExpertGroup) -> Tensor:
    """[S, D] sums over each token's experts, on all ranks.

    Raises:
        RankError: an exchange did not end in time, or a peer is gone.
    """
    choice = mixture.choose(x_SD)
    leaving = _leaving(choice, mixture.num_held, group)
    num_chosen = choice.experts.shape[1]
    rows_PD = x_SD.index_select(0, leaving.order // num_chosen)
    if choice.before is not None:
        rows_PD = rows_PD * choice.before.reshape(-1)[leaving.order, None]
    arriving_ME = exchange_counts(leaving.counts, group)
    counts = RowCounts(leaving.counts.sum(1).tolist(), arriving_ME.sum(1).tolist())
    results_RD = _by_expert(exchange_rows(rows_PD, counts, group), arriving_ME, mixture)
    back_PD = exchange_rows(results_RD, counts.back(), group)
    results_SKD = back_PD.index_select(0, leaving.order.argsort()).view(-1, num_chosen, x_SD.shape[1])
    if choice.after is not None:
        results_SKD = results_SKD * choice.after[..., None]
    y_SD: Tensor = results_SKD.sum(1).to(x_SD.dtype)
    return y_SD


class _Leaving(NamedTuple):
    """Rows by destination member and expert: [P] their order, and [M, E] their numbers."""

    order: Tensor
    counts: Tensor


def _leaving(choice: Choice, num_held: int, group: ExpertGroup) -> _Leaving:
    member_of_expert = choice.experts.reshape(-1) // num_held
    senders = torch.tensor(group.senders, device=choice.experts.device)
    target_P = senders.argsort()[member_of_expert] * num_held + choice.experts.reshape(-1) % num_held
    counts = torch.bincount(target_P, minlength=group.size * num_held)
    return _Leaving(target_P.argsort(stable=True), counts.view(group.size, num_held))


def _by_expert(arrived_RD: Tensor, counts_ME: Tensor, mixture: Mixture) -> Tensor:
    """[R, D] results in the order of arrival: by member, then by expert."""
    num_members, num_held = counts_ME.shape
    expert_R = torch.arange(num_held, device=counts_ME.device).repeat(num_members)
    order_R = expert_R.repeat_interleave(counts_ME.reshape(-1)).argsort(stable=True)
    pieces = torch.split(arrived_RD.index_select(0, order_R), counts_ME.sum(0).tolist())
    results = [
        mixture.run(piece, gate_up, down)
        for piece, (gate_up, down) in zip(pieces, mixture.weights(), strict=True)
    ]
    return torch.cat(results).index_select(0, order_R.argsort())
