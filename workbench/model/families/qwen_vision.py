"""Qwen2-VL's and Qwen2.5-VL's vision towers: images of any size, and a merger of their own."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from workbench.data.corpus import ItemTokens, qwen2_vl_tokens
from workbench.model.config_fields import Config, count, heads_of, places, text, whole
from workbench.model.families.family import EXAMPLE_WIDTH, Encoder, Example, Tower
from workbench.model.module_layers import patch_embedding, unequal_block_layers
from workbench.model.projector import Projector
from workbench.model.shape import Shape
from workbench.model.transformer import Block, Heads, Mlp, Norm


def _qwen2_vl(config: Config) -> Tower:
    width = whole(config, "embed_dim", 1280)
    activation = text(config, "hidden_act", "quick_gelu")
    block = Block(
        width=width,
        heads=_qwen_heads(config, width),
        mlp=Mlp(width=width * whole(config, "mlp_ratio", 4), gated=False, activation=activation, bias=True),
        norm=Norm.LAYER,
    )
    return _qwen_vision(config, (block,) * count(config, "depth", 32))


def _qwen2_5_vl(config: Config) -> Tower:
    """Attention stays inside windows of 112 px, except in the blocks that the configuration lists.

    Differs: every window is taken to be full; those at the edge of an image are smaller.
    """
    width = whole(config, "hidden_size", 3584)
    activation = text(config, "hidden_act", "silu")
    whole_image = Block(
        width=width,
        heads=_qwen_heads(config, width),
        mlp=Mlp(width=whole(config, "intermediate_size", 3420), gated=True, activation=activation, bias=True),
        norm=Norm.RMS,
    )
    side = whole(config, "window_size", 112) // whole(config, "patch_size", 14)
    windowed = replace(whole_image, heads=replace(whole_image.heads, num_keys=side**2))
    listed = places(config, "fullatt_block_indexes", (7, 15, 23, 31))
    blocks = [whole_image if i in listed else windowed for i in range(count(config, "depth", 32))]
    return _qwen_vision(config, blocks)


def _qwen_heads(config: Config, width: int) -> Heads:
    heads = heads_of(config, width=width, num=whole(config, "num_heads", 16), causal=False)
    return replace(heads, bias="qkvo", fused=True, rotary=True)


def _qwen_vision(config: Config, blocks: Sequence[Block]) -> Tower:
    elements = whole(config, "in_channels", whole(config, "in_chans", 3))
    elements *= whole(config, "patch_size", 14) ** 2 * whole(config, "temporal_patch_size", 2)
    embed = patch_embedding(patch_elements=elements, width=blocks[0].width, bias=False)
    return Tower(
        layers=(embed, *unequal_block_layers(blocks)),
        width=blocks[0].width,
        norm=blocks[0].norm,
        merge=whole(config, "spatial_merge_size", 2) ** 2,
        projectors=(Projector.MERGER,),
    )


def image_tokens(config: Config, height_px: int, width_px: int) -> ItemTokens:
    """Of an image of any size, squares of whose patches become one."""
    return qwen2_vl_tokens(
        height_px,
        width_px,
        patch_px=config.get("patch_size", 14),
        merge_side=config.get("spatial_merge_size", 2),
    )


def _shaped_2(shape: Shape) -> dict[str, Any]:
    return {
        "model_type": "qwen2_vl_vision",
        "depth": shape.layers,
        "embed_dim": shape.hidden,
        "num_heads": shape.heads,
        "mlp_ratio": shape.ffn // shape.hidden,
        "patch_size": shape.patch_px,
    }


def _shaped_2_5(shape: Shape) -> dict[str, Any]:
    return {
        "model_type": "qwen2_5_vl_vision",
        "depth": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_heads": shape.heads,
        "patch_size": shape.patch_px,
    }


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
    shapes={"qwen2-vl": _shaped_2},
    shares_tokens=False,
)
QWEN2_5_VL = Encoder(
    name="Qwen2.5-VL vision",
    role="vision",
    model_type="qwen2_5_vl_vision",
    examples={
        "qwen2.5-vl": Example(
            config=_EXAMPLE
            | {
                "out_hidden_size": EXAMPLE_WIDTH,
                "intermediate_size": 352,
                "window_size": 16,
                "fullatt_block_indexes": [1, 3],
            },
            tokens=(128, 32),
        )
    },
    aliases=("qwen2_5_vl", "qwen2_5_vl_vision_model"),
    make=_qwen2_5_vl,
    image_tokens=image_tokens,
    shapes={"qwen2.5-vl": _shaped_2_5},
    shares_tokens=False,
)
