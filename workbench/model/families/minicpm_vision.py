"""MiniCPM's vision towers: SigLIP's for images of any size, of which MiniCPM-V's merges patches inside."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, inf, log, sqrt
from typing import Any

from workbench.data.corpus import ItemTokens
from workbench.model.config_fields import Config, flag, text, whole, whole_or_zero
from workbench.model.families.family import EXAMPLE_VIT, Encoder, Example, Tower
from workbench.model.families.vit import siglip
from workbench.model.layer import Layer, Matmul, Operator, Pointwise
from workbench.model.module_layers import over
from workbench.model.transformer import (
    Heads,
    Mlp,
    Norm,
    attention_operators,
    mlp_operators,
    norm,
    residual,
)

SIDE = 2  # of the squares of patches that a projector merges
_SIDE_PX, _MOST_SLICES = 448, 9  # defaults: side of a square with an image's area, slices of an image
_MOST = 1024  # slices, far beyond any processor's
_GROWS = "small_image_upsize"
_AT = "insert_layer_id"
_PROCESSED = ("scale_resolution", "max_slice_nums", "slice_mode", _GROWS)


def _merging(config: Config) -> Tower:
    """SigLIP's tower, in which blocks behind one of them run over squares of patches.

    A square has the tower's width, of which each of its patches carries a part.

    Raises:
        ValueError: no such block, or a width that patches of a square do not share.
    """
    tower = siglip(config)
    embed, *blocks = tower.layers
    at, squares = whole_or_zero(config, _AT, 6), SIDE**2
    if at >= len(blocks):
        raise ValueError(
            f"{config['model_type']}: {_AT} must be one of the blocks 0 to {len(blocks) - 1}, got {at}; "
            f"nearest: {len(blocks) - 1}"
        )
    if tower.width % squares:
        raise ValueError(
            f"{config['model_type']}: hidden_size must be a multiple of the {squares} patches that merge, "
            f"got {tower.width}; nearest: {max(1, round(tower.width / squares)) * squares}"
        )
    merging, *behind = blocks[at:]
    merged = replace(merging, operators=(*merging.operators, *_merger(config, merging)))
    layers = (merged, *(_over_squares(block) for block in behind))
    return replace(
        tower,
        layers=(
            embed,
            *blocks[:at],
            *(replace(layer, out_width=tower.width // squares) for layer in layers),
        ),
        inside=squares,
    )


def _merger(config: Config, block: Layer) -> Iterator[Operator]:
    """Attention within every square, then an MLP over its patches side by side."""
    width, squares = block.out_width, SIDE**2
    heads = Heads(
        num=whole(config, "num_attention_heads", 12),
        num_kv=whole(config, "num_attention_heads", 12),
        dim=width // whole(config, "num_attention_heads", 12),
        causal=False,
        bias="qkvo",
        num_keys=squares,
    )
    mlp = Mlp(
        width=squares * whole(config, "intermediate_size", 3072),
        gated=False,
        activation="gelu_pytorch_tanh",
        bias=True,
    )
    yield norm("merger.attention_norm", width, Norm.LAYER)
    for operator in attention_operators(width, heads):
        yield replace(operator, name=f"merger.{operator.name}")
    yield residual("merger.attention_residual", width)
    up, act, down = mlp_operators("merger.mlp", squares * width, mlp)
    assert isinstance(down, Matmul), "an MLP ends with a matmul"
    for operator in (
        norm("merger.mlp_norm", squares * width, Norm.LAYER),
        up,
        act,
        replace(down, out_features=width),
        Pointwise(name="merger.mean", width=squares * width, num_passes=1),
        residual("merger.mlp_residual", width),
    ):
        yield over(operator, 1 / squares)


def _over_squares(block: Layer) -> Layer:
    return replace(block, operators=tuple(over(operator, 1 / SIDE**2) for operator in block.operators))


def _tokens(config: Config, height_px: int, width_px: int, *, side: int = SIDE) -> ItemTokens:
    """Whole squares of patches of an image, or of a slice, which is brought to the area of a square.

    `side` is that of the squares of patches that become one for the language model.

    Source: `find_best_resize` of transformers' image processors for MiniCPM-V 4.6 and MiniCPM-OCR, whose
    slices and images without slices may grow.

    Raises:
        ValueError: a processor by which sizes depend on what an image shows, or by which images do not grow.
    """
    if (grows := text(config, _GROWS, "always")) != "always":
        raise ValueError(f"{config['model_type']}: {_GROWS} must be always, got {grows!r}; nearest: always")
    patch = whole(config, "patch_size", 16)
    ratio = width_px / height_px
    height = int(whole(config, "scale_resolution", _SIDE_PX) / sqrt(ratio))
    rows, columns = (side * _divided(px, side * patch) for px in (height, int(height * ratio)))
    merged = whole(config, "spatial_merge_size", 1) ** 2
    return ItemTokens(rows * columns, rows * columns // merged)


def _divided(length: int, step: int) -> int:
    return max(round(length / step), 1)


def _splits(config: Config, height_px: int, width_px: int) -> Sequence[tuple[int, int]]:
    """The whole image, then its slices, before they are brought to size.

    Source: `get_refine_size` of the same processors.
    """
    whole_image = (height_px, width_px)
    rows, columns = _slices(config, height_px, width_px)
    if rows * columns == 1:
        return (whole_image,)
    slice_px = _divided(height_px, rows), _divided(width_px, columns)
    return (whole_image, *(slice_px,) * (rows * columns))


def _slices(config: Config, height_px: int, width_px: int) -> tuple[int, int]:
    """Rows and columns of slices: about as many as squares have the image's area, nearest to its shape.

    Of equally near grids the one with more rows counts.

    Source: `get_sliced_grid` of the same processors.
    """
    side, most = (
        whole(config, "scale_resolution", _SIDE_PX),
        whole(config, "max_slice_nums", _MOST_SLICES, most=_MOST),
    )
    wanted = min(ceil(height_px * width_px / side**2), most)
    if wanted <= 1 or not flag(config, "slice_mode", default=True):
        return 1, 1
    shape, nearest, grid = log(width_px / height_px), inf, (1, 1)
    for num in (each for each in (wanted - 1, wanted, wanted + 1) if 1 < each <= most):
        for rows in (each for each in range(1, num + 1) if num % each == 0):
            distance = abs(shape - log(num // rows / rows))
            if distance < nearest or (distance == nearest and rows > grid[0]):
                nearest, grid = distance, (rows, num // rows)
    return grid


def _processed(processor: Config) -> dict[str, Any]:
    return {key: processor[key] for key in _PROCESSED if processor.get(key) is not None}


MINICPM_OCR_VISION = Encoder(
    name="MiniCPM-OCR vision",
    role="vision",
    model_type="minicpm_ocr_vision",
    examples={"minicpm-ocr vision": Example(config=EXAMPLE_VIT, tokens=(64, 64))},
    make=siglip,
    image_tokens=_tokens,
    splits=_splits,
    processed=_processed,
)
MINICPM_VISION = replace(
    MINICPM_OCR_VISION,
    name="MiniCPM-V vision",
    model_type="minicpmv4_6_vision",
    examples={"minicpm-v vision": Example(config=EXAMPLE_VIT | {_AT: 1}, tokens=(64, 16))},
    make=_merging,
    image_tokens=partial(_tokens, side=SIDE**2),
    shares_tokens=False,
)
