"""RADIO's vision tower: DINOv2's blocks behind class tokens, for images of any size."""

from dataclasses import replace
from math import ceil, floor, sqrt
from typing import Any

from workbench.data.corpus import ItemTokens
from workbench.model.config_fields import Config, flag, number, whole, whole_or_zero
from workbench.model.families.family import EXAMPLE_VIT, Encoder, Example, Tower
from workbench.model.families.vit import Vit, each_block, tower_of, with_scales
from workbench.model.layer import Lookup, Pointwise
from workbench.model.transformer import residual

_TOWER = Vit(
    width=1280,
    heads=16,
    layers=32,
    patch=16,
    activation="gelu",
    patch_bias=False,
    final_norm=None,
    has_table=False,
)
_LARGEST_PX = 2048  # default side of the largest image, of whose patches the table has a row each
_LEAST, _MOST, _CONTEXT = "min_num_patches", "max_num_patches", "max_model_len"
_LIMITS = {_LEAST: 1024, _MOST: 13_312, _CONTEXT: 16_384}  # of its processor
_BESIDE_IMAGES = 4  # tokens of the context that its processor keeps free


def _radio(config: Config) -> Tower:
    """Class and register tokens, positions interpolated from a square table, blocks with scales.

    The product with patches counts the class tokens, too: 1 % more rows for the smallest image.
    """
    width = whole(config, "hidden_size", _TOWER.width)
    ffn, gated = int(width * number(config, "mlp_ratio", 4.0)), flag(config, "use_swiglu_ffn")
    sizes: dict[str, Any] = {"intermediate_size": ffn}
    if gated:
        sizes = {"intermediate_size": (int(ffn * 2 / 3) + 7) // 8 * 8, "hidden_act": "silu"}
    bias = "qkvo" if flag(config, "qkv_bias", default=True) else "o"
    tower = each_block(tower_of({**config, **sizes}, replace(_TOWER, bias=bias, gated=gated)), with_scales)
    embed, *blocks = tower.layers
    more = (
        Pointwise(
            name="class_token",
            width=width,
            num_passes=2,
            weights=(("embedding", _num_class(config) * width),),
        ),
        Lookup(name="position_table", num_rows=_side(config) ** 2, width=width),
        residual("add_positions", width),
    )
    return replace(tower, layers=(replace(embed, operators=(*embed.operators, *more)), *blocks))


def _num_class(config: Config) -> int:
    """Class and register tokens, which do not leave the tower."""
    return whole(config, "num_cls_tokens", 3) + whole_or_zero(config, "num_registers", 7)


def _side(config: Config) -> int:
    """Rows of the square table of positions; ValueError for none."""
    side_px, patch = whole(config, "max_img_size", _LARGEST_PX), whole(config, "patch_size", _TOWER.patch)
    if side_px < patch:
        raise ValueError(
            f"{config['model_type']}: max_img_size must be patch_size {patch} or more, got {side_px}; "
            f"nearest: {patch}"
        )
    return side_px // patch


def _tokens(config: Config, height_px: int, width_px: int) -> ItemTokens:
    """Class tokens and patches: as many as limits allow, in whole squares where a projector merges them.

    Source: `get_patch_grid_size` of transformers' image processor for Nemotron 3 Nano Omni.

    Raises:
        ValueError: a side that would vanish.
    """
    patch, merge = whole(config, "patch_size", _TOWER.patch), whole(config, "spatial_merge_size", 1)
    least, most = whole(config, _LEAST, _LIMITS[_LEAST]), _most_patches(config, merge)
    sides = [round(px / patch + 0.5) for px in (height_px, width_px)]
    shrink = min(sqrt(most / (sides[0] * sides[1])), 1.0)
    rows, columns = (floor(shrink * side) for side in sides)
    if not rows or not columns:
        raise ValueError(
            f"image of {height_px} x {width_px} px: scaled down to {most} patches, its shorter side must "
            f"keep one; nearest: a shorter side of {ceil(patch / shrink)} px"
        )
    if most > least > rows * columns:
        grow = sqrt(least / (rows * columns))
        rows, columns = ceil(grow * rows), ceil(grow * columns)
    rows = _aligned(rows, merge, most // columns)
    columns = _aligned(columns, merge, most // rows)
    return ItemTokens(_num_class(config) + rows * columns, rows * columns // merge**2)


def _aligned(side: int, merge: int, most: int) -> int:
    """The next multiple of `merge`, or where that is above `most` the one before."""
    up = -(-side // merge) * merge
    return up if up <= most or up == side else max(merge, up - merge)


def _most_patches(config: Config, merge: int) -> int:
    """The largest number of patches: the limit, where it is not 0, and what the context leaves."""
    room = (whole(config, _CONTEXT, _LIMITS[_CONTEXT]) - _BESIDE_IMAGES) * merge**2
    limit = whole_or_zero(config, _MOST, _LIMITS[_MOST])
    return max(min(room, limit) if limit else room, whole(config, _LEAST, _LIMITS[_LEAST]))


def _processed(processor: Config) -> dict[str, Any]:
    return {key: processor[key] for key in _LIMITS if processor.get(key) is not None}


_EXAMPLE = {key: value for key, value in EXAMPLE_VIT.items() if key != "intermediate_size"} | {
    "mlp_ratio": 2.75,
    "max_img_size": 48,
}
RADIO = Encoder(
    name="RADIO",
    role="vision",
    model_type="radio",
    examples={
        "radio": Example(config=_EXAMPLE, tokens=(74, 64)),
        "radio, gated": Example(
            config=_EXAMPLE | {"use_swiglu_ffn": True, "qkv_bias": False}, tokens=(74, 64)
        ),
    },
    make=_radio,
    image_tokens=_tokens,
    processed=_processed,
    unprocessed=(
        f"images are brought to {_LIMITS[_LEAST]} to {_LIMITS[_MOST]} patches, as transformers does where no "
        "preprocessor_config.json has limits"
    ),
)
