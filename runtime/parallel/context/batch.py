"""What a context-parallel rank reads of a microbatch: its tokens, and an attention over everybody's."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch

from runtime.models.adapter import NO_TARGET, PLACEHOLDER, MicrobatchData
from runtime.models.attention import Attends, positions
from runtime.models.choose import adapter_of
from runtime.parallel.context.all_to_all import all_to_all_attention
from runtime.parallel.context.gathered import gathered_attention
from runtime.parallel.context.group import ContextGroup
from runtime.parallel.context.pooling import SharedPooling
from runtime.parallel.context.ring import ring_attention
from runtime.parallel.context.token_shares import Places, TokenShares
from workbench.data.sample import Item
from workbench.masks.bitfield import concatenate
from workbench.model.layer import TokenCount
from workbench.model.model_graph import TEXT
from workbench.plan.plan import KeyExchange, Microbatch, Plan, Stage
from workbench.plan.routing import Routing, routing_of
from workbench.plan.token_owners import held_runs
from workbench.plan.work import row_mask


def shared_data(
    plan: Plan,
    stage: Stage,
    microbatch: Microbatch,
    data: MicrobatchData,
    context: ContextGroup,
    *,
    device: torch.device | str,
) -> MicrobatchData:
    """The data of all tokens of a microbatch as the data of one rank's.

    Positions, targets and features follow the tokens.
    """
    routing = routing_of(plan)
    shares = token_shares(plan, stage, microbatch, context)
    carries = routing.flow(microbatch).carries[stage.module]
    shared = replace(
        data,
        attention=_attention(plan, stage, shares, context, device=device),
        carries_from=carries.index(True) if True in carries else None,
        num_held=len(shares.own),
    )
    if plan.model.module(stage.module).modality == TEXT:
        return _language(shared, shares)
    return _encoded(routing, stage, microbatch, shared, shares, context)


def token_shares(plan: Plan, stage: Stage, microbatch: Microbatch, context: ContextGroup) -> TokenShares:
    """Which tokens of a microbatch each rank of the group holds, and their mask."""
    module = plan.model.module(stage.module)
    return TokenShares(
        mask=concatenate([row_mask(plan, module, row) for row in microbatch.rows]),
        owned=_owned(routing_of(plan), stage, microbatch, context, TokenCount.IN),
        member=context.member,
    )


def _owned(
    routing: Routing, stage: Stage, microbatch: Microbatch, context: ContextGroup, count: TokenCount
) -> tuple[Places, ...]:
    """By member, ascending places in the packed microbatch."""
    starts = _starts(routing, microbatch, count)
    nothing = np.zeros(0, np.int64)
    by_place = [
        np.concatenate(
            [nothing, *(starts[r.item] + np.arange(r.first, r.first + r.num_tokens) for r in runs)]
        )
        for runs in held_runs(routing, microbatch, count)
    ]
    place_of = {rank: place for place, ranks in enumerate(stage.ranks) for rank in ranks}
    return tuple(by_place[place_of[rank]] for rank in context.ranks)


def _starts(routing: Routing, microbatch: Microbatch, count: TokenCount) -> dict[Item, int]:
    module = routing.plan.model.module(microbatch.module)
    tokens = [routing.tokens(module, item, count) for item in microbatch.items]
    return dict(zip(microbatch.items, accumulate(tokens, initial=0), strict=False))


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
    """Of a language model."""
    own = {name: place_E[np.isin(place_E, shares.own)] for name, place_E in data.placed.items()}
    return replace(
        data,
        position_ids=shares.own_of(positions(data.tokens_in, "cpu"), 0),
        axes=None if data.axes is None else torch.stack([shares.own_of(axis_T, 0) for axis_T in data.axes]),
        input_ids=None if data.input_ids is None else shares.own_of(data.input_ids, PLACEHOLDER),
        labels=None if data.labels is None else shares.own_of(data.labels, NO_TARGET),
        item_ids=None if data.item_ids is None else shares.own_of(data.item_ids, -1),
        placed={  # it receives the features that it owns, and where it owns none nothing
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
    """Of an encoder: positions come with the first layer, so tokens are split behind it.

    Differs: every rank embeds whole items and keeps its tokens; a convolution looks across the
    borders of blocks.
    """
    module = routing.plan.model.module(stage.module)
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
        inputs=_inputs(data, outputs, first=int(getattr(adapter_of(module), "has_class_token", False))),
        outputs=_places_tensor(outputs[context.member]),
    )
    return replace(data, pooling=pooling)


def _inputs(data: MicrobatchData, outputs: tuple[Places, ...], *, first: int) -> tuple[Places, ...]:
    """By member, the tokens that shrink to its outputs; `first` of every item shrink to none."""
    becomes = []
    out = 0
    for tokens_in, tokens_out in zip(data.tokens_in, data.tokens_out, strict=True):
        run = max(1, (tokens_in - first) // tokens_out)
        becomes += [-1] * first + [out + min(i // run, tokens_out - 1) for i in range(tokens_in - first)]
        out += tokens_out
    return tuple(np.flatnonzero(np.isin(becomes, places)) for places in outputs)


def _places_tensor(places: Places) -> torch.Tensor:
    """The places, or -1 for the padding of a rank that has none."""
    return torch.from_numpy(places if len(places) else np.array([-1]))
