"""Vision towers of Qwen2-VL, Qwen2.5-VL, EXAONE 4.5 and Qwen3-VL: images of any size, with a merger."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from workbench.data.corpus import QWEN_MAX_PIXELS, QWEN_MIN_PIXELS, ItemTokens, qwen2_vl_tokens
from workbench.model.config_fields import Config, count, heads_of, layer_indices, text, whole
from workbench.model.families import qwen_video
from workbench.model.families.family import EXAMPLE_WIDTH, Encoder, Example, Tower
from workbench.model.layer import Layer, Matmul, Operator, Pointwise, Shard
from workbench.model.module_layers import (
    block_layers,
    learned_positions,
    patch_embedding,
    unequal_block_layers,
)
from workbench.model.projector import Projector
from workbench.model.shape import Shape
from workbench.model.transformer import Block, Heads, Mlp, Norm, norm

_MERGED, _DEEPSTACK = "deepstack_visual_indexes", (8, 16, 24)


def _qwen2_vl(config: Config) -> Tower:
    width = whole(config, "embed_dim", 1280)
    activation = text(config, "hidden_act", "quick_gelu")
    block = Block(
        width=width,
        heads=_qwen_heads(config, width),
        mlp=Mlp(width=width * whole(config, "mlp_ratio", 4), gated=False, activation=activation, bias=True),
        norm=Norm.LAYER,
    )
    return _qwen_vision(config, block_layers(block, count(config, "depth", 32)), width, Norm.LAYER)


def _qwen2_5_vl(config: Config) -> Tower:
    return _windowed(config, _qwen_heads(config, whole(config, "hidden_size", 3584)))


def _omni(config: Config) -> Tower:
    """Qwen2.5-VL's tower with separate matmuls for queries, keys and values."""
    return _windowed(config, replace(_qwen_heads(config, whole(config, "hidden_size", 3584)), fused=False))


def _exaone(config: Config) -> Tower:
    """Qwen2.5-VL's tower with fewer heads of keys and values than of queries."""
    heads = _qwen_heads(config, whole(config, "hidden_size", 3584))
    return _windowed(config, replace(heads, num_kv=whole(config, "num_key_value_heads", 8)))


def _windowed(config: Config, heads: Heads) -> Tower:
    """Attention stays inside windows of 112 px, except in the blocks that the configuration lists.

    Differs: every window is assumed full; those at the edge of an image are smaller.

    Raises:
        ValueError: a window smaller than one square of merged patches.
    """
    activation = text(config, "hidden_act", "silu")
    whole_image = Block(
        width=whole(config, "hidden_size", 3584),
        heads=heads,
        mlp=Mlp(width=whole(config, "intermediate_size", 3420), gated=True, activation=activation, bias=True),
        norm=Norm.RMS,
    )
    windowed = replace(whole_image, heads=replace(whole_image.heads, num_keys=_window_side(config) ** 2))
    listed = layer_indices(config, "fullatt_block_indexes", (7, 15, 23, 31))
    blocks = [whole_image if i in listed else windowed for i in range(count(config, "depth", 32))]
    tower = _qwen_vision(config, unequal_block_layers(blocks), whole_image.width, Norm.RMS)
    return replace(tower, takes_steps=True)


def _window_side(config: Config) -> int:
    """Side of a window in patches: a window is a square of whole squares of merged patches."""
    merge = whole(config, "spatial_merge_size", 2)
    square_px, window_px = merge * whole(config, "patch_size", 14), whole(config, "window_size", 112)
    if window_px < square_px:
        raise ValueError(
            f"window_size must hold a square of merged patches of {square_px} px, got {window_px}; nearest: "
            f"{square_px}"
        )
    return window_px // square_px * merge


def _qwen3_vl(config: Config) -> Tower:
    """Qwen3-VL's tower: learned and rotary positions, and mergers of some blocks' states (DeepStack).

    States of some blocks are merged too, for the first blocks of the language model. A merger's output is
    carried along beside the tower's states, a part of it with each of the merged patches.
    """
    width = whole(config, "hidden_size", 1152)
    block = Block(
        width=width,
        heads=_qwen_heads(config, width),
        mlp=Mlp(
            width=whole(config, "intermediate_size", 4304),
            gated=False,
            activation=text(config, "hidden_act", "gelu_pytorch_tanh"),
            bias=True,
        ),
        norm=Norm.LAYER,
    )
    merge, out = whole(config, "spatial_merge_size", 2) ** 2, whole(config, "out_hidden_size", 3584)
    merged = layer_indices(config, _MERGED, _DEEPSTACK)
    depth = whole(config, "depth", 27)
    if out % merge:
        raise ValueError(f"out_hidden_size must be a multiple of the {merge} patches that merge, got {out}")
    if len(set(merged)) < len(merged) or max(merged, default=0) >= depth:
        raise ValueError(
            f"{_MERGED} must name some of the blocks 0 to {depth - 1} once each, got {list(merged)}"
        )
    layers = []
    for index, block_layer in enumerate(block_layers(block, depth)):
        merged_layer = _merged(block_layer, merge, out) if index in merged else block_layer
        num_merged = sum(merged_index <= index for merged_index in merged)
        layers.append(replace(merged_layer, out_width=width + num_merged * out // merge))
    tower = _qwen_vision(
        config,
        layers,
        width,
        Norm.LAYER,
        patch_px=qwen_video.PATCH_PX_3,
        patch_bias=True,
        positions=learned_positions(whole(config, "num_position_embeddings", 2304), width),
    )
    return replace(tower, stacked=1 + len(merged))


def _merged(block: Layer, merge: int, out_width: int) -> Layer:
    """The block followed by a merger: a norm over a square of patches, then an MLP."""
    width, rows = merge * block.out_width, 1 / merge
    product = Matmul(
        name="deepstack.0",
        in_features=width,
        out_features=width,
        bias=True,
        shard=Shard.COLUMN,
        tokens_scale=rows,
    )
    second = replace(product, name="deepstack.1", out_features=out_width, shard=Shard.ROW)
    merger_norm = replace(norm("deepstack.norm", width, Norm.LAYER), tokens_scale=rows)
    activation = Pointwise(
        name="deepstack.gelu", width=width, num_passes=2, shard=Shard.COLUMN, tokens_scale=rows
    )
    return replace(block, operators=(*block.operators, merger_norm, product, activation, second))


def _qwen_heads(config: Config, width: int) -> Heads:
    heads = heads_of(config, width=width, num=whole(config, "num_heads", 16), causal=False)
    return replace(heads, bias="qkvo", fused=True, rotary=True)


def _qwen_vision(
    config: Config,
    layers: Sequence[Layer],
    width: int,
    kind: Norm,
    *,
    patch_px: int = 14,
    patch_bias: bool = False,
    positions: tuple[Operator, ...] = (),
) -> Tower:
    """The tower of patches of some frames, learned positions if any, and blocks, ending with a merger."""
    elements = whole(config, "in_channels", whole(config, "in_chans", 3))
    elements *= whole(config, "patch_size", patch_px) ** 2 * whole(config, "temporal_patch_size", 2)
    embed = patch_embedding(patch_elements=elements, width=width, bias=patch_bias)
    return Tower(
        layers=(replace(embed, operators=(*embed.operators, *positions)), *layers),
        width=width,
        norm=kind,
        merge=whole(config, "spatial_merge_size", 2) ** 2,
        projectors=(Projector.MERGER,),
    )


def image_tokens(config: Config, height_px: int, width_px: int) -> ItemTokens:
    """Tokens of an image of any size, of which squares of patches are merged.

    `min_pixels` and `max_pixels` are keys of a checkpoint's processor.

    Raises:
        ValueError: an image that the rule does not resize, or a smallest area above the largest.
    """
    least, most = whole(config, "min_pixels", QWEN_MIN_PIXELS), whole(config, "max_pixels", QWEN_MAX_PIXELS)
    if least > most:
        raise ValueError(f"min_pixels must be <= max_pixels {most}, got {least}; nearest: {most}")
    return qwen2_vl_tokens(
        height_px,
        width_px,
        patch_px=whole(config, "patch_size", 14),
        merge_side=whole(config, "spatial_merge_size", 2),
        min_pixels=least,
        max_pixels=most,
    )


def _processed(processor: Config) -> dict[str, Any]:
    """A processor's limits on image areas, and its keys about videos."""
    return image_limits(processor) | qwen_video.processed(processor)


def image_limits(processor: Config) -> dict[str, Any]:
    """A processor's limits on image areas.

    Newer files give limits as edges; explicit pixel keys take precedence.
    """
    size = processor.get("size")
    size = size if isinstance(size, Mapping) else {}
    candidates = {
        "min_pixels": (processor.get("min_pixels"), size.get("shortest_edge"), size.get("min_pixels")),
        "max_pixels": (processor.get("max_pixels"), size.get("longest_edge"), size.get("max_pixels")),
    }
    limits = {
        key: next((each for each in values if each is not None), None) for key, values in candidates.items()
    }
    return {key: value for key, value in limits.items() if value is not None}


_UNPROCESSED = (
    f"images are brought to {QWEN_MIN_PIXELS} to {QWEN_MAX_PIXELS} pixels, as transformers does where no "
    "preprocessor_config.json says min_pixels and max_pixels; released checkpoints allow more"
)
_SAMPLED = "of videos 2 frames a second are looked at"
_OF_FRAMES = f"{_UNPROCESSED}; {_SAMPLED}, at {qwen_video.FRAME_PIXELS[1]} pixels at most (video_max_pixels)"
_OF_VIDEOS = (
    f"{_UNPROCESSED}; {_SAMPLED}, at {qwen_video.VIDEO_PIXELS_3[1]} pixels at most for all of them together "
    "(video_max_pixels), where released checkpoints allow more, too"
)


def _native_tokens(config: Config) -> tuple[int, int]:
    """Tokens of an image with as many patches as the table has positions."""
    num = whole(config, "num_position_embeddings", 2304)
    return num, num // whole(config, "spatial_merge_size", 2) ** 2


def _shaped(shape: Shape) -> dict[str, Any]:
    return {"depth": shape.layers, "num_heads": shape.heads, "patch_size": shape.patch_px}


def _shaped_2(shape: Shape) -> dict[str, Any]:
    family_keys = {"model_type": "qwen2_vl_vision", "embed_dim": shape.hidden}
    return _shaped(shape) | family_keys | {"mlp_ratio": shape.ffn // shape.hidden}


def _shaped_2_5(shape: Shape) -> dict[str, Any]:
    family_keys = {"model_type": "qwen2_5_vl_vision", "hidden_size": shape.hidden}
    return _shaped(shape) | family_keys | {"intermediate_size": shape.ffn}


_EXAMPLE = {
    "depth": 4,
    "hidden_size": EXAMPLE_WIDTH,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
}
QWEN2_VL = Encoder(
    name="Qwen2-VL vision",
    role="vision",
    model_type="qwen2_vl_vision",
    examples={
        "qwen2-vl": Example(config=_EXAMPLE | {"embed_dim": EXAMPLE_WIDTH, "mlp_ratio": 3}, tokens=(128, 32))
    },
    aliases=("qwen2_vl", "qwen2_vl_vision_model"),
    make=_qwen2_vl,
    image_tokens=image_tokens,
    video=qwen_video.qwen2,
    processed=_processed,
    unprocessed=_OF_FRAMES,
    shapes={"qwen2-vl": _shaped_2},
    shares_tokens=False,
)
_EXAMPLE_2_5 = Example(
    config=_EXAMPLE
    | {
        "out_hidden_size": EXAMPLE_WIDTH,
        "intermediate_size": 352,
        "window_size": 16,
        "fullatt_block_indexes": [1, 3],
    },
    tokens=(128, 32),
)
QWEN2_5_VL = Encoder(
    name="Qwen2.5-VL vision",
    role="vision",
    model_type="qwen2_5_vl_vision",
    examples={"qwen2.5-vl": _EXAMPLE_2_5},
    aliases=("qwen2_5_vl", "qwen2_5_vl_vision_model"),
    make=_qwen2_5_vl,
    image_tokens=image_tokens,
    video=qwen_video.qwen2_5,
    processed=_processed,
    unprocessed=_OF_FRAMES,
    shapes={"qwen2.5-vl": _shaped_2_5},
    shares_tokens=False,
)
EXAONE_VISION = replace(
    QWEN2_5_VL,
    name="EXAONE 4.5 vision",
    model_type="exaone4_5_vision",
    examples={
        "exaone 4.5 vision": replace(_EXAMPLE_2_5, config={**_EXAMPLE_2_5.config, "num_key_value_heads": 2})
    },
    aliases=(),
    make=_exaone,
    video=qwen_video.qwen2,
    shapes={},
)
OMNI_VISION = Encoder(
    name="Qwen2.5-Omni vision",
    role="vision",
    model_type="qwen2_5_omni_vision_encoder",
    examples={"omni vision": _EXAMPLE_2_5},
    make=_omni,
    image_tokens=image_tokens,
    processed=_processed,
    unprocessed=_UNPROCESSED,
    shares_tokens=False,
)
_EXAMPLE_3 = Example(
    config={
        "depth": 4,
        "hidden_size": EXAMPLE_WIDTH,
        "intermediate_size": 352,
        "num_heads": 4,
        "patch_size": 4,
        "num_position_embeddings": 64,
        "out_hidden_size": EXAMPLE_WIDTH,
        _MERGED: [1],
    },
    tokens=(128, 32),
)


def _image_tokens_3(config: Config, height_px: int, width_px: int) -> ItemTokens:
    return image_tokens({"patch_size": qwen_video.PATCH_PX_3, **config}, height_px, width_px)


QWEN3_VL = Encoder(
    name="Qwen3-VL vision",
    role="vision",
    model_type="qwen3_vl_vision",
    examples={"qwen3-vl": _EXAMPLE_3},
    aliases=("qwen3_vl", "qwen3_vl_vision_model", "qwen3_vl_moe_vision"),
    shares_tokens=False,
    native_tokens=_native_tokens,
    make=_qwen3_vl,
    video=qwen_video.qwen3,
    processed=_processed,
    unprocessed=_OF_VIDEOS,
    image_tokens=_image_tokens_3,
)
QWEN3_5_VISION = replace(
    QWEN3_VL,
    name="Qwen3.5 vision",
    model_type="qwen3_5_vision",
    examples={
        "qwen3.5 vision": replace(
            _EXAMPLE_3,
            config={key: value for key, value in _EXAMPLE_3.config.items() if key != _MERGED},
        )
    },
    aliases=("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_vision"),
    make=lambda config: _qwen3_vl({**config, _MERGED: []}),
)
QWEN3_OMNI_VISION = replace(
    QWEN3_VL,
    name="Qwen3-Omni vision",
    model_type="qwen3_omni_moe_vision_encoder",
    examples={"qwen3-omni vision": _EXAMPLE_3},
    aliases=(),
    video=None,
    unprocessed=_UNPROCESSED,
)
