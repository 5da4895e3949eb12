"""Vision towers that are plain transformers over patches: one builder, and the differences of families."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, floor
from typing import Any

from workbench.data.corpus import ItemTokens
from workbench.model.config_fields import Config, count, flag, heads_of, text, whole
from workbench.model.families import tiles
from workbench.model.families.family import EXAMPLE_VIT, Encoder, Example, Tower
from workbench.model.layer import Layer, LayerKind, Operator, Pointwise
from workbench.model.module_layers import block_layers, patch_embedding
from workbench.model.projector import Projector
from workbench.model.shape import Shape
from workbench.model.transformer import Block, Mlp, Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Vit:
    """One kind of tower.

    Args:
        width, heads, ffn, layers, patch, image_px, activation: defaults of the configuration.
        bias: which projections of attention have one; mlp_bias, patch_bias: whether MLP and patches have.
        gated: whether the MLP is gated.
        norm: of its blocks; pre_norm, final_norm: before and after them.
        qk_norm: of every head's queries and keys.
        rotary: whether queries and keys are rotated.
        has_class_token: whether a class token precedes the patches.
        has_table: whether positions are a learned table, for images of one size.
    """

    width: int = 768
    heads: int = 12
    ffn: int = 3072
    layers: int = 12
    patch: int
    image_px: int = 224
    activation: str
    bias: str = "qkvo"
    mlp_bias: bool = True
    patch_bias: bool = True
    gated: bool = False
    norm: Norm = Norm.LAYER
    pre_norm: Norm | None = None
    final_norm: Norm | None = Norm.LAYER
    qk_norm: Norm | None = None
    rotary: bool = False
    has_class_token: bool = False
    has_table: bool = True


def tower_of(config: Config, vit: Vit) -> Tower:
    """Embed and blocks, without a pooling head: the projector reads every patch."""
    width, num = whole(config, "hidden_size", vit.width), whole(config, "num_attention_heads", vit.heads)
    heads = heads_of({"model_type": config["model_type"]}, width=width, num=num, causal=False)
    block = Block(
        width=width,
        heads=replace(heads, bias=vit.bias, rotary=vit.rotary, qk_norm=vit.qk_norm),
        mlp=Mlp(
            width=whole(config, "intermediate_size", vit.ffn),
            gated=vit.gated,
            activation=text(config, "hidden_act", vit.activation),
            bias=vit.mlp_bias,
        ),
        norm=vit.norm,
    )
    patch = whole(config, "patch_size", vit.patch)
    side = whole(config, "image_size", vit.image_px) // patch
    embed = patch_embedding(
        patch_elements=whole(config, "num_channels", 3) * patch**2,
        width=width,
        bias=vit.patch_bias,
        num_patches=side**2 if vit.has_table else None,
        has_class_token=vit.has_class_token,
        pre_norm=vit.pre_norm,
    )
    layers = (embed, *block_layers(block, count(config, "num_hidden_layers", vit.layers)))
    return Tower(layers=layers, width=width, norm=vit.final_norm)


def siglip(config: Config) -> Tower:
    return tower_of(config, _SIGLIP)


_SIGLIP = Vit(patch=16, activation="gelu_pytorch_tanh")
_IDEFICS3 = replace(_SIGLIP, width=1152, heads=16, patch=32)
# The projector reads the last block's patches; the final norm is only for the class token.
_CLIP = Vit(
    patch=32,
    activation="quick_gelu",
    patch_bias=False,
    pre_norm=Norm.LAYER,
    final_norm=None,
    has_class_token=True,
)
# Its final norm includes the class token, which is dropped afterwards.
_LLAMA4 = Vit(
    heads=16,
    ffn=5632,
    layers=34,
    patch=14,
    image_px=448,
    activation="gelu",
    patch_bias=False,
    pre_norm=Norm.LAYER,
    rotary=True,
    has_class_token=True,
)
# Images of any size with rotary positions; a norm after the patches and none at the end.
_PIXTRAL = Vit(
    width=1024,
    heads=16,
    ffn=4096,
    layers=24,
    patch=16,
    activation="gelu",
    bias="",
    mlp_bias=False,
    patch_bias=False,
    gated=True,
    norm=Norm.RMS,
    pre_norm=Norm.RMS,
    final_norm=None,
    rotary=True,
    has_table=False,
)
_AIMV2 = Vit(
    width=1024,
    heads=8,
    ffn=2816,
    layers=24,
    patch=14,
    activation="silu",
    gated=True,
    norm=Norm.RMS,
    pre_norm=Norm.RMS,
    final_norm=Norm.RMS,
)
_DINOV2 = Vit(patch=14, activation="gelu", has_class_token=True)
_INTERNVIT = replace(_DINOV2, width=1024, heads=16, ffn=4096, layers=24, image_px=448)


def _aimv2(config: Config) -> Tower:
    """Images of one size with learned positions, or of any size with sinusoidal ones."""
    bias, has_table = "qkvo" if flag(config, "qkv_bias") else "", not flag(config, "is_native")
    return tower_of(
        config, replace(_AIMV2, bias=bias, mlp_bias=flag(config, "mlp_bias"), has_table=has_table)
    )


def _dinov2(config: Config) -> Tower:
    """Class token, learned positions, blocks; the mask token of pre-training is left out."""
    ffn = whole(config, "hidden_size", _DINOV2.width) * whole(config, "mlp_ratio", 4)
    bias, gated = "qkvo" if flag(config, "qkv_bias", default=True) else "o", flag(config, "use_swiglu_ffn")
    sizes: dict[str, Any] = {"intermediate_size": ffn}
    if gated:
        sizes = {"intermediate_size": (ffn * 2 // 3 + 7) // 8 * 8, "hidden_act": "silu"}
    return each_block(tower_of({**config, **sizes}, replace(_DINOV2, bias=bias, gated=gated)), with_scales)


def _internvit(config: Config) -> Tower:
    """InternViT, whose norms of queries and keys span all heads at once.

    There is no final norm where the configuration pools by the mean, which is the default.

    Raises:
        ValueError: positions that are not a table, or an unknown `norm_type`.
    """
    if not flag(config, "use_absolute_position_embeddings", default=True):
        raise ValueError(f"{config['model_type']}: use_absolute_position_embeddings must be true")
    norms = {"layer_norm": Norm.LAYER, "rms_norm": Norm.RMS}
    kind = text(config, "norm_type", "layer_norm")
    if kind not in norms:
        raise ValueError(f"{config['model_type']}: norm_type must be one of {', '.join(norms)}, got {kind!r}")
    vit = replace(
        _INTERNVIT,
        bias="qkvo" if flag(config, "attention_bias") else "o",
        norm=norms[kind],
        qk_norm=Norm.RMS if flag(config, "use_qk_norm") else None,
        final_norm=None if flag(config, "use_mean_pooling", default=True) else Norm.LAYER,
    )
    return each_block(tower_of(config, vit), lambda block: _with_wide_qk_norm(with_scales(block)))


def each_block(tower: Tower, change: Callable[[Layer], Layer]) -> Tower:
    layers = (change(layer) if layer.kind is LayerKind.BLOCK else layer for layer in tower.layers)
    return replace(tower, layers=tuple(layers))


def with_scales(layer: Layer) -> Layer:
    """One learned factor per channel before each residual sum."""
    operators: list[Operator] = []
    for operator in layer.operators:
        if operator.name.endswith("_residual"):
            name = operator.name.replace("_residual", "_scale")
            weights = (("weight", layer.out_width),)
            operators.append(Pointwise(name=name, width=layer.out_width, num_passes=2, weights=weights))
        operators.append(operator)
    return replace(layer, operators=tuple(operators))


def _with_wide_qk_norm(layer: Layer) -> Layer:
    def widened(operator: Operator) -> Operator:
        if isinstance(operator, Pointwise) and operator.name in ("q_norm", "k_norm"):
            return replace(operator, weights=(("weight", operator.width),))
        return operator

    return replace(layer, operators=tuple(widened(operator) for operator in layer.operators))


def _llama4(config: Config) -> Tower:
    """Llama 4's tower, with GELU whatever the configuration says, as in transformers."""
    tower = tower_of({**config, "hidden_act": _LLAMA4.activation}, _LLAMA4)
    return replace(tower, projectors=(Projector.LINEAR, Projector.MLP))


def check_turned_pairs(config: Config, vit: Vit) -> None:
    """Raise ValueError for heads whose pairs of channels do not divide between rows and columns."""
    heads = whole(config, "num_attention_heads", vit.heads)
    channels = whole(config, "hidden_size", vit.width) // heads
    if channels % 4:
        raise ValueError(
            "half of a head's pairs of channels turn by the row, half by the column: want a multiple of 4, "
            f"got {channels} of a head; nearest: {channels // 4 * 4 + 4}"
        )


def _pixtral_tokens(config: Config, height_px: int, width_px: int) -> ItemTokens:
    """Patches of the image, in whole squares where a projector merges them.

    An image larger than `longest_edge`, a key of a checkpoint's processor, or else than `image_size`, is
    scaled down to it first, with sides of whole pixels.

    Source: `get_resize_output_image_size` of transformers' Pixtral image processor.

    Raises:
        ValueError: a side that would vanish.
    """
    longest = whole(config, "longest_edge", whole(config, "image_size", 1024))
    side = whole(config, "spatial_merge_size", 1)
    square_px = side * whole(config, "patch_size", 16)
    shrunk = max(1.0, height_px / longest, width_px / longest)
    if min(height_px, width_px) < shrunk:
        raise ValueError(
            f"image of {height_px} x {width_px} px: scaled down to {longest} px, its shorter side must keep "
            f"a pixel; nearest: a shorter side of {ceil(shrunk)} px"
        )
    rows, columns = (ceil(floor(px / shrunk) / square_px) for px in (height_px, width_px))
    return ItemTokens(rows * columns * side**2, rows * columns)


def _shaped_clip(shape: Shape) -> dict[str, Any]:
    activation = "quick_gelu" if shape.name.startswith("clip-vit-l") else "gelu"
    return _shaped(shape) | {"model_type": "clip_vision_model", "hidden_act": activation}


def shaped_siglip(shape: Shape) -> dict[str, Any]:
    """A row of the zoo as SigLIP's configuration."""
    return _shaped(shape) | {"model_type": "siglip_vision_model", "vision_use_head": False}


def _shaped(shape: Shape) -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "image_size": shape.image_px,
        "patch_size": shape.patch_px,
    }


CLIP = Encoder(
    name="CLIP",
    role="vision",
    model_type="clip_vision_model",
    examples={"clip": Example(config=EXAMPLE_VIT, tokens=(65, 64))},
    make=lambda config: tower_of(config, _CLIP),
    processed=tiles.of_grids,
    shapes={"clip": _shaped_clip, "vit": _shaped_clip},
)
SIGLIP = Encoder(
    name="SigLIP",
    role="vision",
    model_type="siglip_vision_model",
    examples={"siglip": Example(config=EXAMPLE_VIT, tokens=(64, 64))},
    make=siglip,
    processed=tiles.of_grids,
    shapes={"siglip": shaped_siglip},
)
IDEFICS3_VISION = Encoder(
    name="Idefics3 vision, SmolVLM vision",
    role="vision",
    model_type="idefics3_vision",
    aliases=("smolvlm_vision",),
    examples={"idefics3": Example(config=EXAMPLE_VIT, tokens=(64, 64))},
    make=lambda config: tower_of(config, _IDEFICS3),
    tiles=tiles.idefics3,
    processed=tiles.of_longest_edge,
)
LLAMA4_VISION = Encoder(
    name="Llama 4's tower",
    role="vision",
    model_type="llama4_vision_model",
    examples={"llama4 vision": Example(config=EXAMPLE_VIT, tokens=(65, 64))},
    aliases=("llama4",),
    make=_llama4,
    tiles=tiles.llama4,
    processed=tiles.of_limits,
    takes_native_only=lambda config: True,
    check_config=partial(check_turned_pairs, vit=_LLAMA4),
    shares_tokens=False,
)
PIXTRAL = Encoder(
    name="Pixtral",
    role="vision",
    model_type="pixtral",
    examples={"pixtral": Example(config=EXAMPLE_VIT | {"hidden_act": "silu"}, tokens=(64, 64))},
    make=lambda config: tower_of(config, _PIXTRAL),
    image_tokens=_pixtral_tokens,
    processed=tiles.of_longest_edge,
    shares_tokens=False,
)
AIMV2 = Encoder(
    name="AIMv2",
    role="vision",
    model_type="aimv2_vision_model",
    make=_aimv2,
    takes_native_only=lambda config: not flag(config, "is_native"),
    examples={
        "aimv2": Example(config=EXAMPLE_VIT, tokens=(64, 64)),
        "aimv2, native": Example(config=EXAMPLE_VIT | {"is_native": True, "qkv_bias": True}, tokens=(48, 48)),
    },
)
OVIS2_VISION = replace(
    AIMV2,
    name="Ovis 2 vision",
    model_type="ovis2_vision",
    takes_native_only=lambda config: True,
    tiles=tiles.ovis2,
    processed=tiles.of_crops,
    unprocessed="images are cut into tiles, as transformers does where preprocessor_config.json says so",
    examples={"ovis2 vision": Example(config=EXAMPLE_VIT, tokens=(64, 64))},
)
_RATIO = EXAMPLE_VIT | {"mlp_ratio": 3}
DINOV2 = Encoder(
    name="DINOv2",
    role="vision",
    model_type="dinov2",
    examples={
        "dinov2": Example(config=_RATIO, tokens=(65, 64)),
        "dinov2, gated": Example(config=_RATIO | {"use_swiglu_ffn": True}, tokens=(65, 64)),
    },
    make=_dinov2,
)
INTERNVIT = Encoder(
    name="InternViT",
    role="vision",
    model_type="internvl_vision",
    examples={
        "internvit": Example(config=EXAMPLE_VIT, tokens=(65, 64)),
        "internvit, rms": Example(
            config=EXAMPLE_VIT | {"norm_type": "rms_norm", "use_qk_norm": True, "use_mean_pooling": False},
            tokens=(65, 64),
        ),
    },
    make=_internvit,
    tiles=tiles.internvl,
    processed=tiles.of_limits,
)
