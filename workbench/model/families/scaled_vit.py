"""Vision transformers whose blocks scale what they add: DINOv2 and InternViT."""

from dataclasses import replace

from workbench.model.config_fields import Config, count, heads_of, text, whole
from workbench.model.families.family import EXAMPLE_VIT, Encoder, Example, Tower
from workbench.model.layer import Layer, Operator, Pointwise
from workbench.model.module_layers import block_layers, patch_embedding
from workbench.model.transformer import Block, Mlp, Norm, vit_block


def _dinov2(config: Config) -> Tower:
    """Class token, learned positions, blocks. The mask token of its pre-training is left out."""
    width = whole(config, "hidden_size", 768)
    num_heads = whole(config, "num_attention_heads", 12)
    heads_of(config, width=width, num=num_heads)
    ffn = width * whole(config, "mlp_ratio", 4)
    bias = "qkvo" if config.get("qkv_bias", True) else "o"
    block = vit_block(
        width=width, num_heads=num_heads, ffn=ffn, activation=text(config, "hidden_act", "gelu"), bias=bias
    )
    if config.get("use_swiglu_ffn"):
        gated = (ffn * 2 // 3 + 7) // 8 * 8
        block = replace(block, mlp=Mlp(width=gated, gated=True, activation="silu", bias=True))
    embed = _embedding(config, width, image_px=224)
    layers = (embed, *_blocks(block, count(config, "num_hidden_layers", 12)))
    return Tower(layers=layers, width=width, norm=Norm.LAYER)


def _internvit(config: Config) -> Tower:
    """Its norms of queries and keys go over all heads at once.

    Without a final norm where the configuration pools by the mean, which it does by default.

    Raises:
        ValueError: positions that are no table, or an unknown `norm_type`.
    """
    if not config.get("use_absolute_position_embeddings", True):
        raise ValueError(f"{config['model_type']}: use_absolute_position_embeddings must be true")
    norms = {"layer_norm": Norm.LAYER, "rms_norm": Norm.RMS}
    kind = text(config, "norm_type", "layer_norm")
    if kind not in norms:
        raise ValueError(f"{config['model_type']}: norm_type must be one of {', '.join(norms)}, got {kind!r}")
    width = whole(config, "hidden_size", 1024)
    num_heads = whole(config, "num_attention_heads", 16)
    heads_of(config, width=width, num=num_heads)
    plain = vit_block(
        width=width,
        num_heads=num_heads,
        ffn=whole(config, "intermediate_size", 4096),
        activation=text(config, "hidden_act", "gelu"),
        bias="qkvo" if config.get("attention_bias") else "o",
    )
    qk_norm = Norm.RMS if config.get("use_qk_norm") else None
    block = replace(plain, norm=norms[kind], heads=replace(plain.heads, qk_norm=qk_norm))
    embed = _embedding(config, width, image_px=448)
    blocks = _blocks(block, count(config, "num_hidden_layers", 24))
    return Tower(
        layers=(embed, *(_with_wide_qk_norm(each) for each in blocks)),
        width=width,
        norm=None if config.get("use_mean_pooling", True) else Norm.LAYER,
    )


def _embedding(config: Config, width: int, *, image_px: int) -> Layer:
    patch = whole(config, "patch_size", 14)
    return patch_embedding(
        patch_elements=whole(config, "num_channels", 3) * patch**2,
        width=width,
        bias=True,
        num_patches=(whole(config, "image_size", image_px) // patch) ** 2,
        has_class_token=True,
    )


def _blocks(block: Block, num: int) -> tuple[Layer, ...]:
    return tuple(_with_scales(layer) for layer in block_layers(block, num))


def _with_scales(layer: Layer) -> Layer:
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


_DINOV2 = EXAMPLE_VIT | {"mlp_ratio": 3}
DINOV2 = Encoder(
    name="DINOv2",
    role="vision",
    model_type="dinov2",
    examples={
        "dinov2": Example(config=_DINOV2, tokens=(65, 64)),
        "dinov2, gated": Example(config=_DINOV2 | {"use_swiglu_ffn": True}, tokens=(65, 64)),
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
            is_cut=False,
        ),
    },
    make=_internvit,
)
