"""What a stage is fed with: pixels, mel frames, tokens and targets of one microbatch."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from runtime.adapters.adapter import NO_TARGET, PLACEHOLDER, MicrobatchData
from runtime.adapters.attention import positions
from runtime.adapters.choose import adapter_of
from runtime.adapters.decoder import DecoderAdapter
from runtime.attention_mask import AttentionMask
from runtime.context_group import ContextGroup
from runtime.context_parallel import gathered_attention
from runtime.initialise import generator_of
from runtime.masked_attention import MaskedAttention
from runtime.token_shares import TokenShares
from workbench.data.sample import Item, Sample, Segment
from workbench.graph.layer import TokenCount
from workbench.graph.model_graph import TEXT, Edge
from workbench.masks.builders import sample_bitfield
from workbench.plan.plan import Microbatch, Plan, Stage
from workbench.plan.routing import Routing
from workbench.plan.token_owners import held_runs

# Shape suffixes: T = packed tokens, E = packed tokens of one edge.

CAUSAL = "causal"


class DataSource(Protocol):
    """Where raw data come from, by sample id. A rank asks only for the items it holds."""

    def raw(self, sample: int, segment: Segment, shape: tuple[int, ...]) -> Tensor:
        """float32 pixels [C, H, W] or mel frames [bins, frames] of one segment, of that shape."""
        ...

    def token_ids(self, sample: int, segment: Segment, vocab_size: int) -> Tensor:
        """int64 [segment.tokens_out] tokens of one text segment, each in [0, vocab_size)."""
        ...


class SyntheticSource:
    """Random data: each segment's is a function of (seed, sample id, modality, k) alone."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def raw(self, sample: int, segment: Segment, shape: tuple[int, ...]) -> Tensor:
        """Values from N(0, 1)."""
        generator = generator_of("raw", self.seed, sample, segment.modality, segment.k)
        return torch.empty(*shape, dtype=torch.float32).normal_(generator=generator)

    def token_ids(self, sample: int, segment: Segment, vocab_size: int) -> Tensor:
        """Uniform over the vocabulary."""
        generator = generator_of("tokens", self.seed, sample, segment.modality, segment.k)
        return torch.randint(vocab_size, (segment.tokens_out,), generator=generator)


def microbatch_data(
    plan: Plan,
    stage: Stage,
    microbatch: Microbatch,
    source: DataSource,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    context: ContextGroup | None = None,
) -> MicrobatchData:
    """Everything the stage reads for that microbatch, apart from activations and features.

    Raw inputs go to an encoder's first stage, tokens to the LLM's first, targets to its last.
    Call it before the clock starts: it draws or loads the data.

    Args:
        plan, stage, microbatch: what is run where.
        source: of raw data and tokens.
        dtype: of raw data.
        device: where everything is put.
        context: the ranks that share the stage's tokens; None: this rank holds all of them.

    Raises:
        ValueError: a segment that no edge brings to the LLM, or of a size its encoder cannot take;
            a context group where the stage has none, or none where it has.
    """
    module = plan.model.module(stage.module)
    if (1 if context is None else context.size) != stage.cp:
        raise ValueError(f"stage {stage.id} wants a context group of {stage.cp} ranks, got {context}")
    if module.modality == TEXT:
        data = _llm_data(plan, stage, microbatch, source)
        return _on_device(_shared(plan, stage, microbatch, data, context, device=device), device)
    found = [_segment(plan.sample[item.sample], module.modality, item) for item in microbatch.items]
    raw: tuple[Tensor, ...] = ()
    if stage.layers[0] == 0:
        adapter = adapter_of(module)
        raw = tuple(
            source.raw(item.sample, segment, adapter.raw_shape(segment)).to(device=device, dtype=dtype)
            for item, segment in zip(microbatch.items, found, strict=True)
        )
    return MicrobatchData(
        items=microbatch.items,
        tokens_in=tuple(segment.tokens_in for segment in found),
        tokens_out=tuple(segment.tokens_out for segment in found),
        raw=raw,
    )


def count_targets(sample: Sample) -> int:
    """Next-token targets of a sample: its text tokens but one that stands first."""
    text = sum(segment.tokens_out for segment in sample.of(TEXT))
    return text - (sample.segments[0].modality == TEXT)


def _segment(sample: Sample, modality: str, item: Item) -> Segment:
    for segment in sample.of(modality):
        if segment.k == item.k:
            return segment
    raise ValueError(f"sample {sample.id} has no segment {modality}[{item.k}]")


def _llm_data(plan: Plan, stage: Stage, microbatch: Microbatch, source: DataSource) -> MicrobatchData:
    """Of all tokens of the microbatch, on the CPU."""
    samples = [plan.sample[item.sample] for item in microbatch.items]
    edges = plan.model.edges_into(stage.module)
    _check_served(plan, samples, edges)
    lengths = tuple(sample.num_tokens for sample in samples)
    num_layers = len(plan.model.module(stage.module).layers)
    ids_T, labels_T = None, None
    if stage.layers[0] == 0 or stage.layers[1] == num_layers:
        adapter = adapter_of(plan.model.module(stage.module))
        assert isinstance(adapter, DecoderAdapter), "the text module is a language model"
        ids_T = torch.cat([_ids(sample, source, adapter.vocab_size) for sample in samples])
        labels_T = _labels(ids_T, lengths)
    entering = [edge for edge in edges if stage.layers[0] <= edge.before_layer < stage.layers[1]]
    placed = {edge.name: _placed(plan, edge, samples) for edge in entering}
    return MicrobatchData(
        items=microbatch.items,
        tokens_in=lengths,
        tokens_out=lengths,
        input_ids=ids_T if stage.layers[0] == 0 else None,
        labels=labels_T if stage.layers[1] == num_layers else None,
        placed={name: place_E for name, place_E in placed.items() if len(place_E)},
    )


def _shared(
    plan: Plan,
    stage: Stage,
    microbatch: Microbatch,
    data: MicrobatchData,
    context: ContextGroup | None,
    *,
    device: torch.device | str,
) -> MicrobatchData:
    """The tokens of this rank, and an attention that knows the samples' masks."""
    samples = [plan.sample[item.sample] for item in microbatch.items]
    if context is None:
        if all(sample.mask == CAUSAL for sample in samples):
            return data
        fields = sample_bitfield([samples])
        mask = AttentionMask(fields, fields, torch.device(device))
        mask.prepare()
        return replace(data, attention=MaskedAttention(mask))
    shares = token_shares(plan, stage, microbatch, context)
    kept = {name: np.flatnonzero(np.isin(place_E, shares.own)) for name, place_E in data.placed.items()}
    carries = Routing(plan).flow(microbatch).carries[stage.module]
    return replace(
        data,
        attention=gathered_attention(shares, context, device),
        position_ids=shares.own_of(positions(data.tokens_in, "cpu"), 0),
        input_ids=None if data.input_ids is None else shares.own_of(data.input_ids, PLACEHOLDER),
        labels=None if data.labels is None else shares.own_of(data.labels, NO_TARGET),
        placed={
            name: torch.from_numpy(np.searchsorted(shares.own, data.placed[name][index]))
            for name, index in kept.items()
        },
        chosen={name: torch.from_numpy(index) for name, index in kept.items()},
        carries_from=carries.index(True) if True in carries else None,
    )


def token_shares(plan: Plan, stage: Stage, microbatch: Microbatch, context: ContextGroup) -> TokenShares:
    """Which tokens of an LLM microbatch each rank of the group holds, and their mask."""
    module = plan.model.module(stage.module)
    routing = Routing(plan)
    tokens = [routing.tokens(module, item, TokenCount.IN) for item in microbatch.items]
    starts = dict(zip(microbatch.items, accumulate(tokens, initial=0), strict=False))
    nothing = np.zeros(0, np.int64)
    by_place = [
        np.concatenate(
            [nothing, *(starts[r.item] + np.arange(r.first, r.first + r.num_tokens) for r in runs)]
        )
        for runs in held_runs(routing, microbatch, TokenCount.IN)
    ]
    place_of = {rank: place for place, ranks in enumerate(stage.ranks) for rank in ranks}
    return TokenShares(
        mask=sample_bitfield([[plan.sample[item.sample] for item in row] for row in microbatch.rows]),
        owned=tuple(by_place[place_of[rank]] for rank in context.ranks),
        member=context.member,
    )


def _on_device(data: MicrobatchData, device: torch.device | str) -> MicrobatchData:
    def moved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(device) for name, tensor in tensors.items()}

    return replace(
        data,
        placed=moved(data.placed),
        chosen=moved(data.chosen),
        input_ids=None if data.input_ids is None else data.input_ids.to(device),
        labels=None if data.labels is None else data.labels.to(device),
        position_ids=None if data.position_ids is None else data.position_ids.to(device),
    )


def _check_served(plan: Plan, samples: list[Sample], edges: tuple[Edge, ...]) -> None:
    served = {TEXT, *(plan.model.module(edge.source).modality for edge in edges)}
    for sample in samples:
        for segment in sample.segments:
            if segment.modality not in served:
                raise ValueError(
                    f"sample {sample.id}: no module brings {segment.modality!r} to the LLM; "
                    f"it has {', '.join(sorted(served))}"
                )


def _ids(sample: Sample, source: DataSource, vocab_size: int) -> Tensor:
    """[tokens of the sample]: its text, and `PLACEHOLDER` where another modality stands."""
    pieces = [
        source.token_ids(sample.id, segment, vocab_size)
        if segment.modality == TEXT
        else torch.full((segment.tokens_out,), PLACEHOLDER)
        for segment in sample.segments
    ]
    return torch.cat(pieces)


def _labels(ids_T: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """[T] the next token of the same item where that is text, else `NO_TARGET`."""
    labels_T = ids_T.roll(-1)
    labels_T[torch.tensor(lengths).cumsum(0) - 1] = NO_TARGET
    return labels_T.masked_fill(labels_T == PLACEHOLDER, NO_TARGET)


def _placed(plan: Plan, edge: Edge, samples: list[Sample]) -> Tensor:
    """[E] where an edge's features stand in the packed samples, in sequence order."""
    modality = plan.model.module(edge.source).modality
    runs = [torch.arange(start, stop) for start, stop in _runs(samples, modality)]
    return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)


def _runs(samples: list[Sample], modality: str) -> Iterator[tuple[int, int]]:
    start = 0
    for sample in samples:
        for segment in sample.segments:
            if segment.modality == modality:
                yield start, start + segment.tokens_out
            start += segment.tokens_out
