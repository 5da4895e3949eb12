"""Towers of GLM-4V and GLM-OCR: images of any size with a merger, and an interpolated table of positions."""

from dataclasses import replace
from typing import Any

from workbench.data.corpus import ItemTokens, qwen2_vl_tokens
from workbench.model.config_fields import Config, attention_bias, count, flag, heads_of, text, whole
from workbench.model.families.family import EXAMPLE_WIDTH, Encoder, Example, Tower
from workbench.model.families.qwen_vision import image_limits
from workbench.model.layer import Matmul, Operator, Pointwise, TokenCount
from workbench.model.module_layers import block_layers, learned_positions, patch_embedding
from workbench.model.projector import Projector
from workbench.model.transformer import Block, Mlp, Norm, mlp_operators, norm

PATCH_PX = 14
OUT_WIDTH = 4096  # default width of its features
_MIN_PIXELS, _MAX_PIXELS = 112 * 112, 28 * 28 * 15_000  # of all frames of a patch together


def _glm4v(config: Config) -> Tower:
    """The width of its blocks' MLPs is that of the LLM, and their `intermediate_size` the merger's."""
    width, out = whole(config, "hidden_size", 1536), whole(config, "out_hidden_size", OUT_WIDTH)
    heads = heads_of(config, width=width, num=whole(config, "num_heads", 12), causal=False)
    block = Block(
        width=width,
        heads=replace(heads, bias=attention_bias(config, "qkv"), fused=True, rotary=True),
        mlp=Mlp(width=out, gated=True, activation=text(config, "hidden_act", "silu")),
        norm=Norm.RMS,
    )
    positions = (
        norm("post_conv_norm", width, Norm.RMS),
        *learned_positions(_side(config) ** 2, width),
    )
    return _tower(config, block, out, whole(config, "intermediate_size", 13696), positions)


def _glm_ocr(config: Config) -> Tower:
    """Without a table of positions; norms of every head's queries and keys; MLPs as wide as they say."""
    width, out = whole(config, "hidden_size", 1024), whole(config, "out_hidden_size", 1536)
    heads = heads_of(config, width=width, num=whole(config, "num_heads", 16), causal=False)
    has_bias = flag(config, "attention_bias", default=True)
    block = Block(
        width=width,
        heads=replace(heads, bias="qkvo" if has_bias else "", fused=True, rotary=True, qk_norm=Norm.RMS),
        mlp=Mlp(
            width=whole(config, "intermediate_size", 4096),
            gated=True,
            activation=text(config, "hidden_act", "silu"),
            bias=has_bias,
        ),
        norm=Norm.RMS,
    )
    return _tower(config, block, out, out * whole(config, "in_channels", 3))


def _tower(config: Config, block: Block, out: int, ffn: int, positions: tuple[Operator, ...] = ()) -> Tower:
    """Patches of some frames, blocks, and a merger.

    Args:
        out: width of its features; ffn: of the merger's MLP.
        positions: what follows the patches.
    """
    elements = whole(config, "in_channels", 3) * whole(config, "temporal_patch_size", 2)
    embed = patch_embedding(
        patch_elements=elements * whole(config, "patch_size", PATCH_PX) ** 2, width=block.width, bias=True
    )
    merge = whole(config, "spatial_merge_size", 2) ** 2
    return Tower(
        layers=(
            replace(embed, operators=(*embed.operators, *positions)),
            *block_layers(block, count(config, "depth", 24)),
        ),
        width=block.width,
        norm=Norm.RMS,
        merge=merge,
        projectors=(Projector.MERGER,),
        merger=_merger(merge * block.width, out, ffn, block.mlp.activation),
    )


def _merger(square: int, out: int, ffn: int, activation: str) -> tuple[Operator, ...]:
    """A convolution over a square of patches, a matmul, a layer norm, GELU, and a gated MLP."""
    mlp = mlp_operators("merger", out, Mlp(width=ffn, gated=True, activation=activation))
    return tuple(
        replace(operator, tokens=TokenCount.OUT)
        for operator in (
            Matmul(name="downsample", in_features=square, out_features=out, bias=True),
            Matmul(name="merger.proj", in_features=out, out_features=out),
            norm("merger.norm", out, Norm.LAYER),
            Pointwise(name="merger.gelu", width=out, num_passes=2),
            *mlp,
        )
    )


def _side(config: Config) -> int:
    """Side of the table of positions."""
    return whole(config, "image_size", 336) // whole(config, "patch_size", PATCH_PX)


def _native_tokens(config: Config) -> tuple[int, int]:
    """Tokens of the largest image of whole merged patches that has no more patches than the table."""
    merge = whole(config, "spatial_merge_size", 2)
    side = _side(config) // merge
    return (side * merge) ** 2, side**2


def image_tokens(config: Config, height_px: int, width_px: int) -> ItemTokens:
    """Tokens of an image: Qwen2-VL's rule, after an image narrower than a merged patch has grown to one.

    `min_pixels` and `max_pixels` are a checkpoint's `size.shortest_edge` and `size.longest_edge`, and count
    the pixels of all frames of a patch, of which an image has equal ones.

    Source: `smart_resize` of transformers' `Glm4vImageProcessor`.

    Raises:
        ValueError: an image that the rule does not resize, or a smallest area above the largest.
    """
    least, most = whole(config, "min_pixels", _MIN_PIXELS), whole(config, "max_pixels", _MAX_PIXELS)
    if least > most:
        raise ValueError(f"min_pixels must be <= max_pixels {most}, got {least}; nearest: {most}")
    patch, merge = whole(config, "patch_size", PATCH_PX), whole(config, "spatial_merge_size", 2)
    frames, narrow = whole(config, "temporal_patch_size", 2), min(height_px, width_px)
    if 1 <= narrow < patch * merge:
        grow = max(patch * merge / height_px, patch * merge / width_px)
        height_px, width_px = int(height_px * grow), int(width_px * grow)
    return qwen2_vl_tokens(
        height_px,
        width_px,
        patch_px=patch,
        merge_side=merge,
        min_pixels=least / frames,
        max_pixels=most / frames,
    )


def _processed(processor: Config) -> dict[str, Any]:
    size = processor.get("size")
    return image_limits({"size": size})


GLM4V_VISION = Encoder(
    name="GLM-4V vision",
    role="vision",
    model_type="glm4v_vision",
    aliases=("glm4v_moe_vision",),
    examples={
        "glm-4v": Example(
            config={
                "depth": 4,
                "hidden_size": EXAMPLE_WIDTH,
                "intermediate_size": 352,
                "num_heads": 4,
                "image_size": 32,
                "patch_size": 4,
                "out_hidden_size": EXAMPLE_WIDTH,
            },
            tokens=(128, 32),
        )
    },
    make=_glm4v,
    native_tokens=_native_tokens,
    image_tokens=image_tokens,
    processed=_processed,
    unprocessed=(
        f"images are brought to {_MIN_PIXELS // 2} to {_MAX_PIXELS // 2} pixels, as transformers does where "
        "no preprocessor_config.json has a size"
    ),
    shares_tokens=False,
)
GLM_OCR_VISION = replace(
    GLM4V_VISION,
    name="GLM-OCR vision",
    model_type="glm_ocr_vision",
    aliases=(),
    examples={
        "glm-ocr": Example(
            config={
                "depth": 4,
                "hidden_size": EXAMPLE_WIDTH,
                "intermediate_size": 352,
                "num_heads": 4,
                "patch_size": 4,
                "out_hidden_size": EXAMPLE_WIDTH,
            },
            tokens=(128, 32),
        )
    },
    make=_glm_ocr,
    native_tokens=None,
)
