"""Parakeet's encoder, a FastConformer: a conformer whose attention adds scores of relative positions."""

from dataclasses import replace
from typing import Any

from workbench.data.corpus import ItemTokens, mel_frames
from workbench.model.config_fields import Config, attention_bias, count, flag, heads_of, text, whole
from workbench.model.families.family import EXAMPLE_WIDTH, Encoder, Example, Tower
from workbench.model.families.phi4_audio import strided_stem
from workbench.model.layer import Attention, Layer, LayerKind, Matmul, Operator, Pointwise
from workbench.model.transformer import (
    RELATIVE,
    RELATIVE_BIAS,
    Mlp,
    Norm,
    attention_operators,
    mlp_operators,
    norm,
    residual,
)

_KERNEL, _STRIDE = "subsampling_conv_kernel_size", "subsampling_conv_stride"
_FACTOR, _BINS, _WINDOW = "subsampling_factor", "num_mel_bins", "conv_kernel_size"


def _parakeet(config: Config) -> Tower:
    """The tower; every block ends with a norm, so there is no final one."""
    width = whole(config, "hidden_size", 1024)
    stem = strided_stem(
        mel_bins=whole(config, _BINS, 80),
        channels=whole(config, "subsampling_conv_channels", 256),
        width=width,
        reduction=whole(config, _FACTOR, 8),
    )
    operators = _operators(config, width)
    blocks = (
        Layer(name=f"block.{index}", kind=LayerKind.BLOCK, operators=operators, out_width=width)
        for index in range(count(config, "num_hidden_layers", 24))
    )
    return Tower(layers=(stem, *blocks), width=width, norm=None)


def _operators(config: Config, width: int) -> tuple[Operator, ...]:
    """Half an MLP, attention, convolution, half an MLP, a norm."""
    mlp = Mlp(
        width=whole(config, "intermediate_size", 4096),
        gated=False,
        activation=text(config, "hidden_act", "silu"),
        bias=flag(config, "attention_bias", default=True),
    )
    return (
        norm("mlp_in_norm", width, Norm.LAYER),
        *mlp_operators("mlp_in", width, mlp),
        residual("mlp_in_residual", width),
        norm("attention_norm", width, Norm.LAYER),
        *_attention(config, width),
        residual("attention_residual", width),
        norm("conv_norm", width, Norm.LAYER),
        *_convolution(config, width),
        residual("conv_residual", width),
        norm("mlp_out_norm", width, Norm.LAYER),
        *mlp_operators("mlp_out", width, mlp),
        residual("mlp_out_residual", width),
        norm("final_norm", width, Norm.LAYER),
    )


def _attention(config: Config, width: int) -> tuple[Operator, ...]:
    """Each query, with one bias, against keys, and with another, against two positions a token.

    Scores of positions are as many products as scores and sums of values together.

    Source: Dai et al. 2019, "Transformer-XL", section 3.3.
    """
    bias = attention_bias(config, default=True)
    plain = heads_of(config, width=width, num=whole(config, "num_attention_heads", 8), causal=False)
    heads = replace(plain, bias=bias)
    operators: list[Operator] = []
    for operator in attention_operators(width, heads):
        if isinstance(operator, Attention):
            inner = heads.q_width
            operators += [
                Matmul(name="relative_k_proj", in_features=width, out_features=inner, tokens_scale=2.0),
                Pointwise(
                    name=RELATIVE_BIAS, width=inner, num_passes=3, weights=(("u", inner), ("v", inner))
                ),
                Attention(
                    name=RELATIVE,
                    num_heads=heads.num,
                    num_kv_heads=heads.num_kv,
                    head_dim=heads.dim,
                    causal=False,
                ),
            ]
        operators.append(operator)
    return tuple(operators)


def _convolution(config: Config, width: int) -> tuple[Operator, ...]:
    """Pointwise with a gate, depthwise over time, a norm by stored statistics, pointwise."""
    bias = flag(config, "convolution_bias", default=True)
    own_bias = (("bias", width),) if bias else ()
    return (
        Matmul(name="conv.in", in_features=width, out_features=2 * width, bias=bias),
        Pointwise(name="conv.glu", width=width, num_passes=3),
        Pointwise(
            name="conv.depthwise",
            width=width,
            num_passes=2,
            weights=(("kernel", width * whole(config, _WINDOW, 9)), *own_bias),
        ),
        norm("conv.batch_norm", width, Norm.LAYER),
        Pointwise(name=f"conv.{text(config, 'hidden_act', 'silu')}", width=width, num_passes=2),
        Matmul(name="conv.out", in_features=width, out_features=width, bias=bias),
    )


def tokens_of(frames: int, factor: int) -> int:
    """Tokens of so many mel frames, which strided convolutions halve, rounded up.

    Example:
        >>> tokens_of(17, 8)
        3
    """
    return -(-frames // factor)


def _clip_tokens(config: Config, duration_s: float) -> tuple[ItemTokens, ...]:
    """One item, whatever its length, with a frame more than the clip has, as frames lie around its samples.

    Source: `_estimate_audio_num_embeddings` of transformers' processor for Nemotron 3 Nano Omni.
    """
    num = tokens_of(1 + mel_frames(duration_s), whole(config, _FACTOR, 8))
    return (ItemTokens(num, num),)


def _check(config: Config) -> None:
    """Raise ValueError for convolutions that are not built."""
    for key, wanted in ((_KERNEL, 3), (_STRIDE, 2)):
        if (given := whole(config, key, wanted)) != wanted:
            raise ValueError(
                f"{config['model_type']}: {key} must be {wanted}, got {given}; nearest: {wanted}"
            )
    factor, bins = whole(config, _FACTOR, 8), whole(config, _BINS, 80)
    if factor < 2 or factor & (factor - 1):
        raise ValueError(f"{config['model_type']}: {_FACTOR} must be a power of 2, got {factor}; nearest: 8")
    if bins % factor:
        raise ValueError(
            f"{config['model_type']}: {_BINS} must be a multiple of {_FACTOR} {factor}, got {bins}; nearest: "
            f"{max(1, round(bins / factor)) * factor}"
        )
    if (window := whole(config, _WINDOW, 9)) % 2 == 0:
        raise ValueError(
            f"{config['model_type']}: {_WINDOW} must be odd, got {window}; nearest: {window + 1}"
        )


_EXAMPLE: dict[str, Any] = {
    "hidden_size": EXAMPLE_WIDTH,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_mel_bins": 80,
    "subsampling_conv_channels": 32,
}
PARAKEET = Encoder(
    name="Parakeet",
    role="audio",
    model_type="parakeet_encoder",
    examples={
        "parakeet": Example(config=_EXAMPLE, tokens=(64, 64)),
        "parakeet, no bias": Example(
            config=_EXAMPLE | {"attention_bias": False, "convolution_bias": False, "scale_input": False},
            tokens=(64, 64),
        ),
    },
    make=_parakeet,
    clip_tokens=_clip_tokens,
    check_config=_check,
    shares_tokens=False,
    shares_weights=False,
)
