"""Larger images before towers of one size: how the processors of their models cut them.

Each tile is an item, unless the model puts features of tiles together: then the image is one item.

The keys of a configuration that say it are words of the composite or of the checkpoint's processor.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil, isqrt, sqrt
from typing import Any

from workbench.data.corpus import ANYRES_GRIDS, ItemTokens, Tiled, anyres_grid
from workbench.data.tilings import (
    cohere_tiles,
    idefics3_tiles,
    internvl_tiles,
    llama4_tiles,
    ovis2_tiles,
    phi4_canvas,
    unpadded,
)
from workbench.model.config_fields import Config, flag, text, whole
from workbench.model.layer import Layer, Pointwise, TokenCount

Tiles = Callable[[Config, ItemTokens, int, int], tuple[ItemTokens | Tiled, ...]]

GRIDS, SHRINKS, PHI_4 = "image_grid_pinpoints", "vision_aspect_ratio", "dynamic_hd"
TILING = "image_tiling"  # whose rule cuts images before a tower that several models have; absent: LLaVA's
AYA, COMMAND_A, COSMOS_EDGE, LFM2_VL = "aya_vision", "cohere2_vision", "cosmos3_edge", "lfm2_vl"
NEWLINE = "image_newline"  # whether a learned token ends each row of an image's tiles, put together
_MAX = "anyres_max_"
USUAL_PX = 224  # of a tower that does not say its image size
MOST_TILES = 4096  # of an image, far beyond any processor's
MOST_COVERING = 128  # the same where every grid is tried tile by tile
_SHRINKS_BEYOND = 1.1  # times the side of the most tiles


def internvl(config: Config, tile: ItemTokens, height_px: int, width_px: int) -> tuple[ItemTokens, ...]:
    least = whole(config, "min_patches", 1, most=MOST_TILES)
    most = whole(config, "max_patches", 12, most=MOST_TILES)
    side = whole(config, "image_size", 448)
    return (tile,) * internvl_tiles(height_px, width_px, tile_px=side, least=least, most=most)


def ovis2(config: Config, tile: ItemTokens, height_px: int, width_px: int) -> tuple[ItemTokens, ...]:
    """Two rules, of which a checkpoint's processor names one; the other is InternVL's."""
    if not flag(config, "crop_to_patches", default=True):
        return (tile,)
    if not flag(config, "use_covering_area_grid", default=True):
        return internvl(config, tile, height_px, width_px)
    side = whole(config, "image_size", USUAL_PX)
    most = whole(config, "max_patches", 12, most=MOST_COVERING)
    return (tile,) * ovis2_tiles(height_px, width_px, tile_px=side, most=most)


def cohere(config: Config, tile: ItemTokens, height_px: int, width_px: int) -> tuple[ItemTokens, ...]:
    side = whole(config, "image_size", 512)
    most = whole(config, "max_patches", 12, most=MOST_TILES)
    return (tile,) * cohere_tiles(height_px, width_px, tile_px=side, most=most)


def llama4(config: Config, tile: ItemTokens, height_px: int, width_px: int) -> tuple[ItemTokens, ...]:
    side = whole(config, "image_size", 448)
    most = whole(config, "max_patches", 16, most=MOST_TILES)
    return (tile,) * llama4_tiles(height_px, width_px, tile_px=side, most=most)


def idefics3(config: Config, tile: ItemTokens, height_px: int, width_px: int) -> tuple[ItemTokens, ...]:
    side = whole(config, "image_size", 224)
    longest = whole(config, "longest_edge", 4 * side)
    tiles = idefics3_tiles(height_px, width_px, tile_px=side, longest_px=longest)
    if tiles > MOST_TILES:
        raise ValueError(
            f"longest_edge {longest} px of tiles of image_size {side} px makes {tiles} tiles; want at most "
            f"{MOST_TILES}"
        )
    return (tile,) * tiles


def whole_image(config: Config, tile: ItemTokens, height_px: int, width_px: int) -> tuple[ItemTokens, ...]:
    """Of a tower whose item is an image with room for all its tiles."""
    del config, height_px, width_px
    return (tile,)


def anyres(config: Config, tile: ItemTokens, height_px: int, width_px: int) -> tuple[ItemTokens | Tiled, ...]:
    """LLaVA-NeXT's grids, or those of the configuration; the rules of others where it has their keys.

    With `image_newline`, the image is one item: an overview, then the rows of its tiles without padding, each
    with a learned token at its end.

    What of the grid only holds padding does not reach the LLM, and where LLaVA-OneVision has more than its
    most tiles, it shrinks features to those of so many; an equal share of what is left counts for each tile.

    Source: `pack_image_features` and `unpad_image` of transformers' LLaVA-NeXT and LLaVA-OneVision, and its
    image processor of Phi-4.
    Differs: without `image_newline` no tokens stand for the ends of rows, nor in Phi-4 between the tiles and
    the whole. A tile counts whole that has no square of tokens, or in Phi-4 not one for every second patch
    each way.

    Raises:
        ValueError: grids that are no multiples of the image size, or an image that leaves a tile no token.
    """
    if (rule := text(config, TILING, "")) in _RULES:
        return _RULES[rule](config, tile, height_px, width_px)
    side = whole(config, "image_size", USUAL_PX)
    if config.get(PHI_4) is not None:
        return _phi4(config, tile, side, (height_px, width_px))
    rows, columns = anyres_grid(height_px, width_px, tile_px=side, grids=_grids(config, side))
    along, is_packed = isqrt(tile.tokens_out), flag(config, NEWLINE)
    if along**2 != tile.tokens_out:
        if is_packed:
            raise ValueError(f"{NEWLINE}: want a tile of a square of tokens, got {tile.tokens_out}")
        return (tile,) * (1 + rows * columns)
    filled = unpadded(height_px, width_px, rows * along, columns * along)
    if is_packed:
        return (_packed(config, tile, (rows, columns), filled, (height_px, width_px)),)
    height, width = shrunk(config, along, filled)
    return _shared(tile, rows * columns, height * width, (height_px, width_px))


def shrunk(config: Config, along: int, filled: tuple[int, int]) -> tuple[int, int]:
    """(rows, columns) of features that reach the LLM, from those that an image covers.

    LLaVA-OneVision interpolates to the features of its largest number of tiles if there are over 10 % more.

    Args:
        along: number of features along a side of a tile.
    """
    most = _most_tiles(config)
    ratio = 0.0 if most is None else sqrt(filled[0] * filled[1] / (most * along**2))
    if ratio <= _SHRINKS_BEYOND:
        return filled
    return int(filled[0] // ratio), int(filled[1] // ratio)


_RULES: Mapping[str, Tiles] = {AYA: internvl, COMMAND_A: cohere}


def _packed(
    config: Config,
    tile: ItemTokens,
    grid: tuple[int, int],
    filled: tuple[int, int],
    image_px: tuple[int, int],
) -> Tiled:
    """An overview and a grid of tiles; `filled`: (rows, columns) of features that the image covers."""
    num_tokens = 0 if min(filled) < 1 else packed_tokens(config, tile.tokens_out, filled)
    if num_tokens <= tile.tokens_out:
        raise ValueError(
            f"image of {image_px[0]} x {image_px[1]} px: no feature of its {grid[0]} x {grid[1]} tiles "
            "reaches the LLM; nearest: sides less unlike"
        )
    return Tiled(ItemTokens(tile.tokens_in * (1 + grid[0] * grid[1]), num_tokens), grid, filled)


def packed_tokens(config: Config, tile_tokens: int, filled: tuple[int, int]) -> int:
    """Number of tokens of the overview and of the rows, each row with its learned token.

    Args:
        tile_tokens: number of tokens that a tile emits.
        filled: (rows, columns) of features that the image covers.
    """
    height, width = shrunk(config, isqrt(tile_tokens), filled)
    return tile_tokens + (height * (width + 1) if width else 0)


def _phi4(config: Config, tile: ItemTokens, side: int, image_px: tuple[int, int]) -> tuple[ItemTokens, ...]:
    most, patch = whole(config, PHI_4, most=MOST_TILES), whole(config, "patch_size", 14)
    canvas = phi4_canvas(*image_px, tile_px=side, most=most)
    if tile.tokens_out != ceil(side // patch / 2) ** 2:
        return (tile,) * canvas.num_tiles
    height, width = canvas.unpadded(patch)
    return _shared(tile, canvas.num_tiles - 1, height * width, image_px)


def _shared(tile: ItemTokens, num: int, tokens: int, image_px: tuple[int, int]) -> tuple[ItemTokens, ...]:
    """A tile of the whole, and so many that have equal shares of the tokens that reach the LLM."""
    if tokens < num:
        raise ValueError(
            f"image of {image_px[0]} x {image_px[1]} px: {tokens} tokens of {num} tiles reach the LLM; want "
            "one a tile; nearest: sides less unlike"
        )
    each, more = divmod(tokens, num)
    return (tile, *(tile._replace(tokens_out=each + (index < more)) for index in range(num)))


def _most_tiles(config: Config) -> int | None:
    """Beyond which features are shrunk; None: never."""
    said = text(config, SHRINKS, "")
    if not said.startswith(_MAX):
        return None
    most = int(said.removeprefix(_MAX)) if said.removeprefix(_MAX).isdigit() else 0
    if most < 1:
        raise ValueError(f"{SHRINKS} must end with a number of tiles >= 1, got {said!r}; nearest: {_MAX}9")
    return most


def _grids(config: Config, side: int) -> tuple[tuple[int, int], ...]:
    said = config.get(GRIDS)
    if said is None:
        return ANYRES_GRIDS
    pairs = said if isinstance(said, list | tuple) else [said]
    for pair in pairs:
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2 and all(type(px) is int for px in pair)
        if not is_pair or min(pair) < side or any(px % side for px in pair):
            raise ValueError(f"{GRIDS} must be pairs of multiples of image_size {side}, got {pair!r:.60}")
        if pair[0] * pair[1] > MOST_TILES * side**2:
            raise ValueError(
                f"{GRIDS} must make at most {MOST_TILES} tiles of image_size {side}, got {pair!r:.60}"
            )
    return tuple((height // side, width // side) for height, width in pairs)


def of_limits(processor: Config) -> dict[str, Any]:
    """InternVL's and Llama 4's least and most tiles."""
    return _said(processor, "min_patches", "max_patches")


def of_crops(processor: Config) -> dict[str, Any]:
    """Ovis 2's least and most tiles, and how it cuts them, if at all."""
    return of_limits(processor) | _said(processor, "crop_to_patches", "use_covering_area_grid")


def of_grids(processor: Config) -> dict[str, Any]:
    """LLaVA's grids, Phi-4's most tiles, the least and most of Aya and Command A Vision."""
    return _said(processor, GRIDS, PHI_4) | of_limits(processor)


def of_longest_edge(processor: Config) -> dict[str, Any]:
    """What a longer side is brought to: Idefics3's, Pixtral's."""
    size = processor.get("size")
    return _said(size, "longest_edge") if isinstance(size, Mapping) else {}


def _said(processor: Config, *keys: str) -> dict[str, Any]:
    return {key: processor[key] for key in keys if processor.get(key) is not None}


def with_newline(projector: Layer, *, shrinks: bool) -> Layer:
    """Add the token that ends a row, and the copy that puts rows together.

    If features are shrunk after the projector, their number before is unknown: all of the tiles are counted.
    """
    width = projector.out_width
    if shrinks:
        operators = tuple(replace(operator, tokens=TokenCount.IN) for operator in projector.operators)
        projector = replace(projector, operators=operators)
    newline = Pointwise(
        name=NEWLINE, width=width, num_passes=2, weights=(("weight", width),), tokens=TokenCount.OUT
    )
    return replace(projector, operators=(*projector.operators, newline))
