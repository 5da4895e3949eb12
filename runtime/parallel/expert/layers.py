"""Lets a mixture whose experts are distributed over ranks compute what the whole mixture computes.

A rank chooses experts for its own tokens, sends each token to the ranks that hold them, runs its own
experts on what arrives and sends the results back. Ranks that share tokens (tensor parallelism) each
choose for a part of them, so no token travels twice. No capacity: no token is dropped, and an expert that
nobody chose runs on no rows, because its rank still takes part in every exchange, the backward's too.

Source: Lepikhin et al. 2021, "GShard", section 3.2 (dispatch and combine as all-to-alls); Shazeer et al.
2017, "Outrageously Large Neural Networks", section 3.1 (experts over ranks that are otherwise replicas).
Differs: shares of a token stay with it, so only rows of hidden width travel.
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
    """Let every mixture of a layer, whose experts' weights are this member's, work with the others'.

    Args:
        layer: as built, with its weights cut.
        group: the members, all of which do the same.
        tensor: ranks that hold the same tokens; None: this one has its own.
        talk: how they share tokens around the layer's regions: the group, or parts of them. None where
            `tensor` is.
    """
    for mixture in layer.mixtures().values():
        mixture.module.forward = _ParallelMixture(mixture, group, tensor, talk)


@dataclass(frozen=True, slots=True)
class _ParallelMixture:
    """The forward of a mixture's module."""

    mixture: Mixture
    group: ExpertGroup
    tensor: TensorGroup | None
    talk: Talk | None

    def __call__(self, hidden_states: Tensor) -> Any:
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        y_TD, for_all_TD = self._chosen(x_TD), self._for_all(x_TD)
        return self.mixture.returned(y_TD if for_all_TD is None else for_all_TD + y_TD, hidden_states)

    def _for_all(self, x_TD: Tensor) -> Tensor | None:
        """[T, D] of the expert of all tokens, which tensor-parallel ranks cut like any MLP."""
        expert = self.mixture.for_all
        if expert is None:
            return None
        y_TD: Tensor = expert(x_TD if self.talk is None else self.talk.enter(x_TD))
        return y_TD if self.talk is None else self.talk.leave(y_TD)

    def _chosen(self, x_TD: Tensor) -> Tensor:
        """[T, D] sums over each token's experts; where tokens are divided, of the own ones."""
        if self.tensor is None:
            return routed(x_TD, self.mixture, self.group)
        if isinstance(self.talk, TokenParts):
            return self._own_part(x_TD, self.talk)
        parts = TokenParts(self.tensor, len(x_TD))
        return parts.join(self._own_part(parts.divide(x_TD), parts))

    def _own_part(self, x_SD: Tensor, parts: TokenParts) -> Tensor:
        """Padding goes nowhere."""
        num_real = min(max(parts.num_tokens - parts.place * parts.num_own, 0), parts.num_own)
        y_SD = routed(x_SD[:num_real], self.mixture, self.group)
        return torch.cat([y_SD, y_SD.new_zeros(len(x_SD) - num_real, x_SD.shape[1])])


def routed(x_SD: Tensor, mixture: Mixture, group: ExpertGroup) -> Tensor:
    """[S, D] of every token the sum of what its experts, wherever they are, make of it.

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
    """Rows by the member and the expert they go to: [P] their order, and [M, E] how many go to each."""

    order: Tensor
    counts: Tensor


def _leaving(choice: Choice, num_held: int, group: ExpertGroup) -> _Leaving:
    place_of_expert = choice.experts.reshape(-1) // num_held
    senders = torch.tensor(group.senders, device=choice.experts.device)
    target_P = senders.argsort()[place_of_expert] * num_held + choice.experts.reshape(-1) % num_held
    counts = torch.bincount(target_P, minlength=group.size * num_held)
    return _Leaving(target_P.argsort(stable=True), counts.view(group.size, num_held))


def _by_expert(arrived_RD: Tensor, counts_ME: Tensor, mixture: Mixture) -> Tensor:
    """[R, D] results in the order in which rows arrived: by member, then by expert."""
    num_members, num_held = counts_ME.shape
    expert_R = torch.arange(num_held, device=counts_ME.device).repeat(num_members)
    order_R = expert_R.repeat_interleave(counts_ME.reshape(-1)).argsort(stable=True)
    pieces = torch.split(arrived_RD.index_select(0, order_R), counts_ME.sum(0).tolist())
    results = [
        mixture.run(piece, gate_up, down)
        for piece, (gate_up, down) in zip(pieces, mixture.weights(), strict=True)
    ]
    return torch.cat(results).index_select(0, order_R.argsort())
