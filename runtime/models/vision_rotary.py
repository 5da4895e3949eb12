"""Vision encoders for images of any size, with rotary positions: Pixtral's and Qwen's."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig
from transformers.models.pixtral import modeling_pixtral as pixtral
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2

from runtime.models.adapter import (
    ONE_ROTATION,
    Context,
    CutKind,
    CutRules,
    InnerLayer,
    MicrobatchData,
    StageLayer,
)
from runtime.models.attention import Attends, Packing, pack
from runtime.models.encoder import (
    GRIDS,
    PIXELS,
    SIZES,
    EmbedItems,
    EncoderAdapter,
    ItemSize,
    RotaryBlock,
    grid_or_none,
)
from runtime.models.norm import WideRMSNorm, widen_norms
from runtime.models.patch_attention import PatchBlock
from runtime.models.patch_grid import STEP_DIMS, blockwise, patches_of
from runtime.models.projector import StepsMerger, steps_or_none
from runtime.models.vision import grid_of
from workbench.data.sample import Segment
from workbench.model.model_graph import Module

# Shape suffixes: T = packed tokens, G = packed groups of tokens that merge, D = width,
# C = channels, Y and X = rows and columns of pixels.


@dataclass(frozen=True, slots=True)
class GridContext(Context):
    """Context that the layers of an encoder with windows share.

    Args:
        windows: packing of windows, in the order of tokens within the encoder.
        order: [G] original index of each group of merging tokens, in the order by windows.
    """

    windows: Packing | None = None
    order: Tensor | None = None


def window_order(rows: int, columns: int, side: int) -> tuple[Tensor, list[int]]:
    """Indices of a grid's cells by window, and the number of cells per window; fewer at the edges."""
    place_YX = torch.arange(rows * columns).unflatten(0, (rows, columns))
    windows = [
        place_YX[top : top + side, left : left + side].flatten()
        for top in range(0, rows, side)
        for left in range(0, columns, side)
    ]
    return torch.cat(windows), [len(window) for window in windows]


class EmbedPixtral(EmbedItems):
    """Patches and a norm."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__({"patch_conv": "patch_conv", "ln_pre": "ln_pre"}, config.initializer_range)
        patch = config.patch_size
        self.patch_conv = nn.Conv2d(config.num_channels, config.hidden_size, patch, patch, bias=False)
        self.ln_pre = WideRMSNorm(config.hidden_size, 1e-5)

    def embed(self, pixels_NCHW: Tensor) -> Tensor:
        x_NTD: Tensor = self.ln_pre(self.patch_conv(pixels_NCHW).flatten(2).transpose(1, 2))
        return x_NTD


class PixtralBlock(RotaryBlock):
    """One encoder layer under rotary positions."""

    blocks = "transformer.layers"


class EmbedQwen(StageLayer):
    """Patches of images or steps of videos in order, by window."""

    def __init__(self, adapter: "QwenVisionAdapter", patches: nn.Module) -> None:
        super().__init__({"patch_embed": "patch_embed"}, adapter.std)
        self.patch_embed = patches
        config = adapter.config
        self.patch, self.merge = config.patch_size, config.spatial_merge_size
        self.frames = config.temporal_patch_size

    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        del hidden_TD, features
        assert isinstance(context, GridContext), "made by a grid's adapter"
        cut = [patches_of(image, self.patch, self.merge, self.frames) for image in context.data.raw]
        x_TD: Tensor = self.patch_embed(torch.cat(cut))
        return _in_groups(x_TD, context.order, self.merge**2)


def _in_groups(x_TD: Tensor, order_G: Tensor | None, size: int) -> Tensor:
    """Reorder groups of `size` tokens; None keeps the order."""
    if order_G is None:
        return x_TD
    return x_TD.unflatten(0, (-1, size)).index_select(0, order_G).flatten(0, 1)


class QwenBlock(PatchBlock):
    """One encoder layer on all patches of an image, or on those of a window."""

    blocks = "blocks"
    cuts = tuple((f"block.attn.{name}", CutKind.COLUMN) for name in "qkv")  # unless they are fused

    def __init__(self, block: nn.Module, index: int, std: float, *, windowed: bool) -> None:
        super().__init__(block, index, std)
        self.windowed = windowed

    def packing(self, context: GridContext) -> Packing | Attends:
        packing = context.windows if self.windowed else context.packing
        assert packing is not None, "windows are given where a block has some"
        return packing


class QwenMerger(InnerLayer):
    """The last layer: norm, concatenated neighbours, two matmuls; restores the order of groups."""

    cuts: CutRules = (("merger.mlp.0", CutKind.COLUMN), ("merger.mlp.2", CutKind.ROW))

    def __init__(self, merger: nn.Module, std: float) -> None:
        super().__init__({"merger": "merger"}, std)
        self.merger = merger

    def run(self, x_TD: Tensor, context: GridContext) -> Tensor:
        y_GD: Tensor = self.merger(x_TD)
        return y_GD if context.order is None else y_GD.index_select(0, context.order.argsort())


class GridAdapter(EncoderAdapter):
    """What encoders for images of any size share.

    An image of N tokens has the grid in its segment, or else the most square one.
    """

    item_dims = 3
    undivided = "encoders with rotary positions do not share tokens over ranks"
    rotary_class: type[nn.Module]
    rotary_name = "rotary_pos_emb"
    _rotary: nn.Module

    def __init__(self, module: Module) -> None:
        super().__init__(module)
        self._rotary = self.rotary_class(self.config)

    @property
    def merge(self) -> int:
        """Side of the squares of tokens that merge."""
        return 1

    def grid(self, tokens: int, given: tuple[int, int] | None = None) -> tuple[int, int]:
        """(rows, columns) of patches; ValueError where they do not merge evenly or have another number."""
        side = self.merge
        if given is not None:
            if given[0] * given[1] != tokens or given[0] % side or given[1] % side:
                raise ValueError(
                    f"module {self.module.name!r}: an image of {tokens} patches, {side} x {side} of which "
                    f"become one, cannot have {given[0]} rows of {given[1]}"
                )
            return given
        if tokens < 1 or tokens % side**2:
            raise ValueError(
                f"module {self.module.name!r}: {side} x {side} patches become one, so an image must have "
                f"a multiple of {side**2}, got {tokens}"
            )
        aligned = side * self.merged_side
        if tokens % aligned**2:
            raise ValueError(
                f"module {self.module.name!r}: its projector merges {self.merged_side} x {self.merged_side} "
                f"patches, so an image must have a multiple of {aligned**2}, got {tokens}"
            )
        rows, columns = grid_of(tokens // aligned**2)
        return aligned * rows, aligned * columns

    def grid_of(self, tokens: int, named: tuple[int, int] | None) -> tuple[int, int] | None:
        return self.grid(tokens, named)

    def sides(self, segment: Segment) -> tuple[int, int]:
        rows, columns = self.grid(segment.tokens_in, segment.grid)
        side = self.merge * self.merged_side
        return rows // side, columns // side

    def raw_shape(self, segment: Segment) -> tuple[int, ...]:
        rows, columns = self.grid(segment.tokens_in, segment.grid)
        patch = self.config.patch_size
        return (self._channels, rows * patch, columns * patch)

    def item_size(self, shape: tuple[int, ...]) -> ItemSize:
        patch, side = self.config.patch_size, self.merge
        rows, columns = (length // patch // side * side for length in shape[-2:])
        return ItemSize(rows * columns, rows * columns // side**2, grid_or_none(rows, columns))

    @property
    @abstractmethod
    def _channels(self) -> int:
        """Number of channels of a pixel."""

    def context(self, data: MicrobatchData, device: torch.device, dtype: torch.dtype) -> Context:
        plain = super().context(data, device, dtype)
        named = data.grids or (None,) * len(data.items)
        grids = [self.grid(*each) for each in zip(data.tokens_in, named, strict=True)]
        place_T2 = torch.cat([self._places(*grid) for grid in grids])
        return self._context(plain, place_T2, grids, torch.empty(0, dtype=dtype, device=device))

    def _places(self, rows: int, columns: int) -> Tensor:
        """[T, 2] (row, column) of every token of an image, in the encoder's order."""
        grid = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        return blockwise(torch.stack(grid, dim=-1), self.merge)

    def _context(
        self, plain: Context, place_T2: Tensor, grids: list[tuple[int, int]], like: Tensor
    ) -> GridContext:
        """The context; angles have the device and type of `like`."""
        del grids
        rotary = {ONE_ROTATION: self._rotary(like, place_T2.to(like.device))}
        return GridContext(plain.data, plain.packing, rotary)


class PixtralAdapter(GridAdapter):
    """Pixtral's vision tower: features are the last block's output."""

    config_class = pixtral.PixtralVisionConfig
    rotary_class = pixtral.PixtralVisionRotaryEmbedding
    rotary_name = "patch_positional_embedding"
    items_key, beside_key = PIXELS, SIZES
    prefixes = ("", "vision_tower.", "model.vision_tower.", "vision_encoder.")

    @property
    def _channels(self) -> int:
        return int(self.config.num_channels)

    def first(self) -> StageLayer:
        return EmbedPixtral(self.config)

    def block(self, index: int) -> StageLayer:
        block = PixtralBlock(pixtral.PixtralAttentionLayer(self.config), index, self.config.initializer_range)
        widen_norms(block, pixtral.PixtralRMSNorm)
        return block

    def last(self) -> StageLayer:
        return self.projected()


class QwenVisionAdapter(GridAdapter):
    """Qwen's vision towers, which end with their own merger. Steps of a video do not see each other."""

    items_key, beside_key = PIXELS, GRIDS
    patches_class: type[nn.Module]
    merger_class: type[nn.Module]
    prefixes = ("", "visual.", "model.visual.")

    @property
    def merged_side(self) -> int:
        """Squares lie side by side already."""
        return 1

    @property
    def num_blocks(self) -> int:
        return int(self.config.depth)

    @property
    def merge(self) -> int:
        return int(self.config.spatial_merge_size)

    @property
    def _channels(self) -> int:
        return int(self.config.in_channels)

    def raw_shape(self, segment: Segment) -> tuple[int, ...]:
        """[C, Y, X]; [C, F, Y, X] for a step of a video."""
        channels, *sides = super().raw_shape(segment)
        frames = () if segment.frame is None else (int(self.config.temporal_patch_size),)
        return (channels, *frames, *sides)

    def item_size(self, shape: tuple[int, ...]) -> ItemSize:
        size = super().item_size(shape)
        return size._replace(frame=(0, 0)) if len(shape) == STEP_DIMS else size

    def features(self, model: PreTrainedModel, item: Tensor) -> Tensor:
        merged_TD: Tensor = self.seen(model, item).pooler_output
        return merged_TD

    def seen(self, model: PreTrainedModel, item: Tensor) -> Any:
        """Output of the user's own model for one image or step of a video."""
        call: Callable[..., Any] = model
        config = self.config
        rows, columns = (length // config.patch_size for length in item.shape[-2:])
        cut_PD = patches_of(item, config.patch_size, self.merge, config.temporal_patch_size)
        return call(cut_PD, torch.tensor([[1, rows, columns]]))

    def context(self, data: MicrobatchData, device: torch.device, dtype: torch.dtype) -> Context:
        """As of any grid; ValueError for tokens that its merger does not make: a reader would take others."""
        for item, tokens_in, tokens_out in zip(data.items, data.tokens_in, data.tokens_out, strict=True):
            if tokens_in != tokens_out * self.merge**2:
                raise ValueError(
                    f"item {tuple(item)}: its projector makes {tokens_in // self.merge**2} tokens of "
                    f"{tokens_in}, the plan says {tokens_out}"
                )
        return super().context(data, device, dtype)

    @property
    @abstractmethod
    def width(self) -> int:
        """Width within the blocks."""

    def first(self) -> StageLayer:
        config = self.config
        patches: Callable[..., nn.Module] = self.patches_class
        return EmbedQwen(
            self,
            patches(
                patch_size=config.patch_size,
                temporal_patch_size=config.temporal_patch_size,
                in_channels=config.in_channels,
                embed_dim=self.width,
            ),
        )

    def last(self) -> StageLayer:
        merger: Callable[..., nn.Module] = self.merger_class
        return QwenMerger(merger(self.module.layers[-1].out_width, self.width, self.merge), self.std)


class Qwen2VisionAdapter(QwenVisionAdapter):
    """Qwen2-VL's: every block sees its whole image."""

    config_class = qwen2.Qwen2VLVisionConfig
    rotary_class = qwen2.Qwen2VLVisionRotaryEmbedding
    patches_class, merger_class = qwen2.PatchEmbed, qwen2.PatchMerger

    @property
    def width(self) -> int:
        return int(self.config.embed_dim)

    def block(self, index: int) -> StageLayer:
        return QwenBlock(qwen2.Qwen2VLVisionBlock(self.config), index, self.std, windowed=False)


class Qwen25VisionAdapter(QwenVisionAdapter):
    """Qwen2.5-VL's: blocks see windows, but for the listed ones, which see their whole image."""

    config_class = qwen2_5.Qwen2_5_VLVisionConfig
    rotary_class = qwen2_5.Qwen2_5_VLVisionRotaryEmbedding
    patches_class, merger_class = qwen2_5.Qwen2_5_VisionPatchEmbed, qwen2_5.Qwen2_5_VLPatchMerger
    layer_class: type[nn.Module] = qwen2_5.Qwen2_5_VLVisionBlock
    norm_class: type[nn.Module] = qwen2_5.Qwen2_5_VLRMSNorm

    @property
    def width(self) -> int:
        return int(self.config.hidden_size)

    def block(self, index: int) -> StageLayer:
        windowed = index not in self.config.fullatt_block_indexes
        block = QwenBlock(self.layer_class(self.config), index, self.std, windowed=windowed)
        widen_norms(block, self.norm_class)
        return block

    def last(self) -> StageLayer:
        merger, steps = super().last(), steps_or_none(self.projector)
        if steps is not None:
            norm: Any = self.norm_class(self.width)
            merger = StepsMerger(steps, self.widths, self.std, lambda *_: None, norm, "merger.ln_q")
        widen_norms(merger, self.norm_class)
        return merger

    def _context(
        self, plain: Context, place_T2: Tensor, grids: list[tuple[int, int]], like: Tensor
    ) -> GridContext:
        merge, orders, lengths, start = self.merge, [], [], 0
        side = self.config.window_size // merge // self.config.patch_size
        for rows, columns in grids:
            order, sizes = window_order(rows // merge, columns // merge, side)
            orders.append(order + start)
            lengths += [size * merge**2 for size in sizes]
            start += len(order)
        order_G = torch.cat(orders)
        in_windows = super()._context(plain, _in_groups(place_T2, order_G, merge**2), grids, like)
        return replace(in_windows, windows=pack(lengths, like.device), order=order_G.to(like.device))
