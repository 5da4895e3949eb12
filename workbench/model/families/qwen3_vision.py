"""Qwen3-VL's vision tower: learned positions beside rotary ones, and mergers inside it (DeepStack)."""

from dataclasses import replace

from workbench.model.config_fields import Config, heads_of, places, text, whole
from workbench.model.families.family import EXAMPLE_WIDTH, Encoder, Example, Tower
from workbench.model.families.qwen_vision import image_tokens
from workbench.model.layer import Layer, Matmul, Pointwise
from workbench.model.module_layers import block_layers, learned_positions, patch_embedding
from workbench.model.projector import Projector
from workbench.model.transformer import Block, Mlp, Norm, norm

_DEEPSTACK = (8, 16, 24)
_PATCH_PX = 16


def _qwen3_vl(config: Config) -> Tower:
    """States of some blocks are merged too, for the first blocks of the language model.

    Differs: what these mergers give is counted as work and weights, not as messages to the LLM.
    """
    width = whole(config, "hidden_size", 1152)
    heads = heads_of(config, width=width, num=whole(config, "num_heads", 16), causal=False)
    block = Block(
        width=width,
        heads=replace(heads, bias="qkvo", fused=True, rotary=True),
        mlp=Mlp(
            width=whole(config, "intermediate_size", 4304),
            gated=False,
            activation=text(config, "hidden_act", "gelu_pytorch_tanh"),
            bias=True,
        ),
        norm=Norm.LAYER,
    )
    elements = whole(config, "in_channels", 3) * whole(config, "patch_size", _PATCH_PX) ** 2
    embed = patch_embedding(
        patch_elements=elements * whole(config, "temporal_patch_size", 2), width=width, bias=True
    )
    positions = learned_positions(whole(config, "num_position_embeddings", 2304), width)
    merge = whole(config, "spatial_merge_size", 2) ** 2
    out = whole(config, "out_hidden_size", 3584)
    merged = places(config, "deepstack_visual_indexes", _DEEPSTACK)
    blocks = block_layers(block, whole(config, "depth", 27))
    return Tower(
        layers=(
            replace(embed, operators=(*embed.operators, *positions)),
            *(_merged(each, merge, out) if i in merged else each for i, each in enumerate(blocks)),
        ),
        width=width,
        norm=Norm.LAYER,
        merge=merge,
        projectors=(Projector.MERGER,),
    )


def _merged(block: Layer, merge: int, out_width: int) -> Layer:
    """The block and behind it a merger: a norm over a square of patches, then an MLP of them."""
    width, rows = merge * block.out_width, 1 / merge
    entering = Matmul(name="deepstack.0", in_features=width, out_features=width, bias=True, tokens_scale=rows)
    leaving = Matmul(
        name="deepstack.1", in_features=width, out_features=out_width, bias=True, tokens_scale=rows
    )
    normed = replace(norm("deepstack.norm", width, Norm.LAYER), tokens_scale=rows)
    bent = Pointwise(name="deepstack.gelu", width=width, num_passes=2, tokens_scale=rows)
    return replace(block, operators=(*block.operators, normed, entering, bent, leaving))


QWEN3_VL = Encoder(
    name="Qwen3-VL vision",
    role="vision",
    model_type="qwen3_vl_vision",
    examples={
        "qwen3-vl": Example(
            config={
                "depth": 4,
                "hidden_size": EXAMPLE_WIDTH,
                "intermediate_size": 352,
                "num_heads": 4,
                "patch_size": 4,
                "num_position_embeddings": 64,
                "out_hidden_size": EXAMPLE_WIDTH,
                "deepstack_visual_indexes": [1],
            },
            tokens=(128, 32),
        )
    },
    aliases=("qwen3_vl", "qwen3_vl_vision_model"),
    reason="DeepStack adds states of its blocks to the LLM's first blocks; the runtime has one edge",
    make=_qwen3_vl,
    image_tokens=lambda config, height_px, width_px: image_tokens(
        {"patch_size": _PATCH_PX, **config}, height_px, width_px
    ),
)
