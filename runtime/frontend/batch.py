"""Converts a data loader's batch of tensors into samples of a plan and a data source."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from runtime.data.batches import windows_of
from runtime.frontend.callbacks import (
    IDS,
    BeforeEncoder,
    BeforeLLM,
    EncoderOutputs,
    called,
    merge_special_tokens,
)
from runtime.frontend.items import items_of, size_of
from runtime.frontend.tiles import Read, tiled_items
from runtime.models.attention_mask import AttentionMask
from runtime.models.encoder import EncoderAdapter, ItemSize
from workbench.data.sample import Sample, Segment
from workbench.masks.patterns import CAUSAL, canonical, check_masks, sample_bitfield
from workbench.model.item_tokens import packs_tiles
from workbench.model.model_graph import TEXT, Module

# Shape suffixes: T = tokens of a sample, D = width of the language model.

PADDING, LABELS, MASKS = "attention_mask", "labels", "masks"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInput:
    """How one encoder reads a batch.

    Args:
        keys: names of its inputs; the first holds its items, e.g. "pixel_values".
        adapter: of the encoder's architecture.
        width: of the language model.
        token_id: the placeholder in `input_ids` for one of its tokens; None: it has none there.
        before: the callback in front of the encoder.
    """

    keys: tuple[str, ...]
    adapter: EncoderAdapter
    width: int
    token_id: int | None = None
    before: BeforeEncoder | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """Data in memory; a `runtime.data.batches.DataSource`.

    Args:
        items: (sample, encoder, k) -> pixels or frames.
        texts: (sample, k) -> int64 tokens.
    """

    items: Mapping[tuple[int, str, int], Tensor]
    texts: Mapping[tuple[int, int], Tensor]

    def raw(self, sample: int, segment: Segment, shape: tuple[int, ...]) -> Tensor:
        """The item; its shape was checked with the samples. A clip may be a frame shorter than asked."""
        del shape
        return self.items[sample, segment.modality, segment.k]

    def token_ids(self, sample: int, segment: Segment, vocab_size: int) -> Tensor:
        """Tokens of a text; ValueError for a token outside the vocabulary."""
        ids_T = self.texts[sample, segment.k]
        wrong = ids_T[(ids_T < 0) | (ids_T >= vocab_size)]
        if len(wrong):
            raise ValueError(f"sample {sample}: tokens must be in [0, {vocab_size}), got {int(wrong[0])}")
        return ids_T


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBatch:
    """A batch after the callbacks in front of encoders and language model."""

    samples: tuple[Sample, ...]
    source: TensorSource


def prepare(
    batch: Mapping[str, Any], encoders: Mapping[str, EncoderInput], before_llm: BeforeLLM | None = None
) -> PreparedBatch:
    """Run the callbacks in front of encoders and language model, and derive every sample's segments.

    Args:
        batch: `input_ids` [B, T] or one tensor per sample; `attention_mask` [B, T] marks
            what is not padding; `masks`: attention masks of the language model, one text of
            `workbench.masks.patterns` or one per sample. An encoder's input is under its key, or
            several under its name:
            per sample one item, a tensor of several, a sequence of them, or None.
        encoders: by name, which is also the modality of their segments.
        before_llm: merges special tokens; None: `merge_special_tokens`. It runs before the
            features are computed, so it gets their shapes: tensors on the meta device.

    Raises:
        ValueError: missing inputs, wrong shapes or counts; the message names sample and encoder.
    """
    texts = _texts(batch)
    inputs = {name: _own_input(batch, name, encoders) for name in encoders}
    _refuse_unknown(batch, encoders)
    reads = {name: _items(name, encoder, inputs[name], texts) for name, encoder in encoders.items()}
    items = {name: [[read.item for read in per_sample] for per_sample in reads[name]] for name in encoders}
    sizes = {name: [[read.size for read in per_sample] for per_sample in reads[name]] for name in encoders}
    outputs: EncoderOutputs = {
        name: [
            tuple(torch.empty(size.tokens_out, encoders[name].width, device="meta") for size in per_sample)
            for per_sample in sizes[name]
        ]
        for name in encoders
    }
    token_ids = {name: e.token_id for name, e in encoders.items() if e.token_id is not None}
    merge = merge_special_tokens(token_ids) if before_llm is None else before_llm
    merged = called(merge, "before the LLM", outputs, {IDS: list(texts)})
    if len(merged[IDS]) != len(texts):
        raise ValueError(
            f"the callback before the LLM must return {len(texts)} samples, got {len(merged[IDS])}"
        )
    samples, kept = [], {}
    for index, ids_T in enumerate(merged[IDS]):
        sample_sizes = {name: sizes[name][index] for name in encoders}
        sample, parts = _sample(index, ids_T, sample_sizes, token_ids)
        samples.append(sample)
        kept.update(parts)
    samples = _masked(samples, batch.get(MASKS, CAUSAL))
    items_by_key = {
        (index, name, k): item
        for name in encoders
        for index, per_sample in enumerate(items[name])
        for k, item in enumerate(per_sample)
    }
    return PreparedBatch(samples=tuple(samples), source=TensorSource(items=items_by_key, texts=kept))


def _masked(samples: Sequence[Sample], given_masks: Any) -> list[Sample]:
    """Samples with their masks; ValueError for texts that are no masks, do not fit, or of another number."""
    listed = list(given_masks) if isinstance(given_masks, list | tuple) else [given_masks]
    texts = [given_masks] * len(samples) if isinstance(given_masks, str) else listed
    if len(texts) != len(samples) or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"{MASKS}: want one text, or one for each of {len(samples)} samples, got {given_masks!r:.60}"
        )
    masked = [replace(sample, mask=canonical(text)) for sample, text in zip(samples, texts, strict=True)]
    check_masks(masked)
    return masked


def _texts(batch: Mapping[str, Any]) -> list[Tensor]:
    """[samples] tokens of each sample, without padding."""
    if IDS not in batch:
        raise ValueError(f"the batch has no {IDS!r}; it has {', '.join(map(repr, batch)) or 'nothing'}")
    rows = [torch.as_tensor(row) for row in batch[IDS]]
    masks, labels = batch.get(PADDING), batch.get(LABELS)
    kept = (
        rows
        if masks is None
        else [row[torch.as_tensor(m).bool()] for row, m in zip(rows, masks, strict=True)]
    )
    for index, ids_T in enumerate(kept):
        if ids_T.dim() != 1 or ids_T.is_floating_point() or not len(ids_T):
            raise ValueError(f"{IDS} of sample {index}: want a row of whole numbers, got {ids_T}")
        if labels is not None:
            _check_labels(index, rows[index], torch.as_tensor(labels[index]), masks)
    return [ids_T.long().cpu() for ids_T in kept]


def _check_labels(index: int, ids_T: Tensor, labels_T: Tensor, masks: Any) -> None:
    mask_T = (
        torch.ones_like(ids_T, dtype=torch.bool) if masks is None else torch.as_tensor(masks[index]).bool()
    )
    if labels_T.shape != ids_T.shape or bool((labels_T != ids_T)[mask_T].any()):
        raise ValueError(
            f"{LABELS} of sample {index}: every text token is predicted, so they must equal {IDS}; "
            "leave them out"
        )


def _own_input(batch: Mapping[str, Any], name: str, encoders: Mapping[str, EncoderInput]) -> dict[str, Any]:
    own = batch.get(name)
    if isinstance(own, Mapping):
        return dict(own)
    keys = encoders[name].keys
    shared = {key: batch[key] for key in keys if key in batch}
    rivals = [other for other in encoders if encoders[other].keys[0] == keys[0]]
    if shared and len(rivals) > 1:
        raise ValueError(
            f"encoders {' and '.join(rivals)} both read {keys[0]!r}: give each its own, as "
            f"batch[{name!r}] = {{{keys[0]!r}: ...}}"
        )
    return shared


def _refuse_unknown(batch: Mapping[str, Any], encoders: Mapping[str, EncoderInput]) -> None:
    known = [
        IDS,
        PADDING,
        LABELS,
        MASKS,
        *encoders,
        *dict.fromkeys(key for e in encoders.values() for key in e.keys),
    ]
    for key in batch:
        if key not in known:
            raise ValueError(f"the batch has {key!r}, which nothing reads; want {', '.join(known)}")


def _items(
    name: str, encoder: EncoderInput, inputs: dict[str, Any], texts: Sequence[Tensor]
) -> list[tuple[Read, ...]]:
    """[samples] the encoder's items of each sample and their sizes, after its callback."""
    if not inputs:
        return [()] * len(texts)
    if encoder.before is not None:
        inputs = called(encoder.before, f"before encoder {name!r}", inputs)
    key = encoder.keys[0]
    if key not in inputs:
        raise ValueError(f"encoder {name!r} reads {key!r}, its input has {', '.join(inputs)}")
    token = encoder.token_id
    places = [None if token is None else int((ids_T == token).sum()) for ids_T in texts]
    if packs_tiles(encoder.adapter.module):
        return tiled_items(encoder.adapter, key, inputs, places)
    found = items_of(encoder.adapter, key, inputs, places)
    return [
        tuple(Read(item, size_of(encoder.adapter, item, name, index)) for item in held)
        for index, held in enumerate(found)
    ]


def _sample(
    index: int, ids_T: Tensor, sizes: Mapping[str, list[ItemSize]], token_ids: Mapping[str, int]
) -> tuple[Sample, dict[tuple[int, int], Tensor]]:
    """The sample and its texts: runs of special tokens become items, in order; the rest is text."""
    owner = {token: name for name, token in token_ids.items()}
    for name, item_sizes in sizes.items():
        count = int((ids_T == token_ids[name]).sum()) if name in token_ids else 0
        want = sum(size.tokens_out for size in item_sizes)
        if count != want:
            raise ValueError(
                f"sample {index}: encoder {name!r} makes {len(item_sizes)} items of {want} tokens, {IDS} has "
                f"{count} places for them (token {token_ids.get(name)})"
            )
    segments: list[Segment] = []
    texts: dict[tuple[int, int], Tensor] = {}
    next_k = dict.fromkeys(sizes, 0)
    start = 0
    while start < len(ids_T):
        owned = owner.get(int(ids_T[start]))
        if owned is None:
            stop = start + 1
            while stop < len(ids_T) and int(ids_T[stop]) not in owner:
                stop += 1
            texts[index, len(texts)] = ids_T[start:stop]
            segments.append(Segment(TEXT, len(texts) - 1, stop - start, stop - start))
        else:
            size = sizes[owned][next_k[owned]]
            stop = start + size.tokens_out
            if bool((ids_T[start:stop] != token_ids[owned]).any()):
                raise ValueError(
                    f"sample {index}: item {next_k[owned]} of encoder {owned!r} wants {size.tokens_out} "
                    f"places in one run, token {start} begins a shorter one"
                )
            segments.append(Segment(owned, next_k[owned], *size))
            next_k[owned] += 1
        start = stop
    return Sample(index, tuple(segments)), texts


def visible(sample: Sample, module: Module, device: torch.device) -> Tensor | None:
    """bool [1, 1, T, T] attention mask; None where transformers' own causal mask is the same.

    Raises:
        ValueError: a mask in a module whose layers have several windows, each of which needs its own mask.
    """
    if sample.mask == CAUSAL:
        return None
    windows = windows_of(module)
    if len(windows) > 1:
        raise ValueError(
            f"sample {sample.id}: mask {sample.mask!r:.60} beside layers of several windows runs on ranks "
            "alone; use `execute`"
        )
    fields = sample_bitfield([[sample]])
    visible_TT = AttentionMask(fields, fields, torch.device("cpu")).dense(*windows)
    return visible_TT[None, None].to(device)
