"""Kimi K2.5's vision tower: images of any size, with interpolated and rotary positions."""

from dataclasses import replace
from math import sqrt
from typing import Any

from workbench.data.corpus import ItemTokens
from workbench.model.config_fields import Config, whole
from workbench.model.families.family import EXAMPLE_WIDTH, Encoder, Example, Tower
from workbench.model.families.vit import Vit, check_turned_pairs, tower_of
from workbench.model.module_layers import learned_positions

_TOWER = Vit(
    width=1152,
    heads=16,
    ffn=4304,
    layers=27,
    patch=14,
    activation="gelu_pytorch_tanh",
    rotary=True,
    has_table=False,
)
_SIDE = 64  # default side of the table of positions
_MOST_PATCHES, _MOST_ALONG = 16_384, 512  # of an image, and of one of its sides
_ROWS, _COLUMNS = "pos_emb_height", "pos_emb_width"


def _kimi(config: Config) -> Tower:
    """Positions of patches are interpolated from the table, and added."""
    tower = tower_of({**config, "num_channels": 3}, _TOWER)
    embed, *blocks = tower.layers
    num = whole(config, _ROWS, _SIDE) * whole(config, _COLUMNS, _SIDE)
    placed = replace(embed, operators=(*embed.operators, *learned_positions(num, tower.width)))
    return replace(tower, layers=(placed, *blocks))


def _check(config: Config) -> None:
    """Raise ValueError for a table that is not square, and for heads that rows and columns do not share."""
    rows, columns = whole(config, _ROWS, _SIDE), whole(config, _COLUMNS, _SIDE)
    if rows != columns:
        raise ValueError(
            f"{config['model_type']}: {_COLUMNS} must be {_ROWS} {rows}, got {columns}; nearest: {rows}"
        )
    check_turned_pairs(config, _TOWER)


def image_tokens(config: Config, height_px: int, width_px: int) -> ItemTokens:
    """Tokens of an image, which shrinks to the limits, and is padded to whole squares of patches.

    `max_patches` and `max_side_patches` are a checkpoint's `max_patches` and `size.max_height`.

    Source: `navit_resize` of transformers' image processor for Kimi K2.5.
    """
    patch, merge = whole(config, "patch_size", _TOWER.patch), whole(config, "spatial_merge_size", 1)
    most, along = whole(config, "max_patches", _MOST_PATCHES), whole(config, "max_side_patches", _MOST_ALONG)
    num_patches = max(1, height_px // patch) * max(1, width_px // patch)
    scale = min(1.0, sqrt(most / num_patches), *(along * patch / px for px in (height_px, width_px)))
    square_px = patch * merge
    rows, columns = (
        -(-min(max(1, int(px * scale)), along * patch) // square_px) for px in (height_px, width_px)
    )
    return ItemTokens(rows * columns * merge**2, rows * columns)


def _processed(processor: Config) -> dict[str, Any]:
    size = processor.get("size")
    limits = {
        "max_patches": processor.get("max_patches"),
        "max_side_patches": size.get("max_height") if isinstance(size, dict) else None,
    }
    return {key: value for key, value in limits.items() if value is not None}


KIMI_VISION = Encoder(
    name="Kimi K2.5 vision",
    role="vision",
    model_type="kimi_k25_vision",
    examples={
        "kimi-k2.5 vision": Example(
            config={
                "hidden_size": EXAMPLE_WIDTH,
                "intermediate_size": 352,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "patch_size": 4,
                _ROWS: 8,
                _COLUMNS: 8,
            },
            tokens=(64, 64),
        )
    },
    make=_kimi,
    check_config=_check,
    image_tokens=image_tokens,
    processed=_processed,
    unprocessed=(
        f"images shrink to {_MOST_PATCHES} patches, {_MOST_ALONG} along a side, as transformers does where "
        "no preprocessor_config.json has limits"
    ),
    shares_tokens=False,
)
