"""Input data of stages: pixels, mel frames, tokens and targets of one microbatch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, takewhile
from typing import Protocol

import torch
from torch import Tensor

from runtime.data.pixels import scaled
from runtime.models.adapter import NO_TARGET, PLACEHOLDER, MicrobatchData
from runtime.models.attention_mask import AttentionMask
from runtime.models.choose import adapter_of
from runtime.models.context_images import ContextImage
from runtime.models.decoder import DecoderAdapter
from runtime.models.decoder_families import DECODERS
from runtime.models.encoder import EncoderAdapter
from runtime.models.initialise import generator_of
from runtime.parallel.context.batch import rank_data
from runtime.parallel.context.group import ContextGroup
from workbench.data.sample import Item, Sample, Segment
from workbench.masks.patterns import CAUSAL, document_lengths, sample_bitfield
from workbench.model.layer import Attention
from workbench.model.model_graph import TEXT, Edge, Module
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.routing import routing_of
from workbench.plan.stage import Stage

# Shape suffixes: T = packed tokens, E = packed tokens of one edge.


class DataSource(Protocol):
    """A source of raw data, by sample id. A rank asks only for its own items."""

    def raw(self, sample: int, segment: Segment, shape: tuple[int, ...]) -> Tensor:
        """float32 pixels [C, H, W] in about [-1, 1], of a video's step [C, F, H, W], or mel [bins, frames].

        Pixels are scaled on as the encoder's processor says (`runtime.data.pixels`).
        """
        ...

    def token_ids(self, sample: int, segment: Segment, vocab_size: int) -> Tensor:
        """int64 [segment.tokens_out] tokens of one text segment, each in [0, vocab_size)."""
        ...


class SyntheticSource:
    """Random data: a segment's data depend only on (seed, sample id, modality, k)."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def raw(self, sample: int, segment: Segment, shape: tuple[int, ...]) -> Tensor:
        """Values drawn from N(0, 1)."""
        generator = generator_of("raw", self.seed, sample, segment.modality, segment.k)
        return torch.empty(*shape, dtype=torch.float32).normal_(generator=generator)

    def token_ids(self, sample: int, segment: Segment, vocab_size: int) -> Tensor:
        """Tokens drawn uniformly from the vocabulary."""
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
    """All inputs of a stage for a microbatch, apart from activations and features.

    Raw inputs go to an encoder's first stage, tokens to the LLM's first, targets to its last. Call it before
    timing starts: it draws or loads the data.

    Args:
        plan, stage, microbatch: of which the inputs are.
        source: of raw data and tokens.
        dtype: of raw data.
        device: of all tensors.
        context: the ranks that share the stage's tokens; None: this rank has all of them.

    Raises:
        ValueError: a segment that no edge carries to the LLM, or of a size that its encoder cannot take; a
            text of another length in the data than in the plan; a context group for a stage without context
            parallelism, or none for one with it.
    """
    module = plan.model.module(stage.module)
    if (1 if context is None else context.size) != stage.cp:
        raise ValueError(f"stage {stage.id}: want a context group of {stage.cp} ranks, got {context}")
    if module.modality == TEXT:
        data = _llm_data(plan, stage, microbatch, source)
    else:
        data = _encoder_data(plan, stage, microbatch, source)
    if context is not None:
        data = rank_data(plan, stage, microbatch, data, context, device=device)
    elif module.modality == TEXT:
        samples = [plan.sample[item.sample] for item in microbatch.items]
        data = _masked(data, samples, windows_of(module), device)
    return _on_device(data, device, dtype)


def windows_of(module: Module) -> set[int | None]:
    """Windows of the module's attention operators; None for those without a window."""
    operators = (operator for layer in module.layers for operator in layer.operators)
    return {operator.window for operator in operators if isinstance(operator, Attention)}


def _encoder_data(plan: Plan, stage: Stage, microbatch: Microbatch, source: DataSource) -> MicrobatchData:
    """Of all tokens of the microbatch, on the CPU."""
    module = plan.model.module(stage.module)
    segments = [_segment_of(plan.sample[item.sample], module.modality, item)[0] for item in microbatch.items]
    raw: tuple[Tensor, ...] = ()
    adapter = adapter_of(module)
    if stage.layers[0] <= adapter.raw_layer < stage.layers[1]:
        raw = tuple(
            scaled(source.raw(item.sample, segment, adapter.raw_shape(segment)), segment, module)
            for item, segment in zip(microbatch.items, segments, strict=True)
        )
    chosen = _entering_conditions(plan, stage, microbatch)
    return MicrobatchData(
        items=microbatch.items,
        tokens_in=tuple(segment.tokens_in for segment in segments),
        tokens_out=tuple(segment.tokens_out for segment in segments),
        raw=raw,
        grids=tuple(segment.grid for segment in segments),
        unpadded=tuple(segment.unpadded for segment in segments),
        tile_tokens=tuple(segment.tile_tokens for segment in segments),
        windows=tuple(
            _window_of(plan.sample[item.sample], segment)
            for item, segment in zip(microbatch.items, segments, strict=True)
        ),
        # A generator reads the LLM's states at the positions of its items, in the items' order.
        chosen=chosen,
        placed={name: torch.arange(len(place_E)) for name, place_E in chosen.items()},
    )


def has_axes(module: Module) -> bool:
    """Whether it is a language model whose positions have three axes."""
    assert module.source is not None, "adapters are made from sources"
    family = DECODERS.get(module.source.architecture)
    return family is not None and family.rotates_by_axes


def _entering_conditions(plan: Plan, stage: Stage, microbatch: Microbatch) -> dict[str, Tensor]:
    """Edge from a module of other items -> [E] positions of the items' tokens in its packed states.

    The states are those of whole samples, each once, in the order of first use by the items.
    """
    modality = plan.model.module(stage.module).modality
    entering = [edge for edge in plan.model.edges_into(stage.module) if edge.entered_in(stage.layers)]
    return {edge.name: _conditions(plan, edge, microbatch, modality) for edge in entering}


def _conditions(plan: Plan, edge: Edge, microbatch: Microbatch, modality: str) -> Tensor:
    wanted = routing_of(plan).wanted(edge, microbatch)
    tokens = [plan.sample[item.sample].num_tokens for item in wanted]
    starts = dict(zip((item.sample for item in wanted), accumulate(tokens, initial=0), strict=False))
    return torch.cat(
        [
            starts[item.sample] + torch.arange(*_segment_of(plan.sample[item.sample], modality, item)[1])
            for item in microbatch.items
        ]
    )


def _placed_in(sample: Sample, modality: str) -> Iterator[tuple[Segment, tuple[int, int]]]:
    """Yield the segments of a modality, each with the start and end of its tokens in the sample."""
    start = 0
    for segment in sample.segments:
        if segment.modality == modality:
            yield segment, (start, start + segment.tokens_out)
        start += segment.tokens_out


def _segment_of(sample: Sample, modality: str, item: Item) -> tuple[Segment, tuple[int, int]]:
    for segment, index in _placed_in(sample, modality):
        if segment.k == item.k:
            return segment, index
    raise ValueError(f"sample {sample.id} has no segment {modality}[{item.k}]")


def _window_of(sample: Sample, segment: Segment) -> int:
    """How many segments of its modality directly precede it: the number of a clip's window, from 0."""
    before = sample.segments[: sample.segments.index(segment)]
    return sum(1 for _ in takewhile(lambda each: each.modality == segment.modality, reversed(before)))


def _llm_data(plan: Plan, stage: Stage, microbatch: Microbatch, source: DataSource) -> MicrobatchData:
    """Of all tokens of the microbatch, on the CPU."""
    samples = [plan.sample[item.sample] for item in microbatch.items]
    edges = plan.model.edges_into(stage.module)
    _check_served(plan, samples, (*edges, *plan.model.edges_out_of(stage.module)))
    lengths = tuple(sample.num_tokens for sample in samples)
    num_layers = len(plan.model.module(stage.module).layers)
    ids_T, labels_T = None, None
    if stage.layers[0] == 0 or stage.layers[1] == num_layers:
        adapter = adapter_of(plan.model.module(stage.module))
        assert isinstance(adapter, DecoderAdapter), "the text module is a language model"
        ids_T = torch.cat([_ids(sample, source, adapter.vocab_size) for sample in samples])
        labels_T = _labels(ids_T, [length for sample in samples for length in document_lengths(sample)])
    entering = [edge for edge in edges if edge.entered_in(stage.layers)]
    context_images = {
        edge.name: _context_images(plan, edge, samples) for edge in entering if plan.model.is_context(edge)
    }
    placed = {edge.name: _placed(plan, edge, samples) for edge in entering if edge.name not in context_images}
    return MicrobatchData(
        items=microbatch.items,
        tokens_in=lengths,
        tokens_out=lengths,
        input_ids=ids_T if stage.layers[0] == 0 else None,
        labels=labels_T if stage.layers[1] == num_layers else None,
        placed={name: place_E for name, place_E in placed.items() if len(place_E)},
        context_images={name: images for name, images in context_images.items() if images},
        axes=axes_of(plan.model.modules, samples) if has_axes(plan.model.module(stage.module)) else None,
        item_ids=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        if context_images
        else None,
    )


def _masked(
    data: MicrobatchData, samples: list[Sample], windows: set[int | None], device: torch.device | str
) -> MicrobatchData:
    """The data with an attention for the samples' masks; causal ones need none."""
    if all(sample.mask == CAUSAL for sample in samples):
        return data
    fields = sample_bitfield([samples])
    mask = AttentionMask(fields, fields, torch.device(device))
    for window in windows:
        mask.prepare(window)
    return replace(data, attention=mask)


def _on_device(data: MicrobatchData, device: torch.device | str, dtype: torch.dtype) -> MicrobatchData:
    def moved(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(device) for name, tensor in named.items()}

    def one(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device)

    return replace(
        data,
        raw=tuple(tensor.to(device=device, dtype=dtype) for tensor in data.raw),
        placed=moved(data.placed),
        chosen=moved(data.chosen),
        input_ids=one(data.input_ids),
        labels=one(data.labels),
        position_ids=one(data.position_ids),
        axes=one(data.axes),
        item_ids=one(data.item_ids),
        embedded=one(data.embedded),
    )


def _check_served(plan: Plan, samples: list[Sample], edges: tuple[Edge, ...]) -> None:
    ends = (end for edge in edges for end in (edge.source, edge.target))
    served = {plan.model.module(end).modality for end in ends} | {TEXT}
    for sample in samples:
        for segment in sample.segments:
            if segment.modality not in served:
                raise ValueError(
                    f"sample {sample.id}: no module encodes {segment.modality!r} for the LLM or makes it; "
                    f"the plan has {', '.join(sorted(served))}"
                )


def _ids(sample: Sample, source: DataSource, vocab_size: int) -> Tensor:
    """[tokens of the sample] its text, with `PLACEHOLDER` at tokens of other modalities."""
    pieces = [
        _text(sample, segment, source, vocab_size)
        if segment.modality == TEXT
        else torch.full((segment.tokens_out,), PLACEHOLDER)
        for segment in sample.segments
    ]
    return torch.cat(pieces)


def _text(sample: Sample, segment: Segment, source: DataSource, vocab_size: int) -> Tensor:
    """[tokens of the segment] its text; ValueError for data of another length than the plan's."""
    ids_T = source.token_ids(sample.id, segment, vocab_size)
    if len(ids_T) != segment.tokens_out:
        raise ValueError(
            f"sample {sample.id}: text {segment.k} has {len(ids_T)} tokens, in the plan {segment.tokens_out}"
        )
    return ids_T


def _labels(ids_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """[T] the next token of the same document if that is text, else `NO_TARGET`.

    Source: `DataCollatorWithFlattening` of transformers, which has no target for a document's first token.

    Args:
        ids_T: tokens.
        lengths: tokens of every document: of an item, or of several that its mask packs.
    """
    labels_T = ids_T.roll(-1)
    labels_T[torch.tensor(lengths).cumsum(0) - 1] = NO_TARGET
    return labels_T.masked_fill(labels_T == PLACEHOLDER, NO_TARGET)


def _placed(plan: Plan, edge: Edge, samples: list[Sample]) -> Tensor:
    """[E] positions of an edge's features in the packed samples, in sequence order."""
    modality, first = plan.model.module(edge.source).modality, 0
    runs = [torch.empty(0, dtype=torch.int64)]
    for sample in samples:
        runs += [first + torch.arange(*index) for _, index in _placed_in(sample, modality)]
        first += sample.num_tokens
    return torch.cat(runs)


def _context_images(plan: Plan, edge: Edge, samples: list[Sample]) -> tuple[ContextImage, ...]:
    """The items that cross-attention reads of an edge, in the order of its features."""
    source = plan.model.module(edge.source)
    adapter = adapter_of(source)
    return tuple(
        ContextImage(index, position, adapter.tiles(segment))
        for index, sample in enumerate(samples)
        for segment, (position, _) in _placed_in(sample, source.modality)
    )


def axes_of(modules: Iterable[Module], samples: Sequence[Sample]) -> Tensor:
    """[3, T] int64 positions of three axes (M-RoPE): time, row and column, sample after sample, each from 0.

    Text advances on all axes together; an image's tokens share one time, each at its row and column; what
    follows an image starts beyond its longest side. A video's frames are alike, each at its own time; what
    follows a video starts beyond the longest side of a frame, however long the video is.

    Source: Qwen2-VL (Wang et al. 2024, arXiv 2409.12191), section 2.1, as in transformers' `get_rope_index`.
    """
    grids = {
        module.modality: adapter
        for module in modules
        if module.modality != TEXT and isinstance(adapter := adapter_of(module), EncoderAdapter)
    }
    return torch.cat([_axes_of_sample(sample, grids) for sample in samples], dim=1)


def _axes_of_sample(sample: Sample, grids: dict[str, EncoderAdapter]) -> Tensor:
    parts, start, first = [], 0, 0
    for segment in sample.segments:
        adapter = grids.get(segment.modality)
        rows, columns = (0, 0) if adapter is None else adapter.sides(segment)
        if rows:
            number, time = segment.frame or (0, 0)
            first = first if number else start  # of the image, or of the video's first frame
            places = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
            row_T, column_T = (axis.flatten() for axis in places)
            time_T = torch.full_like(row_T, time)
            parts.append(first + torch.stack([time_T, row_T, column_T]))
            start = first + max(rows, columns)
        else:
            parts.append(start + torch.arange(segment.tokens_out).expand(3, -1))
            start += segment.tokens_out
    return torch.cat(parts, dim=1)
