"""Kimi K2.5's vision tower: learned positions, interpolated, and rotary ones; attention over whole images."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.kimi_k25 import modeling_kimi_k25 as kimi

from runtime.models.adapter import Context, StageLayer
from runtime.models.encoder import PIXELS
from runtime.models.initialise import Fill, normal
from runtime.models.patch_attention import PatchBlock
from runtime.models.patch_grid import patches_of
from runtime.models.vision_glm import cubic_shares
from runtime.models.vision_rotary import GridAdapter

# Shape suffixes: T = packed patches, H = heads, D = width, N = positions of one axis of an image, S = side of
# the table of positions, C = channels, Y and X = rows and columns of patches, P = pixels of a patch's side.

_STD = 0.02  # transformers has no key for it
_POSITIONS = "patch_embed.pos_emb.position_embeddings"


def table_rows(num: int, side: int) -> Tensor:
    """[N] rows of a table at `num` evenly spaced positions, in float32 as in transformers."""
    return (torch.arange(num, dtype=torch.float32) + 0.5) * side / num - 0.5


class EmbedKimi(StageLayer):
    """Patches row by row, and positions interpolated from a square table."""

    def __init__(self, adapter: "KimiVisionAdapter") -> None:
        super().__init__({"proj": "patch_embed.proj", "position_embeddings": _POSITIONS}, adapter.std)
        config = adapter.config
        self.patch, self.side = config.patch_size, config.pos_emb_height
        self.proj = nn.Conv2d(3, config.hidden_size, kernel_size=self.patch, stride=self.patch)
        self.position_embeddings = nn.Parameter(torch.empty(self.side, self.side, config.hidden_size))

    def fill(self, name: str) -> Fill:
        return normal(1.0) if name == "position_embeddings" else super().fill(name)

    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        del hidden_TD, features
        images = context.data.raw
        x_TD: Tensor = self.proj(torch.cat([cut(image, self.patch) for image in images])).flatten(1)
        grids = [tuple(length // self.patch for length in image.shape[-2:]) for image in images]
        positions_TD = torch.cat([self._positions(*grid) for grid in grids])
        return x_TD + positions_TD.to(x_TD.dtype)

    def _positions(self, rows: int, columns: int) -> Tensor:
        """[T, D] positions of an image's patches, in float32 or wider; complexity as of `EmbedGlm`."""
        table_SSD, wide = self.position_embeddings, torch.promote_types(self.proj.weight.dtype, torch.float32)
        down_YS, across_XS = (
            cubic_shares(table_rows(num, self.side).to(wide), self.side).to(table_SSD.device)
            for num in (rows, columns)
        )
        between_YSD = torch.einsum("ys,std->ytd", down_YS, table_SSD.to(wide))
        return torch.einsum("xt,ytd->yxd", across_XS, between_YSD).flatten(0, 1)


def cut(image_CYX: Tensor, patch: int) -> Tensor:
    """[T, C, P, P] patches of an image, row by row."""
    return patches_of(image_CYX, patch, 1, 1).unflatten(1, (-1, patch, patch))


class KimiBlock(PatchBlock):
    """One encoder layer on all patches of an image."""

    blocks = "layers"


class KimiVisionAdapter(GridAdapter):
    """The tower of Kimi K2.5; features are its final norm's output, patch by patch."""

    config_class = kimi.Kimi_K25VisionConfig
    rotary_class = kimi.Kimi_K25VisionRotaryEmbedding
    rotary_name = "rotary_emb"
    items_key = PIXELS
    prefixes = ("", "vision_tower.", "model.vision_tower.")

    @property
    def std(self) -> float:
        return _STD

    @property
    def _channels(self) -> int:
        return 3

    def first(self) -> StageLayer:
        return EmbedKimi(self)

    def block(self, index: int) -> StageLayer:
        return KimiBlock(kimi.Kimi_K25VisionEncoderLayer(self.config), index, self.std)

    def last(self) -> StageLayer:
        return self.projected(nn.LayerNorm(self.config.hidden_size, eps=1e-5), "final_layernorm")

    def features(self, model: PreTrainedModel, item: Tensor) -> Tensor:
        call: Callable[..., Any] = model
        patch = self.config.patch_size
        grid = [1, *(length // patch for length in item.shape[-2:])]
        states_TD: Tensor = call(cut(item, patch), torch.tensor([grid])).last_hidden_state
        return states_TD
