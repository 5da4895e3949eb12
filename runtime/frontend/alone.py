"""Users' own models in one process: features of items one by one, the loss of samples one by one."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from runtime.data.batches import axes_of, has_axes
from runtime.frontend.architecture import Architecture
from runtime.frontend.batch import PreparedBatch, visible
from runtime.frontend.stage import AroundProjector, Outputs, call_checked
from runtime.frontend.tiles import tile_features
from runtime.models.adapter import PLACEHOLDER
from runtime.models.encoder import EncoderAdapter
from workbench.data.sample import Item
from workbench.model.model_graph import TEXT

# Shape suffixes: T = tokens of an item or of a sample, D = width of the language model, V = vocabulary,
# A = axes of positions.


def features_of(
    name: str,
    parts: tuple[PreTrainedModel, nn.Module | None, nn.Parameter | None],
    around: AroundProjector,
    reader: EncoderAdapter,
    prepared: PreparedBatch,
) -> dict[tuple[str, Item], Tensor]:
    """(name, item) -> features after the projector, of every item of one encoder.

    [T, D], or [T, features x D] where the encoder has features of several blocks, each for another layer of
    the language model (DeepStack).

    Args:
        name: of the encoder in plans.
        parts: its model, its projector unless it is the model's own, and `image_newline` if it puts tiles
            together.
        around: callbacks around the projector.
        reader: the encoder's adapter.
        prepared: the batch.
    """
    model, projector, newline_D = parts
    items = {Item(i, k): x for (i, encoder, k), x in prepared.source.items.items() if encoder == name}
    if not items:
        return {}
    inputs = {item: x.to(model.device, model.dtype) for item, x in items.items()}
    if newline_D is not None and projector is not None:
        segments = {
            Item(index, segment.k): segment
            for index, sample in enumerate(prepared.samples)
            for segment in sample.of(name)
        }
        return {
            (name, item): tile_features(reader, model, projector, newline_D, x, segments[item])
            for item, x in inputs.items()
        }
    encoded: Outputs = tuple(reader.features(model, x) for x in inputs.values())
    about: dict[str, Any] = {"items": tuple(map(tuple, items)), "num_tokens": tuple(map(len, encoded))}
    if around.after_encoder is not None:
        encoded = call_checked(around.after_encoder, about, encoded)
    projected = encoded if projector is None else tuple(projector(x_TD) for x_TD in encoded)
    if around.after_projector is not None:
        projected = call_checked(around.after_projector, about, projected)
    return {(name, item): y_TD for item, y_TD in zip(items, projected, strict=True)}


def sample_loss(
    model: PreTrainedModel,
    architectures: Sequence[Architecture],
    prepared: PreparedBatch,
    index: int,
    features: Mapping[tuple[str, Item], Tensor],
) -> tuple[Tensor, int]:
    """Loss summed over the next text tokens of one sample, and their number.

    Args:
        model: the user's language model.
        architectures: of all parts, its own the last.
        prepared: the batch.
        index: of the sample.
        features: as `features_of`, of all encoders.
    """
    *_, known = architectures
    embed, sample = model.get_input_embeddings(), prepared.samples[index]
    ids: list[Tensor] = []
    features_of_segments: list[tuple[Tensor, ...]] = []  # of each segment [T, D]: its tokens, then others
    for segment in sample.segments:
        if segment.modality == TEXT:
            ids_T = prepared.source.token_ids(index, segment, model.config.vocab_size).to(model.device)
            features_of_segments.append((embed(ids_T),))
        else:
            y_TE = features[segment.modality, Item(index, segment.k)]
            features_of_segments.append(y_TE.split(known.module.layers[0].out_width, dim=1))
            ids_T = torch.full((segment.tokens_out,), PLACEHOLDER, device=model.device)
        ids.append(ids_T)
    tokens_TD, *others = _in_sequence(features_of_segments)
    more: dict[str, Tensor] = {}
    if has_axes(known.module):
        axes_AT = axes_of([each.module for each in architectures], [sample])
        more["position_ids"] = axes_AT[:, None].to(model.device)
    seen = visible(sample, known.module, model.device)
    with _added_to_blocks(model, known, others):
        logits_TV = model(inputs_embeds=tokens_TD[None], attention_mask=seen, **more).logits[0]
    next_T = torch.cat(ids)[1:]
    loss = functional.cross_entropy(logits_TV[:-1], next_T, ignore_index=PLACEHOLDER, reduction="sum")
    return loss, int((next_T != PLACEHOLDER).sum())


def _in_sequence(segments: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    """[T, D] of a sample for each feature, 0 where a segment lacks it."""
    most = max(map(len, segments))
    padded = [(*given, *[torch.zeros_like(given[0])] * (most - len(given))) for given in segments]
    return [torch.cat(each) for each in zip(*padded, strict=True)]


@contextmanager
def _added_to_blocks(
    model: PreTrainedModel, known: Architecture, features: Sequence[Tensor]
) -> Iterator[None]:
    """Add [T, D] features to the outputs of the first blocks, one each, as `connect` says."""
    with ExitStack() as stack:
        for number, added_TD in enumerate(features):

            def add(block: nn.Module, arguments: Any, output: Any, added_TD: Tensor = added_TD) -> Any:
                del block, arguments
                if isinstance(output, tuple):
                    return (output[0] + added_TD, *output[1:])
                return output + added_TD

            handle = _block(model, known, number).register_forward_hook(add)
            stack.callback(handle.remove)
        yield


def _block(model: PreTrainedModel, known: Architecture, index: int) -> nn.Module:
    """The user's block of that number; layer 0 of a plan embeds tokens."""
    return model.get_submodule(known.adapter.build(1 + index).prefixes["block"])
