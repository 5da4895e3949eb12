"""Vision encoders: SigLIP and CLIP."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.clip.modeling_clip import CLIPEncoderLayer, CLIPVisionConfig, CLIPVisionEmbeddings
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.idefics3.modeling_idefics3 import Idefics3EncoderLayer, Idefics3VisionEmbeddings
from transformers.models.siglip.modeling_siglip import (
    SiglipEncoderLayer,
    SiglipVisionConfig,
    SiglipVisionEmbeddings,
)

from runtime.models.adapter import StageLayer
from runtime.models.encoder import EmbedItems, EncoderAdapter, EncoderBlock, ItemSize, grid_or_none
from runtime.models.initialise import Fill, normal
from runtime.models.projector import ClassTokens
from workbench.data.sample import Segment
from workbench.float_sum import float_sum

# Shape suffixes: N = images, C = channels, H = height, W = width, T = packed tokens, D = hidden width.


IMAGE_DIMS = 3


def grid_of(num_patches: int) -> tuple[int, int]:
    """(rows, columns) of an image of that many patches: the most square grid, wider than high."""
    rows = next(r for r in range(math.isqrt(num_patches), 0, -1) if num_patches % r == 0)
    return rows, num_patches // rows


class EmbedImages(EmbedItems):
    """Patches, positions and any class token, by transformers' own embeddings.

    Images of other sizes than the configured one get interpolated positions, if the embeddings support it.
    """

    def __init__(self, embeddings: Any, std: float, pre_norm: nn.Module | None = None) -> None:
        super().__init__({"embeddings": "embeddings", "pre_norm": "pre_layrnorm"}, std)
        self.embeddings, self.pre_norm = embeddings, pre_norm
        embeddings.mask_token = None  # only for masked patches in pre-training
        if hasattr(embeddings, "position_ids"):
            with torch.device("cpu"):  # the only buffer; on the meta device it would have no values
                embeddings.position_ids = torch.arange(embeddings.position_ids.numel()).expand((1, -1))

    def pieces(self, item: Tensor) -> tuple[Tensor, ...]:
        """An image, or each of its tiles."""
        return (item,) if item.dim() == IMAGE_DIMS else tuple(item)

    def embed(self, pixels_NCHW: Tensor) -> Tensor:
        x_NTD: Tensor = self.embeddings(pixels_NCHW)
        return x_NTD


class EmbedPatches(EmbedImages):
    """Embeddings of SigLIP, and of CLIP with its first norm."""

    def embed(self, pixels_NCHW: Tensor) -> Tensor:
        resized = pixels_NCHW.shape[2:] != (self.embeddings.image_size,) * 2
        x_NTD: Tensor = self.embeddings(pixels_NCHW, interpolate_pos_encoding=resized)
        return x_NTD if self.pre_norm is None else self.pre_norm(x_NTD)


class EmbedByPlace(EmbedImages):
    """Embeddings of Idefics3, for images without padding."""

    def embed(self, pixels_NCHW: Tensor) -> Tensor:
        patch = self.embeddings.patch_size
        num, _, height, width = pixels_NCHW.shape
        whole_NRC = pixels_NCHW.new_ones((num, height // patch, width // patch), dtype=torch.bool)
        x_NTD: Tensor = self.embeddings(pixels_NCHW, whole_NRC)
        return x_NTD


class XavierBlock(EncoderBlock):
    """A SigLIP layer, with Xavier initialisation as in transformers."""

    def fill(self, name: str) -> Fill:
        if isinstance(self.get_submodule(name.rpartition(".")[0]), nn.Linear) and name.endswith("weight"):
            return normal(math.sqrt(2.0 / float_sum(self.get_parameter(name).shape)))
        return super().fill(name)


def square_px(side: int | Sequence[int]) -> int:
    """Side of a square image, from 224 or (224, 224)."""
    return side if isinstance(side, int) else int(side[0])


class VisionAdapter(EncoderAdapter):
    """What vision transformers of one configured image size share: sizes of images, list of layers."""

    item_dims = IMAGE_DIMS
    prefixes: tuple[str, ...] = ("", "vision_model.", "vision_tower.", "vision_tower.vision_model.")

    @property
    def num_class_tokens(self) -> int:
        return self.class_tokens.num

    @property
    def patch_px(self) -> int:
        return square_px(self.config.patch_size)

    @property
    def channels(self) -> int:
        """Numbers of a pixel."""
        return int(self.config.num_channels)

    @property
    def side(self) -> int:
        """Number of patches along a side of an image of the configured size."""
        return square_px(self.config.image_size) // self.patch_px

    def raw_shape(self, segment: Segment) -> tuple[int, ...]:
        if segment.num_tiles > 1:
            native = self.native_tokens[0]
            if segment.tile_tokens != native:
                raise ValueError(
                    f"segment {segment.modality}[{segment.k}]: want tiles of {native} tokens, got "
                    f"{segment.tile_tokens}"
                )
            sides = (self.side * self.patch_px,) * 2
            return (segment.num_tiles, self.channels, *sides)
        patches = segment.tokens_in - self.num_class_tokens
        if patches < 1:
            raise ValueError(
                f"segment {segment.modality}[{segment.k}]: no patches left besides the class token"
            )
        rows, columns = self.grid_of(patches, segment.grid)
        if rows * columns != patches:
            raise ValueError(
                f"segment {segment.modality}[{segment.k}]: {patches} patches are not {rows} rows of {columns}"
            )
        if self.takes_one_size and (rows, columns) != (self.side, self.side):
            raise ValueError(
                f"segment {segment.modality}[{segment.k}]: module {self.module.name!r} has positions of "
                f"{self.side} x {self.side} patches, got {rows} x {columns}"
            )
        return (self.channels, rows * self.patch_px, columns * self.patch_px)

    def grid_of(self, tokens: int, named: tuple[int, int] | None) -> tuple[int, int]:
        """The grid in the plan; else that of the configured size, or the most square one."""
        if named is not None or tokens == self.side**2:
            return named or (self.side, self.side)
        rows, columns = grid_of(tokens // self.merged_side**2)
        return self.merged_side * rows, self.merged_side * columns

    @property
    def takes_one_size(self) -> bool:
        """Whether images must have the configured size, as there are no positions for others."""
        return False

    @property
    def native_tokens(self) -> tuple[int, int]:
        """(tokens in, tokens out) of an image of the configured size."""
        return self.side**2 + self.num_class_tokens, self.side**2

    def item_size(self, shape: tuple[int, ...]) -> ItemSize:
        rows, columns = shape[1] // self.patch_px, shape[2] // self.patch_px
        patches = rows * columns
        return ItemSize(patches + self.num_class_tokens, patches, grid_or_none(rows, columns))

    def features(self, model: PreTrainedModel, item: Tensor) -> Tensor:
        call: Callable[..., Any] = model
        resized: dict[str, bool] = {}
        if "interpolate_pos_encoding" in inspect.signature(model.forward).parameters:
            side = square_px(self.config.image_size)
            resized["interpolate_pos_encoding"] = item.shape[1:] != (side, side)
        seen_TD: Tensor = call(item[None], **resized).last_hidden_state[0]
        return self.class_tokens.without(seen_TD)


class SiglipAdapter(VisionAdapter):
    """SigLIP's vision tower; features are its final norm's output. The pooling head is not built."""

    config_class = SiglipVisionConfig
    ignored: tuple[str, ...] = ("head.", "text_model.", "logit_scale", "logit_bias")

    @property
    def std(self) -> float:
        """Standard deviation of initial matrices outside blocks."""
        return float(self.config.hidden_size**-0.5)

    def first(self) -> StageLayer:
        return EmbedPatches(SiglipVisionEmbeddings(self.config), self.std)

    def block(self, index: int) -> StageLayer:
        return XavierBlock(SiglipEncoderLayer(self.config), index, self.std)

    def last(self) -> StageLayer:
        norm = nn.LayerNorm(self.config.hidden_size, eps=self.config.layer_norm_eps)
        return self.projected(norm, "post_layernorm")


class Idefics3Adapter(SiglipAdapter):
    """SigLIP's tower with positions by relative coordinates: patches of small images are far apart.

    SmolVLM's tower is the same.
    """

    config_class = Idefics3VisionConfig
    prefixes = ("", "vision_model.", "model.vision_model.")

    def first(self) -> StageLayer:
        return EmbedByPlace(Idefics3VisionEmbeddings(self.config), self.std)

    def block(self, index: int) -> StageLayer:
        return XavierBlock(Idefics3EncoderLayer(self.config), index, self.std)


class ClipAdapter(VisionAdapter):
    """CLIP's vision tower as LLaVA uses it: patch features of the last block that the plan has.

    The class token is dropped before the projector and the pooled output's norm is not used.
    LLaVA reads the second-last block; a configuration with one block fewer is equivalent, without an
    unused last block.
    """

    config_class = CLIPVisionConfig
    class_tokens = ClassTokens(before=1)
    ignored = ("post_layernorm.", "text_model.", "visual_projection.", "text_projection.", "logit_scale")

    @property
    def std(self) -> float:
        """Standard deviation of initial matrices after the embeddings."""
        return float(self.config.hidden_size**-0.5 * self.config.initializer_factor)

    def first(self) -> StageLayer:
        norm = nn.LayerNorm(self.config.hidden_size, eps=self.config.layer_norm_eps)
        return EmbedPatches(CLIPVisionEmbeddings(self.config), self.config.initializer_range, norm)

    def block(self, index: int) -> StageLayer:
        std = self.std * (2 * len(self.module.layers)) ** -0.5
        return EncoderBlock(CLIPEncoderLayer(self.config), index, std)

    def last(self) -> StageLayer:
        return self.projected()
