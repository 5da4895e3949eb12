"""Features of items by users' own models, one by one in one process."""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from runtime.frontend.batch import PreparedBatch
from runtime.frontend.stage import AroundProjector, Outputs, call_checked
from runtime.frontend.tiles import tile_features
from runtime.models.encoder import EncoderAdapter
from workbench.data.sample import Item

# Shape suffixes: T = tokens of an item, D = width of the language model.


def features_of(
    name: str,
    parts: tuple[PreTrainedModel, nn.Module | None, nn.Parameter | None],
    around: AroundProjector,
    reader: EncoderAdapter,
    prepared: PreparedBatch,
) -> dict[tuple[str, Item], Tensor]:
    """(name, item) -> [T, D] features after the projector, of every item of one encoder.

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
