"""A context-parallel rank's data of a microbatch: its tokens, and an attention over all ranks' tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from runtime.models.adapter import NO_TARGET, PLACEHOLDER, Adapter, MicrobatchData
from runtime.models.attention import Attends, positions
from runtime.models.choose import adapter_of
from runtime.models.dense_attention import wide
from runtime.models.encoder import EncoderAdapter
from runtime.models.projector import NO_CLASS_TOKENS, merged_places, steps_or_none
from runtime.parallel.context.all_to_all import all_to_all_attention
from runtime.parallel.context.gathered import gathered_attention
from runtime.parallel.context.group import ContextGroup
from runtime.parallel.context.ring import ring_attention
from runtime.parallel.context.token_shares import Places, TokenShares, rows_of
from runtime.parallel.linear_map import mapped
from workbench.arrays import Ints
from workbench.masks.bitfield import concatenate
from workbench.model.layer import TokenCount
from workbench.model.model_graph import TEXT
from workbench.plan.crossing import offsets
from workbench.plan.plan import KeyExchange, Microbatch, Plan
from workbench.plan.routing import Routing, routing_of
from workbench.plan.stage import Stage
from workbench.plan.token_owners import held_runs
from workbench.plan.work import row_mask

# Shape suffixes: T = own tokens, S = tokens of all members, N = tokens of the longest list,
# M = members, D = width.


def rank_data(
    plan: Plan,
    stage: Stage,
    microbatch: Microbatch,
    data: MicrobatchData,
    context: ContextGroup,
    *,
    device: torch.device | str,
) -> MicrobatchData:
    """Reduce the data of a whole microbatch to one rank's tokens.

    Positions, targets and features are selected accordingly.
    """
    routing = routing_of(plan)
    shares = token_shares(plan, stage, microbatch, context)
    shared = replace(
        data,
        attention=_attention(plan, stage, shares, context, device=device),
        carries_from=carries_from(plan, stage, microbatch),
        num_held=len(shares.own),
    )
    if plan.model.module(stage.module).modality == TEXT:
        return _language(shared, shares)
    return _encoded(routing, stage, microbatch, shared, shares, context)


def carries_from(plan: Plan, stage: Stage, microbatch: Microbatch) -> int | None:
    """The first layer of the module behind which gradients run for any of the microbatch's items."""
    carries = routing_of(plan).flow(microbatch).carries[stage.module]
    return carries.index(True) if True in carries else None


def token_shares(plan: Plan, stage: Stage, microbatch: Microbatch, context: ContextGroup) -> TokenShares:
    """The tokens of a microbatch on each rank of the group, and their mask."""
    module = plan.model.module(stage.module)
    return TokenShares(
        mask=concatenate([row_mask(plan, module, row) for row in microbatch.rows]),
        owned=_owned(routing_of(plan), stage, microbatch, context, TokenCount.IN),
        member=context.member,
    )


def _owned(
    routing: Routing, stage: Stage, microbatch: Microbatch, context: ContextGroup, count: TokenCount
) -> tuple[Places, ...]:
    """[members] ascending positions in the packed microbatch."""
    starts = offsets(routing, microbatch, count)
    nothing = np.zeros(0, np.int64)
    by_place = [
        np.concatenate(
            [nothing, *(starts[r.item] + np.arange(r.first, r.first + r.num_tokens) for r in runs)]
        )
        for runs in held_runs(routing, microbatch, count)
    ]
    place_of = {rank: index for index, ranks in enumerate(stage.ranks) for rank in ranks}
    return tuple(by_place[place_of[rank]] for rank in context.ranks)


def _attention(
    plan: Plan, stage: Stage, shares: TokenShares, context: ContextGroup, *, device: torch.device | str
) -> Attends:
    make: dict[KeyExchange, Callable[[TokenShares, ContextGroup, torch.device | str], Attends]] = {
        KeyExchange.ALL_GATHER: gathered_attention,
        KeyExchange.RING: ring_attention,
        KeyExchange.ALL_TO_ALL: all_to_all_attention,
    }
    return make[plan.settings.of(stage.module).key_exchange](shares, context, device)


def _language(data: MicrobatchData, shares: TokenShares) -> MicrobatchData:
    """A rank's data in a language model."""
    own = {name: place_E[np.isin(place_E, shares.own)] for name, place_E in data.placed.items()}
    return replace(
        data,
        position_ids=shares.own_of(positions(data.tokens_in, "cpu"), 0),
        axes=None if data.axes is None else torch.stack([shares.own_of(axis_T, 0) for axis_T in data.axes]),
        input_ids=None if data.input_ids is None else shares.own_of(data.input_ids, PLACEHOLDER),
        labels=None if data.labels is None else shares.own_of(data.labels, NO_TARGET),
        item_ids=None if data.item_ids is None else shares.own_of(data.item_ids, -1),
        placed={  # it receives only the features that it owns
            name: torch.from_numpy(np.searchsorted(shares.own, place_E.numpy()))
            for name, place_E in own.items()
            if len(place_E)
        },
    )


def _encoded(
    routing: Routing,
    stage: Stage,
    microbatch: Microbatch,
    data: MicrobatchData,
    shares: TokenShares,
    context: ContextGroup,
) -> MicrobatchData:
    """A rank's data in an encoder, whose tokens are split after the first layer, which adds positions.

    Differs: every rank embeds whole items and keeps its tokens, as convolutions cross the boundaries of
    blocks.
    """
    module = routing.plan.model.module(stage.module)
    adapter = adapter_of(module)
    if stage.layers[0] == 0:
        data = replace(data, embedded=_places_tensor(shares.owned[shares.member]))
    if stage.layers[1] < len(module.layers):
        return data
    outputs = _owned(routing, stage, microbatch, context, TokenCount.OUT)
    if data.tokens_in == data.tokens_out:
        return data
    pooling = SharedPooling(
        shares=shares,
        group=context,
        inputs=_inputs(data, outputs, adapter),
        outputs=_places_tensor(outputs[context.member]),
    )
    return replace(data, pooling=pooling)


def _inputs(data: MicrobatchData, outputs: tuple[Places, ...], adapter: Adapter) -> tuple[Places, ...]:
    """[members] the tokens that are reduced to its outputs; class tokens belong to none."""
    first = getattr(adapter, "class_tokens", NO_CLASS_TOKENS).num
    becomes, out = [np.zeros(0, np.int64)], 0
    named = data.grids or (None,) * len(data.items)
    for tokens_in, tokens_out, grid in zip(data.tokens_in, data.tokens_out, named, strict=True):
        shrinks_to = _shrinks_to(adapter, tokens_in - first, tokens_out, grid)
        becomes += [np.full(first, -1), out + shrinks_to]
        out += tokens_out
    each = np.concatenate(becomes)
    return tuple(np.flatnonzero(np.isin(each, places)) for places in outputs)


def _shrinks_to(adapter: Adapter, tokens_in: int, tokens_out: int, grid: tuple[int, int] | None) -> Ints:
    """[tokens_in] index of the item's output into which each token is reduced."""
    steps = steps_or_none(adapter.projector)
    if steps is None or not isinstance(adapter, EncoderAdapter):
        run = max(1, tokens_in // tokens_out)
        return np.minimum(np.arange(tokens_in) // run, tokens_out - 1)
    output_of = np.empty(tokens_in, np.int64)
    groups = merged_places(steps, tokens_in, adapter.grid_of(tokens_in, grid)).numpy()
    output_of[groups.T] = np.arange(len(groups))
    return output_of


def _places_tensor(places: Places) -> torch.Tensor:
    """The positions, or -1 for the padding of a rank without tokens."""
    return torch.from_numpy(places if len(places) else np.array([-1]))


@dataclass(frozen=True)
class SharedPooling:
    """Gathers tokens of an encoder whose last layer reduces runs of them that cross ranks.

    Shares and group as in `GatheredAttention`. Without such a run there
    is no communication.

    Args:
        inputs: per member, positions of the tokens that its outputs need.
        outputs: positions of this rank's outputs, -1 for padding.
    """

    shares: TokenShares
    group: ContextGroup
    inputs: tuple[Places, ...]
    outputs: Tensor

    @cached_property
    def is_local(self) -> bool:
        """Whether every member has all tokens that it needs; the same on all of them."""
        return all(np.isin(*pair).all() for pair in zip(self.inputs, self.shares.owned, strict=True))

    def whole(self, x_TD: Tensor) -> Tensor:
        """[S, D] from [T, D]; zeros for other members' tokens that this rank does not need."""
        if not self.is_local:
            return mapped(x_TD, self._gathered, partial(self._summed, num_own=len(x_TD)))
        places = torch.from_numpy(self.shares.own).to(x_TD.device)
        num_tokens = len(self.shares.mask)
        return x_TD.new_zeros(num_tokens + 1, x_TD.shape[1]).index_copy(0, places, x_TD)[:num_tokens]

    def own(self, y_TD: Tensor) -> Tensor:
        """This rank's outputs, from those of all members."""
        return rows_of(y_TD, self.outputs.to(y_TD.device))

    @cached_property
    def padded(self) -> Tensor:
        """[M x N] positions of gathered tokens; S for padding."""
        return torch.from_numpy(self.shares.padded())

    def _gathered(self, x_TD: Tensor) -> Tensor:
        """All members' tokens."""
        shares, width = self.shares, x_TD.shape[1]
        own_ND = x_TD.new_zeros(shares.most_held, width)
        own_ND[: len(x_TD)] = x_TD
        gathered = own_ND.new_empty(shares.num_members * shares.most_held, width)
        self.group.gather(gathered, own_ND).wait()
        places = self.padded.to(x_TD.device)
        return x_TD.new_zeros(len(shares.mask) + 1, width).index_copy(0, places, gathered)[:-1]

    def _summed(self, gradient_SD: Tensor, num_own: int) -> Tensor:
        """Gradients of this rank's tokens, summed over the members in float32 or wider."""
        filler = gradient_SD.new_zeros(1, gradient_SD.shape[1])
        places = self.padded.to(gradient_SD.device)
        parts = torch.cat([gradient_SD, filler]).index_select(0, places).to(wide(gradient_SD.dtype))
        own_ND = parts.new_empty(self.shares.most_held, parts.shape[1])
        self.group.scatter(own_ND, parts).wait()
        return own_ND[:num_own].to(gradient_SD.dtype)
