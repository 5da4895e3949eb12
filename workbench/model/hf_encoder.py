"""Vision and audio encoders as transformers builds them: embed, blocks, and how they end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from workbench.model.config_fields import Config, heads_of, text, whole
from workbench.model.conformer import Conformer, conformer_layers, conformer_stem
from workbench.model.layer import Layer
from workbench.model.mllama import VISION_MODEL, tower_layers
from workbench.model.module_layers import (
    Projector,
    block_layers,
    patch_embedding,
    unequal_block_layers,
    whisper_stem,
)
from workbench.model.scaled_vit import dinov2_layers, internvit_layers
from workbench.model.transformer import Block, Heads, Mlp, Norm, vit_block


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """An encoder before its projector: its layers and how it ends.

    Args:
        layers: up to the last block.
        width: of its output.
        norm: its final norm, None where it has none.
        merge: tokens that become one behind it.
        projectors: those it can end with; the first is its own.
        is_read: whether its tokens are read by cross-attention, all of them, instead of standing in
            the LLM's sequence.
    """

    layers: tuple[Layer, ...]
    width: int
    norm: Norm | None
    merge: int = 1
    projectors: tuple[Projector, ...] = (Projector.MLP, Projector.LINEAR)
    is_read: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vit:
    """What tells CLIP's and SigLIP's towers apart."""

    patch: int
    pre_norm: Norm | None
    final_norm: Norm | None
    class_token: bool
    activation: str


def _fixed_size_vit(config: Config, kind: _Vit) -> Encoder:
    width = whole(config, "hidden_size", 768)
    num_heads = whole(config, "num_attention_heads", 12)
    heads_of(config, width=width, num=num_heads)
    block = vit_block(
        width=width,
        num_heads=num_heads,
        ffn=whole(config, "intermediate_size", 3072),
        activation=text(config, "hidden_act", kind.activation),
    )
    patch = whole(config, "patch_size", kind.patch)
    embed = patch_embedding(
        patch_elements=whole(config, "num_channels", 3) * patch**2,
        width=width,
        bias=not kind.class_token,
        num_patches=(whole(config, "image_size", 224) // patch) ** 2,
        has_class_token=kind.class_token,
        pre_norm=kind.pre_norm,
    )
    layers = (embed, *block_layers(block, whole(config, "num_hidden_layers", 12)))
    return Encoder(layers=layers, width=width, norm=kind.final_norm)


def _siglip(config: Config) -> Encoder:
    """Without the pooling head: every patch goes on to the projector."""
    tower = _Vit(
        patch=16, pre_norm=None, final_norm=Norm.LAYER, class_token=False, activation="gelu_pytorch_tanh"
    )
    return _fixed_size_vit(config, tower)


def _clip(config: Config) -> Encoder:
    """The last block's patches go to the projector; the final norm is the class token's alone."""
    tower = _Vit(patch=32, pre_norm=Norm.LAYER, final_norm=None, class_token=True, activation="quick_gelu")
    return _fixed_size_vit(config, tower)


def _qwen2_vl(config: Config) -> Encoder:
    width = whole(config, "embed_dim", 1280)
    activation = text(config, "hidden_act", "quick_gelu")
    block = Block(
        width=width,
        heads=_qwen_heads(config, width),
        mlp=Mlp(width=width * whole(config, "mlp_ratio", 4), gated=False, activation=activation, bias=True),
        norm=Norm.LAYER,
    )
    return _qwen_vision(config, (block,) * whole(config, "depth", 32))


def _qwen2_5_vl(config: Config) -> Encoder:
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
    listed = config.get("fullatt_block_indexes", (7, 15, 23, 31))
    blocks = [whole_image if i in listed else windowed for i in range(whole(config, "depth", 32))]
    return _qwen_vision(config, blocks)


def _qwen_heads(config: Config, width: int) -> Heads:
    heads = heads_of(config, width=width, num=whole(config, "num_heads", 16), causal=False)
    return replace(heads, bias="qkvo", fused=True, rotary=True)


def _qwen_vision(config: Config, blocks: Sequence[Block]) -> Encoder:
    elements = whole(config, "in_channels", whole(config, "in_chans", 3))
    elements *= whole(config, "patch_size", 14) ** 2 * whole(config, "temporal_patch_size", 2)
    embed = patch_embedding(patch_elements=elements, width=blocks[0].width, bias=False)
    return Encoder(
        layers=(embed, *unequal_block_layers(blocks)),
        width=blocks[0].width,
        norm=blocks[0].norm,
        merge=whole(config, "spatial_merge_size", 2) ** 2,
        projectors=(Projector.MERGER,),
    )


def _dinov2(config: Config) -> Encoder:
    return Encoder(layers=dinov2_layers(config), width=whole(config, "hidden_size", 768), norm=Norm.LAYER)


def _internvit(config: Config) -> Encoder:
    """Without a final norm where the configuration pools by the mean, which it does by default."""
    norm = None if config.get("use_mean_pooling", True) else Norm.LAYER
    return Encoder(layers=internvit_layers(config), width=whole(config, "hidden_size", 1024), norm=norm)


def _pixtral(config: Config) -> Encoder:
    """Images of any size under rotary positions; a norm behind the patches and none at the end."""
    width = whole(config, "hidden_size", 1024)
    num_heads = whole(config, "num_attention_heads", 16)
    heads = heads_of({"model_type": config["model_type"]}, width=width, num=num_heads, causal=False)
    activation = text(config, "hidden_act", "gelu")
    block = Block(
        width=width,
        heads=replace(heads, rotary=True),
        mlp=Mlp(width=whole(config, "intermediate_size", 4096), gated=True, activation=activation),
        norm=Norm.RMS,
    )
    patch = whole(config, "patch_size", 16)
    elements = whole(config, "num_channels", 3) * patch**2
    embed = patch_embedding(patch_elements=elements, width=width, bias=False, pre_norm=Norm.RMS)
    layers = (embed, *block_layers(block, whole(config, "num_hidden_layers", 24)))
    return Encoder(layers=layers, width=width, norm=None)


def _mllama(config: Config) -> Encoder:
    """Tiles of an image; the projector reads the last output and some earlier ones side by side."""
    layers = tower_layers(config)
    return Encoder(
        layers=layers,
        width=layers[-1].out_width,
        norm=None,
        projectors=(Projector.LINEAR, Projector.MLP),
        is_read=True,
    )


def _whisper(config: Config) -> Encoder:
    """The encoder half; the decoder's dimensions are ignored. Keys have no bias."""
    width = whole(config, "d_model", 384)
    num_heads = whole(config, "encoder_attention_heads", 6)
    heads_of(config, width=width, num=num_heads)
    block = vit_block(
        width=width,
        num_heads=num_heads,
        ffn=whole(config, "encoder_ffn_dim", 1536),
        activation=text(config, "activation_function", "gelu"),
        bias="qvo",
    )
    stem = whisper_stem(
        mel_bins=whole(config, "num_mel_bins", 80),
        width=width,
        num_positions=whole(config, "max_source_positions", 1500),
    )
    layers = (stem, *block_layers(block, whole(config, "encoder_layers", 4)))
    return Encoder(layers=layers, width=width, norm=Norm.LAYER)


def _qwen2_audio(config: Config) -> Encoder:
    """Whisper's encoder; two of its tokens become one before the final norm."""
    sizes = {
        "d_model": 1280,
        "encoder_layers": 32,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "num_mel_bins": 128,
    }
    given = {key: value for key, value in config.items() if value is not None}
    projectors = (Projector.LINEAR, Projector.MLP)
    return replace(_whisper({**sizes, **given}), merge=2, projectors=projectors)


def _conformer(config: Config) -> Encoder:
    """Phi-4-multimodal's. Every block ends with a norm, so there is no final one."""
    width = whole(config, "hidden_size", 1024)
    num_heads = whole(config, "num_attention_heads", 16)
    heads_of(config, width=width, num=num_heads)
    shape = Conformer(
        width=width,
        num_heads=num_heads,
        ffn=whole(config, "intermediate_size", 1536),
        conv_width=whole(config, "ext_pw_out_channel", 1024),
        separable_width=whole(config, "depthwise_separable_out_channel", 1024),
        kernel=whole(config, "kernel_size", 3),
        num_buckets=2 * whole(config, "bias_max_distance", 1000),
    )
    stem = conformer_stem(
        mel_bins=whole(config, "input_size", 80),
        channels=whole(config, "nemo_conv_channels", 1024),
        width=width,
        reduction=whole(config, "time_reduction", 8),
    )
    layers = (stem, *conformer_layers(shape, whole(config, "num_blocks", 24)))
    return Encoder(layers=layers, width=width, norm=None)


ENCODERS: dict[str, Callable[[Config], Encoder]] = {
    "siglip_vision_model": _siglip,
    "clip_vision_model": _clip,
    "qwen2_vl_vision": _qwen2_vl,
    "qwen2_5_vl_vision": _qwen2_5_vl,
    "dinov2": _dinov2,
    "internvl_vision": _internvit,
    "pixtral": _pixtral,
    VISION_MODEL: _mllama,
    "whisper": _whisper,
    "qwen2_audio_encoder": _qwen2_audio,
    "phi4_multimodal_audio": _conformer,
}
