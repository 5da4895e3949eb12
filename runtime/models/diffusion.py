"""A diffusion transformer after the LLM: our own module, of transformers' plain blocks.

transformers has no image generator of this kind, and `diffusers` is not required. An adapter of a
diffusers model would need the same four kinds of layers: one that maps the LLM's states to its prompt, one
that embeds latents and time, one per block with a single tensor between them (a UNet has skip connections,
and its prompt enters every block, so it fits only one stage), and the loss.

Sources: Peebles and Xie 2023, "Scalable Diffusion Models with Transformers", section 3.2 (patches,
time and condition in one sequence); Ho et al. 2020, "Denoising Diffusion Probabilistic Models",
sections 2 and 4 (noise schedule), algorithm 1 (the loss).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.configuration_utils import PretrainedConfig
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer, SiglipVisionConfig

from runtime.models.adapter import Adapter, Context, InnerLayer, MicrobatchData, StageLayer
from runtime.models.encoder import EncoderBlock
from runtime.models.initialise import generator_of
from runtime.models.patch_grid import blockwise
from runtime.models.projector import PROJECTORS
from runtime.models.vision import grid_of
from workbench.data.sample import Item, Segment
from workbench.model.families.dit import TIME_TOKENS
from workbench.model.layer import Matmul

# Shape suffixes: E = packed condition tokens, P = patches of one item, T = packed tokens, D = width,
# F = elements of a patch, C = channels, Y and X = rows and columns of a latent.

NUM_TIMES = 1000
FIRST_BETA, LAST_BETA = 1e-4, 0.02
STD = 0.02


@cache
def kept_share() -> Tensor:
    """[times] remaining share of a latent's variance at each time, in float64: product of 1 - beta."""
    betas = torch.linspace(FIRST_BETA, LAST_BETA, NUM_TIMES, dtype=torch.float64)
    return (1 - betas).cumprod(0)


def time_of(item: Item) -> int:
    """Time of the item's noisy copy in a step: depends only on the item, so not on grouping."""
    generator = generator_of("time", *item)
    return int(torch.randint(NUM_TIMES, (), generator=generator))


def noise_of(item: Item, shape: Sequence[int]) -> Tensor:
    """Noise for the item's latent, from N(0, 1), in float32."""
    generator = generator_of("noise", *item)
    return torch.empty(*shape, dtype=torch.float32).normal_(generator=generator)


def waves(position: Tensor, width: int) -> Tensor:
    """[..., width] sines and cosines of descending frequency, float64; an odd last entry is 0."""
    half = width // 2
    falling = torch.exp(-math.log(10_000.0) * torch.arange(half, dtype=torch.float64) / max(half, 1))
    angle = position.to(torch.float64)[..., None] * falling
    return functional.pad(torch.cat((angle.sin(), angle.cos()), dim=-1), (0, width - 2 * half))


@dataclass(frozen=True, slots=True)
class Latents:
    """Sizes of the items of a microbatch.

    Args:
        channels, patch: of a latent.
        grids: per item, (rows, columns) of its patches.
        conditions: per item, the number of its condition tokens.
    """

    channels: int
    patch: int
    grids: tuple[tuple[int, int], ...]
    conditions: tuple[int, ...]

    def shape(self, index: int) -> tuple[int, int, int]:
        """[C, Y, X] of an item's latent."""
        rows, columns = self.grids[index]
        return self.channels, rows * self.patch, columns * self.patch

    def in_patches(self, latent_CYX: Tensor) -> Tensor:
        """[P, F] patches, row by row."""
        patch = self.patch
        grid = latent_CYX.unfold(1, patch, patch).unfold(2, patch, patch)
        return blockwise(grid.permute(1, 2, 0, 3, 4), 1).flatten(1)

    def patch_lengths(self) -> list[int]:
        return [rows * columns for rows, columns in self.grids]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentContext(Context):
    """The context with the sizes of generated items."""

    latents: Latents


class OutputProjector(StageLayer):
    """Layer 0: projects the LLM's states at the positions of an image to condition tokens."""

    def __init__(self, kind: str, widths: tuple[int, int]) -> None:
        super().__init__({"projector": "projector"}, STD)
        self.projector = PROJECTORS[kind](*widths)

    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        del hidden_TD, context
        (states_ED,) = features.values()
        y_ED: Tensor = self.projector(states_ED)
        return y_ED


class EmbedLatents(InnerLayer):
    """Layer 1: every item's time, condition, and noisy patches with their positions."""

    def __init__(self, width: int, elements: int) -> None:
        super().__init__({"patches": "patches", "time_in": "time.0", "time_out": "time.2"}, STD)
        self.patches = nn.Linear(elements, width)
        self.time_in, self.time_out = nn.Linear(width, width), nn.Linear(width, width)

    def run(self, x_TD: Tensor, context: LatentContext) -> Tensor:
        """`x_TD`: the condition, from the projector."""
        sizes, items = context.latents, context.data.items
        times = torch.tensor([time_of(item) for item in items])
        wave = waves(times, x_TD.shape[1]).to(x_TD)
        time_ND = self.time_out(functional.silu(self.time_in(wave)))
        noisy = [self._noisy(context, index, x_TD) for index in range(len(items))]
        patches_PD = self.patches(torch.cat([each for each, _ in noisy]))
        patches_PD = patches_PD + torch.cat([position for _, position in noisy])
        pieces = zip(
            time_ND.split(TIME_TOKENS),
            x_TD.split(list(sizes.conditions)),
            patches_PD.split(sizes.patch_lengths()),
            strict=True,
        )
        return torch.cat([piece for item in pieces for piece in item])

    def _noisy(self, context: LatentContext, index: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """([P, F] patches of the latent at its time, [P, D] their positions)."""
        sizes, item = context.latents, context.data.items[index]
        share = float(kept_share()[time_of(item)])
        noise_CYX = noise_of(item, sizes.shape(index)).to(like)
        noisy_CYX = math.sqrt(share) * context.data.raw[index] + math.sqrt(1 - share) * noise_CYX
        return sizes.in_patches(noisy_CYX), _positions(sizes.grids[index], like)


def _positions(grid: tuple[int, int], like: Tensor) -> Tensor:
    """[P, D]: one half of the width encodes the row, the other the column."""
    rows, columns = (index.flatten() for index in torch.meshgrid(*map(torch.arange, grid), indexing="ij"))
    width = like.shape[1]
    halves = (waves(rows, width // 2), waves(columns, width - width // 2))
    return torch.cat(halves, dim=-1).to(like)


class NoiseHead(InnerLayer):
    """The last layer: predicts the noise; returns the mean squared error, summed over items.

    An item is weighted by its number of tokens in the LLM's sequence, so that dividing the sum of all losses
    by the number of text targets weighs both losses alike.
    """

    def __init__(self, width: int, elements: int) -> None:
        super().__init__({"norm": "norm", "out": "out"}, STD)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, elements)

    def run(self, x_TD: Tensor, context: LatentContext) -> Tensor:
        sizes, losses = context.latents, []
        for index, (item, item_TD) in enumerate(
            zip(context.data.items, x_TD.split(list(context.data.tokens_in)), strict=True)
        ):
            condition = sizes.conditions[index]
            guess_PF = self.out(self.norm(item_TD[TIME_TOKENS + condition :]))
            noise_PF = sizes.in_patches(noise_of(item, sizes.shape(index)).to(guess_PF))
            wide = torch.promote_types(guess_PF.dtype, torch.float32)
            losses.append(condition * functional.mse_loss(guess_PF.to(wide), noise_PF.to(wide)))
        return torch.stack(losses).sum()


class DitAdapter(Adapter):
    """A diffusion transformer whose blocks are SigLIP's: norm, attention, norm, MLP, with biases."""

    raw_layer = 1
    undivided = "a generator does not share tokens over ranks"

    def configured(self, fields: dict[str, Any]) -> PretrainedConfig:
        self.channels, self.patch = fields.get("latent_channels", 4), fields.get("patch_size", 2)
        width = fields.get("hidden_size", 384)
        return SiglipVisionConfig(
            hidden_size=width,
            intermediate_size=fields.get("intermediate_size", 4 * width),
            num_hidden_layers=fields.get("num_hidden_layers", 12),
            num_attention_heads=fields.get("num_attention_heads", 6),
            hidden_act=fields.get("hidden_act", "gelu_pytorch_tanh"),
        )

    def raw_shape(self, segment: Segment) -> tuple[int, ...]:
        rows, columns = self._grid(segment.tokens_in, segment.tokens_out)
        return (self.channels, rows * self.patch, columns * self.patch)

    def _grid(self, tokens_in: int, tokens_out: int) -> tuple[int, int]:
        patches = tokens_in - tokens_out - TIME_TOKENS
        if patches < 1:
            raise ValueError(
                f"module {self.module.name!r}: an item holds {TIME_TOKENS} token of time, its condition and "
                f"its patches; want more than {tokens_out + TIME_TOKENS} tokens inside, got {tokens_in}"
            )
        return grid_of(patches)

    def context(self, data: MicrobatchData, device: torch.device, dtype: torch.dtype) -> Context:
        shared = super().context(data, device, dtype)
        grids = tuple(map(self._grid, data.tokens_in, data.tokens_out))
        latents = Latents(self.channels, self.patch, grids, data.tokens_out)
        return LatentContext(data=data, packing=shared.packing, latents=latents)

    def _layer(self, index: int) -> StageLayer:
        if index > 0:
            return super()._layer(index)
        assert self.projector is not None, "the plan names one"
        projection = self.module.layers[0].operators[0]
        assert isinstance(projection, Matmul), "a generator's first layer projects states"
        return OutputProjector(self.projector, (projection.in_features, self.config.hidden_size))

    def first(self) -> StageLayer:
        return EmbedLatents(self.config.hidden_size, self._elements)

    def block(self, index: int) -> StageLayer:
        return EncoderBlock(SiglipEncoderLayer(self.config), index, STD)

    def last(self) -> StageLayer:
        return NoiseHead(self.config.hidden_size, self._elements)

    @property
    def _elements(self) -> int:
        return int(self.channels * self.patch**2)
