"""Phi-4-multimodal's audio encoder, a conformer: half an MLP, attention, convolution, half an MLP."""

from dataclasses import dataclass
from typing import Any

from workbench.data.corpus import ItemTokens, conformer_tokens
from workbench.model.config_fields import Config, count, heads_of, whole
from workbench.model.families.family import EXAMPLE_WIDTH, Encoder, Example, Tower
from workbench.model.layer import Layer, LayerKind, Lookup, Matmul, Operator, Pointwise
from workbench.model.shape import Shape
from workbench.model.transformer import Heads, Mlp, Norm, attention_operators, mlp_operators, norm, residual

SHARED_BIAS = "bias_values.weight"
MOST_TOKENS = 500  # transformers cuts longer clips into windows of this size


@dataclass(frozen=True, slots=True, kw_only=True)
class Conformer:
    """Sizes of a block over [T, width].

    Args:
        width: width of the residual stream.
        num_heads: attention heads.
        ffn: inner width of each of the two gated MLPs.
        conv_width: channels of the gated pointwise convolutions; separable_width: of the
            pointwise half of the depthwise-separable one.
        kernel: kernel size of the depthwise convolution.
        num_buckets: rows of the table of relative attention biases, which all blocks share.
    """

    width: int
    num_heads: int
    ffn: int
    conv_width: int
    separable_width: int
    kernel: int
    num_buckets: int


def _conformer(config: Config) -> Tower:
    """The tower; every block ends with a norm, so there is no final one."""
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
    stem = strided_stem(
        mel_bins=whole(config, "input_size", 80),
        channels=whole(config, "nemo_conv_channels", 1024),
        width=width,
        reduction=whole(config, "time_reduction", 8),
    )
    layers = (stem, *_blocks(shape, count(config, "num_blocks", 24)))
    return Tower(layers=layers, width=width, norm=None)


def _blocks(shape: Conformer, num: int) -> tuple[Layer, ...]:
    """`num` equal blocks, each with the shared bias table as a tied weight."""
    operators = _operators(shape)
    return tuple(
        Layer(
            name=f"block.{index}",
            kind=LayerKind.BLOCK,
            operators=operators,
            out_width=shape.width,
            tied=((SHARED_BIAS, SHARED_BIAS),),
        )
        for index in range(num)
    )


def strided_stem(*, mel_bins: int, channels: int, width: int, reduction: int) -> Layer:
    """Strided 3x3 convolutions over time and mel bins, each halving both, then a matmul.

    A token is one position in time after all convolutions. The first convolution is dense, the
    later ones are depthwise followed by pointwise.
    """
    bins = (mel_bins + 1) // 2
    per_token = bins * reduction / 2  # positions of the first convolution's output per token
    operators: list[Operator] = [
        Matmul(name="conv.0", in_features=9, out_features=channels, bias=True, tokens_scale=per_token),
        Pointwise(name="conv.0.relu", width=channels, num_passes=2, tokens_scale=per_token),
    ]
    for index in range(1, reduction.bit_length() - 1):
        bins = (bins + 1) // 2
        per_token = bins * reduction / 2 ** (index + 1)
        depthwise = (("weight", 9 * channels), ("bias", channels))
        operators += [
            Pointwise(
                name=f"conv.{index}.depthwise",
                width=channels,
                num_passes=5,  # reads four positions for each one it writes
                weights=depthwise,
                tokens_scale=per_token,
            ),
            Matmul(
                name=f"conv.{index}.pointwise",
                in_features=channels,
                out_features=channels,
                bias=True,
                tokens_scale=per_token,
            ),
            Pointwise(name=f"conv.{index}.relu", width=channels, num_passes=2, tokens_scale=per_token),
        ]
    operators.append(Matmul(name="out", in_features=channels * bins, out_features=width, bias=True))
    return Layer(name="embed", kind=LayerKind.EMBED, operators=tuple(operators), out_width=width)


def _operators(shape: Conformer) -> tuple[Operator, ...]:
    w = shape.width
    heads = Heads(
        num=shape.num_heads,
        num_kv=shape.num_heads,
        dim=w // shape.num_heads,
        causal=False,
        bias="qkvo",
    )
    mlp = Mlp(width=shape.ffn, gated=True, activation="swish", bias=True, fused=True)
    return (
        norm("mlp_in_norm", w, Norm.LAYER),
        *mlp_operators("mlp_in", w, mlp),
        residual("mlp_in_residual", w),
        norm("attention_norm", w, Norm.LAYER),
        Lookup(name="bias_values", num_rows=shape.num_buckets, width=shape.num_heads),
        *attention_operators(w, heads),
        residual("attention_residual", w),
        norm("conv_norm", w, Norm.LAYER),
        *_convolution(shape),
        residual("conv_residual", w),
        norm("mlp_out_norm", w, Norm.LAYER),
        *mlp_operators("mlp_out", w, mlp),
        residual("mlp_out_residual", w),
        norm("final_norm", w, Norm.LAYER),
    )


def _convolution(shape: Conformer) -> tuple[Operator, ...]:
    gates = (("b1", shape.conv_width), ("b2", shape.conv_width))
    depthwise = (("weight", shape.width * shape.kernel), ("bias", shape.width))
    return (
        Matmul(name="conv.glu", in_features=shape.width, out_features=2 * shape.conv_width, bias=True),
        Pointwise(name="conv.glu.swish", width=shape.conv_width, num_passes=3, weights=gates),
        Pointwise(name="conv.depthwise", width=shape.width, num_passes=2, weights=depthwise),
        Matmul(name="conv.pointwise", in_features=shape.width, out_features=shape.separable_width, bias=True),
        Pointwise(name="conv.swish", width=shape.separable_width, num_passes=2),
        Matmul(name="conv.out", in_features=shape.width, out_features=shape.conv_width, bias=True),
    )


def _clip_tokens(config: Config, duration_s: float) -> tuple[ItemTokens, ...]:
    """Items of a clip, one for each window of `MOST_TOKENS`, of which the last may be shorter.

    Source: `Phi4MultimodalAudioModel.forward` of transformers, which unfolds the stem's output.
    Differs: the last window is not padded, and the stem does not see across window borders.
    """
    total = conformer_tokens(duration_s, reduction=whole(config, "time_reduction", 8)).tokens_in
    num_full, remainder = divmod(total, MOST_TOKENS)
    return (ItemTokens(MOST_TOKENS, MOST_TOKENS),) * num_full + (
        (ItemTokens(remainder, remainder),) if remainder else ()
    )


def _check_config(config: Config) -> None:
    if config.get("chunk_size", -1) >= 0:
        raise ValueError(
            f"chunk_size must be -1, got {config['chunk_size']}: attention in chunks is not built"
        )
    width = whole(config, "hidden_size", 1024)
    for name in ("ext_pw_out_channel", "depthwise_separable_out_channel"):
        if whole(config, name, 1024) != width:
            raise ValueError(f"{name} must be hidden_size {width}, got {whole(config, name, 1024)}")
    if whole(config, "depthwise_multiplier", 1) != 1:
        raise ValueError(f"depthwise_multiplier must be 1, got {config['depthwise_multiplier']}")


def _shaped(shape: Shape) -> dict[str, Any]:
    return {
        "model_type": "phi4_multimodal_audio",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_blocks": shape.layers,
        "num_attention_heads": shape.heads,
    }


PHI4_AUDIO = Encoder(
    name="Phi-4-multimodal audio",
    role="audio",
    model_type="phi4_multimodal_audio",
    examples={
        "phi-4 audio": Example(
            config={
                "hidden_size": EXAMPLE_WIDTH,
                "intermediate_size": 352,
                "num_blocks": 4,
                "num_attention_heads": 4,
                "input_size": 80,
                "time_reduction": 4,
                "nemo_conv_channels": 32,
                "ext_pw_out_channel": EXAMPLE_WIDTH,
                "depthwise_separable_out_channel": EXAMPLE_WIDTH,
                "bias_max_distance": 64,
            },
            tokens=(64, 64),
        )
    },
    make=_conformer,
    clip_tokens=_clip_tokens,
    longest_item=lambda config: MOST_TOKENS,
    check_config=_check_config,
    shapes={"phi-4-mm-audio": _shaped},
    shares_tokens=False,
    shares_weights=False,
)
