"""Qwen3-VL's vision tower: learned and rotary positions, features of several blocks (DeepStack)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3

from runtime.models.adapter import Context, CutKind, StageLayer
from runtime.models.patch_grid import blockwise
from runtime.models.vision_rotary import EmbedQwen, QwenBlock, QwenMerger, QwenVisionAdapter
from workbench.model.model_graph import Module

# Shape suffixes: T = packed patches, G = packed groups of patches that merge, D = width inside the blocks,
# E = width of merged features appended to D, M = output width of a merger, N = positions of one axis,
# P = neighbours.


def _neighbours(num: int, side: int) -> tuple[Tensor, Tensor]:
    """[N, 2] rows of a table of `side` around each of `num` evenly spaced positions, and their weights.

    In float32, as in transformers.
    """
    place_N = torch.arange(num, dtype=torch.float32) * (side - 1) / max(num - 1, 1)
    below_N = place_N.floor()
    row_NP = below_N[:, None] + torch.arange(2)
    weight_NP = (1 - (place_N[:, None] - row_NP).abs()).clamp(min=0)
    return row_NP.long().clamp(max=side - 1), weight_NP


class EmbedStacked(EmbedQwen):
    """Patches, each with a position interpolated from four of a square table."""

    def __init__(self, adapter: "Qwen3VisionAdapter", patches: nn.Module) -> None:
        super().__init__(adapter, patches)
        self.prefixes["pos_embed"] = "pos_embed"
        config = adapter.config
        self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self.side = int(config.num_position_embeddings**0.5)

    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        x_TD = super().forward(hidden_TD, features, context)
        grids = [tuple(length // self.patch for length in image.shape[-2:]) for image in context.data.raw]
        each = [self._between(*grid) for grid in grids]
        row_TP, weight_TP = (torch.cat(column).to(x_TD.device) for column in zip(*each, strict=True))
        positions_TD: Tensor = (self.pos_embed(row_TP) * weight_TP[..., None]).sum(1)
        return x_TD + positions_TD.to(x_TD.dtype)

    def _between(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """[T, 4] rows of the table and their weights, for every patch of an image in the encoder's order."""
        (down_NP, share_NP), (across_NP, part_NP) = (_neighbours(num, self.side) for num in (rows, columns))
        row = down_NP[:, None, :, None] * self.side + across_NP[None, :, None, :]
        weight = share_NP[:, None, :, None] * part_NP[None, :, None, :]
        return blockwise(row.flatten(2), self.merge), blockwise(weight.flatten(2), self.merge)


class StackedBlock(QwenBlock):
    """A block whose state carries the outputs of earlier mergers, and of its own, as extra width.

    Args:
        merger: its own, if any.
        number: of the merger.
    """

    def __init__(
        self,
        block: nn.Module,
        index: int,
        adapter: "Qwen3VisionAdapter",
        merger: nn.Module | None,
        number: int,
    ) -> None:
        super().__init__(block, index, adapter.std, windowed=False)
        self.width, self.deepstack = adapter.width, merger
        self.prefixes["deepstack"] = f"{adapter.mergers}.{number}"
        self.cuts = adapter.merger_cuts("deepstack")

    def run(self, x_TD: Tensor, context: Any) -> Tensor:
        own_TD, beside_TE = x_TD[:, : self.width], x_TD[:, self.width :]
        y_TD = super().run(own_TD, context)
        if self.deepstack is None:
            return torch.cat((y_TD, beside_TE), dim=1)
        merged_GM: Tensor = self.deepstack(y_TD)
        return torch.cat((y_TD, beside_TE, merged_GM.reshape(len(y_TD), -1)), dim=1)


class StackedMerger(QwenMerger):
    """The last layer: the tower's merged output, followed by the features of the earlier mergers."""

    def __init__(self, merger: nn.Module, adapter: "Qwen3VisionAdapter") -> None:
        super().__init__(merger, adapter.std)
        self.width, self.num_beside = adapter.width, len(adapter.merged)
        self.cuts = adapter.merger_cuts("merger")

    def run(self, x_TD: Tensor, context: Any) -> Tensor:
        own_GM = super().run(x_TD[:, : self.width], context)
        beside = x_TD[:, self.width :].chunk(self.num_beside, dim=1) if self.num_beside else ()
        return torch.cat((own_GM, *(features.reshape(own_GM.shape) for features in beside)), dim=1)


class Qwen3VisionAdapter(QwenVisionAdapter):
    """Qwen3-VL's vision tower."""

    config_class: type[PretrainedConfig] = qwen3.Qwen3VLVisionConfig
    rotary_class: type[nn.Module] = qwen3.Qwen3VLVisionRotaryEmbedding
    patches_class: type[nn.Module] = qwen3.Qwen3VLVisionPatchEmbed
    layer_class: type[nn.Module] = qwen3.Qwen3VLVisionBlock
    merger_class: type[nn.Module] = qwen3.Qwen3VLVisionPatchMerger
    mergers: str = "deepstack_merger_list"  # the list of those inside the tower
    merger_matmuls: tuple[str, str] = ("linear_fc1", "linear_fc2")

    def configured(self, fields: dict[str, Any]) -> PretrainedConfig:
        """With the width of the language model behind it."""
        return super().configured({**fields, "out_hidden_size": self.module.layers[-1].feature_width})

    def __init__(self, module: Module) -> None:
        super().__init__(module)
        self.merged: list[int] = list(getattr(self.config, "deepstack_visual_indexes", ()))

    @property
    def width(self) -> int:
        return int(self.config.hidden_size)

    def features(self, model: PreTrainedModel, item: Tensor) -> Tensor:
        output = self.seen(model, item)
        return torch.cat((output.pooler_output, *getattr(output, "deepstack_features", ())), dim=1)

    def first(self) -> StageLayer:
        return EmbedStacked(self, self.patches_class(self.config))

    def block(self, index: int) -> StageLayer:
        is_merged = index in self.merged
        merger = self._merger(behind=True) if is_merged else None
        number = self.merged.index(index) if is_merged else 0
        return StackedBlock(self.layer_class(self.config), index, self, merger, number)

    def last(self) -> StageLayer:
        return StackedMerger(self._merger(behind=False), self)

    def merger_cuts(self, name: str) -> tuple[tuple[str, CutKind], ...]:
        """How tensor parallelism cuts the merger that a layer calls so: by columns, then by rows."""
        entering, leaving = self.merger_matmuls
        return ((f"{name}.{entering}", CutKind.COLUMN), (f"{name}.{leaving}", CutKind.ROW))

    def _merger(self, *, behind: bool) -> nn.Module:
        """A merger; `behind`: of a block, with its norm after patches are concatenated."""
        merger_class: Callable[..., nn.Module] = self.merger_class
        return merger_class(self.config, use_postshuffle_norm=behind)


class Qwen35VisionAdapter(Qwen3VisionAdapter):
    """Qwen3.5's: Qwen3-VL's without features of blocks inside it."""

    config_class = qwen3_5.Qwen3_5VisionConfig
    rotary_class = qwen3_5.Qwen3_5VisionRotaryEmbedding
    patches_class, layer_class = qwen3_5.Qwen3_5VisionPatchEmbed, qwen3_5.Qwen3_5VisionBlock
    merger_class = qwen3_5.Qwen3_5VisionPatchMerger
