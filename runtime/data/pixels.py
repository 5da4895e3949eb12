"""Pixels as an encoder was trained on them."""

import torch
from torch import Tensor

from workbench.data.sample import Segment
from workbench.model.item_tokens import source_config
from workbench.model.model_graph import Module
from workbench.model.pixel_scale import pixel_scale

_IMAGE_DIMS = 3  # channels, height, width


def scaled(pixels: Tensor, segment: Segment, module: Module) -> Tensor:
    """Scale a source's pixels in [-1, 1] as the module's configuration says; without it they stay.

    Args:
        pixels: [C, H, W], of tiles [tiles, C, H, W], or of a step of a video [C, frames, H, W].
        segment: of the pixels.
        module: their encoder.

    Raises:
        ValueError: a configuration with other numbers of channels than the pixels.
    """
    scale = pixel_scale(source_config(module))
    if scale is None:
        return pixels
    channel_dim = 0 if segment.frame is not None else pixels.ndim - _IMAGE_DIMS
    num_channels = pixels.shape[channel_dim]
    if len(scale.mean) not in (1, num_channels):
        raise ValueError(
            f"module {module.name!r}: image_mean has {len(scale.mean)} channels, its images {num_channels}"
        )
    shape = [-1 if dim == channel_dim else 1 for dim in range(pixels.ndim)]
    mean, std = (torch.tensor(each, dtype=pixels.dtype).view(shape) for each in scale)
    return ((pixels + 1) / 2 - mean) / std
