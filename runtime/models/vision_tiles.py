"""Parts of an encoder of images cut into tiles: attention beside padding, and what reads several outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from runtime.models.adapter import Context, Tiles
from runtime.models.attention import additive
from runtime.models.projector import ProjectorLayer

# Shape suffixes: N = images, B = tiles, C = channels, Y and X = rows and columns of pixels, P = tokens of a
# tile, T = packed tokens, H = heads, D = hidden width.


@dataclass(frozen=True, slots=True)
class TiledContext(Context):
    """What layers of a tiled encoder share.

    Args:
        ratios: which of the supported ratios each image has, from 1.
    """

    ratios: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TiledAttention:
    """Inside every image, patches see everything and padding sees patches alone.

    Source: transformers' `_prepare_aspect_ratio_attention_mask`, which hides padding from padding only.

    Args:
        masks: by image, [T, T] 0 where a token sees another and else -inf; images with as many tiles
            share one, and all layers do: booleans would be turned into numbers and kept by each.
    """

    masks: tuple[Tensor, ...]

    def attend(
        self, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """[H, T, D], as many heads of keys as of queries. Images of one mask run together."""
        assert window is None, "the tower has no windows"
        num = len(self.masks)
        q, k, v = (x.unflatten(1, (num, -1)).transpose(0, 1) for x in (q_HTD, k_GTD, v_GTD))
        outputs = [
            functional.scaled_dot_product_attention(
                q[first:last], k[first:last], v[first:last], attn_mask=self.masks[first], scale=scale
            )
            for first, last in self._alike()
        ]
        y_NHTD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return y_NHTD.transpose(1, 2).flatten(0, 1).transpose(0, 1)

    def _alike(self) -> list[tuple[int, int]]:
        """Runs [first, last) of images that share a mask."""
        starts = [i for i, mask in enumerate(self.masks) if i == 0 or mask is not self.masks[i - 1]]
        return list(zip(starts, [*starts[1:], len(self.masks)], strict=True))


def filled(tiles_BCYX: Tensor, num: int) -> Tensor:
    """With zeros for the tiles that the image does not fill."""
    return functional.pad(tiles_BCYX, (0, 0, 0, 0, 0, 0, 0, num - len(tiles_BCYX)))


class TapProjector(ProjectorLayer):
    """The last layer: output and tapped outputs become one vector a token. No token is dropped."""

    def __init__(self, kind: str | None, widths: tuple[int, int], std: float, num_taps: int) -> None:
        super().__init__(kind, widths, std)
        self.num_taps = num_taps

    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        del features, context
        assert hidden_TD is not None, "a projector is given its input"
        width = hidden_TD.shape[1] // (1 + self.num_taps)
        taps_TD = hidden_TD[:, width:].unflatten(1, (self.num_taps, width)).transpose(1, 2).flatten(1)
        y_TD: Tensor = self.projector(torch.cat([hidden_TD[:, :width], taps_TD], dim=1))
        return y_TD


def tiled_attention(tiles: Sequence[Tiles], device: torch.device, dtype: torch.dtype) -> TiledAttention:
    """Of a microbatch's images, all of one number of tokens."""
    masks = {each: _mask(each, device, dtype) for each in dict.fromkeys(tiles)}
    return TiledAttention(tuple(masks[each] for each in tiles))


def _mask(tiles: Tiles, device: torch.device, dtype: torch.dtype) -> Tensor:
    place_T = torch.arange(tiles.total, device=device)
    real_T = (place_T % tiles.tokens < tiles.seen) & (place_T < tiles.filled * tiles.tokens)
    return additive(real_T[:, None] | real_T, dtype)
