"""Callbacks in front of encoders and language model: their interface, and some ready-made ones.

Source: Cornstarch v1, section 5.1 and Listing 2. They run where a batch is prepared, on every
process; callbacks around the projector are in `runtime.frontend.stage`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from workbench.data.corpus import ANYRES_GRIDS, anyres_grid

# Shape suffixes: C = channels, H, W = height, width of an image, N = blocks, P = pixels of a block's side,
# T = tokens of a sample, D = width of the language model.

IDS = "input_ids"
PIXELS = "pixel_values"

BeforeEncoder = Callable[[dict[str, Any]], dict[str, Any]]
EncoderOutputs = dict[str, list[tuple[Tensor, ...]]]  # encoder -> per sample, per item: [tokens, D]
BeforeLLM = Callable[[EncoderOutputs, dict[str, Any]], dict[str, Any]]


def called(callback: Callable[..., Any], where: str, *arguments: Any) -> Any:
    """Call a callback and return its result.

    Raises:
        ValueError: it raised any exception; one line that names it.
    """
    try:
        return callback(*arguments)
    except Exception as error:
        name = getattr(callback, "__name__", type(callback).__name__)
        message = " ".join(str(error).split())
        raise ValueError(f"callback {name!r} {where}: {type(error).__name__}: {message}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyRes:
    """Callback for a vision encoder: every image becomes a block of its own, resized, and a grid of blocks.

    Source: Liu et al. 2024, "LLaVA-NeXT", as Cornstarch v1 section 5.1 describes it. The grid is
    `anyres_grid`'s, as in plans.
    Differs: rows of padding alone are kept; the encoder sees every block of the grid.

    Args:
        block_px: side length of the encoder's images.
        grids: (rows, columns) to choose from.
    """

    block_px: int
    grids: tuple[tuple[int, int], ...] = ANYRES_GRIDS

    def __post_init__(self) -> None:
        if self.block_px < 1 or not self.grids or min(min(grid) for grid in self.grids) < 1:
            raise ValueError(f"want block_px and a grid of >= 1, got {self.block_px} and {self.grids}")

    def __call__(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Replace `pixel_values`, per sample an image [C, H, W], several, or None, by blocks [N, C, P, P]."""
        return inputs | {PIXELS: [self._of_sample(entry) for entry in inputs[PIXELS]]}

    def _of_sample(self, entry: Any) -> Tensor | None:
        if entry is None:
            return None
        if isinstance(entry, Tensor) and entry.dim() == 3:
            return self.blocks(entry)
        return torch.cat([self.blocks(image_CHW) for image_CHW in entry])

    def blocks(self, image_CHW: Tensor) -> Tensor:
        """[1 + rows x columns, C, P, P]: the whole image, then the grid's blocks row by row."""
        side = self.block_px
        rows, columns = anyres_grid(*image_CHW.shape[1:], tile_px=side, grids=self.grids)
        height, width = rows * side, columns * side
        scale = min(height / image_CHW.shape[1], width / image_CHW.shape[2])
        kept = [max(1, round(size * scale)) for size in image_CHW.shape[1:]]
        fitted_CHW = _resized(image_CHW, min(kept[0], height), min(kept[1], width))
        top, left = (height - fitted_CHW.shape[1]) // 2, (width - fitted_CHW.shape[2]) // 2
        below, right = height - fitted_CHW.shape[1] - top, width - fitted_CHW.shape[2] - left
        padded_CHW = functional.pad(fitted_CHW, (left, right, top, below))
        grid_CRPQP = padded_CHW.reshape(-1, rows, side, columns, side)
        blocks_NCPP = grid_CRPQP.permute(1, 3, 0, 2, 4).flatten(0, 1)
        return torch.cat([_resized(image_CHW, side, side)[None], blocks_NCPP])


def _resized(image_CHW: Tensor, height: int, width: int) -> Tensor:
    if image_CHW.shape[1:] == (height, width):
        return image_CHW
    return functional.interpolate(image_CHW[None], (height, width), mode="bilinear", antialias=True)[0]


def merge_special_tokens(token_ids: Mapping[str, int]) -> BeforeLLM:
    """A callback for the language model that repeats special tokens as often as there are features.

    In a sample, one special token per item makes room for that item; a single one for all of the sample's
    items in a row. A sample with room for all of them stays as it is.
    """

    def merge(encoder_outputs: EncoderOutputs, inputs: dict[str, Any]) -> dict[str, Any]:
        merged = []
        for index, ids_T in enumerate(inputs[IDS]):
            merged_T = ids_T
            for name, token in token_ids.items():
                merged_T = _expanded(merged_T, token, [len(item) for item in encoder_outputs[name][index]])
            merged.append(merged_T)
        return inputs | {IDS: merged}

    return merge


def prepend_tokens(token_ids: Mapping[str, int]) -> BeforeLLM:
    """A callback for the language model that places features before the text, encoder by encoder."""

    def prepend(encoder_outputs: EncoderOutputs, inputs: dict[str, Any]) -> dict[str, Any]:
        joined = []
        for index, ids_T in enumerate(inputs[IDS]):
            sizes = {token: sum(map(len, encoder_outputs[name][index])) for name, token in token_ids.items()}
            places = [torch.full((size,), token) for token, size in sizes.items()]
            joined.append(torch.cat([*places, ids_T]))
        return inputs | {IDS: joined}

    return prepend


def _expanded(ids_T: Tensor, token: int, sizes: Sequence[int]) -> Tensor:
    places = (ids_T == token).nonzero().flatten().tolist()
    if len(places) == sum(sizes):
        return ids_T
    if len(places) == 1 and sizes:
        sizes = [sum(sizes)]
    if len(places) != len(sizes):
        return ids_T  # invalid: detected when segments are derived
    repeats_T = torch.ones_like(ids_T)
    repeats_T[places] = torch.tensor(sizes, dtype=ids_T.dtype)
    return ids_T.repeat_interleave(repeats_T)
