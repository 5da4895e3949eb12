"""The UNet: how its work grows with the latent, and its convolutions counted by hand."""

import pytest

from workbench.model.diffusion import Unet, unet_layers
from workbench.model.layer import Attention, Matmul
from workbench.model.transformer import Heads, Keys, cross_attention_operators


def unet_of(side: int) -> Unet:
    return Unet(
        channels=(64, 128),
        attention_levels=1,
        blocks=1,
        head_dim=32,
        latent_channels=4,
        latent_side=side,
        prompt_width=48,
        prompt_tokens=7,
    )


def flop(unet: Unet, wanted: str) -> float:
    """Forward FLOP per image of the operators whose name contains `wanted`."""
    total = 0.0
    for operator in (op for layer in unet_layers(unet) for op in layer.operators if wanted in op.name):
        rows = unet.latent_side**2 * getattr(operator, "tokens_scale", 0.0)
        if isinstance(operator, Matmul):
            total += 2 * rows * operator.in_features * operator.out_features
        elif isinstance(operator, Attention):
            total += 4 * rows * operator.num_keys * operator.num_heads * operator.head_dim
    return total


@pytest.mark.parametrize(
    ("operators", "growth"),
    [
        ("conv1", 4),
        ("mlp.down", 4),
        ("self.attention", 16),
        ("cross.attention", 4),
        ("cross.k", 1),
        ("time_projection", 1),
    ],
)
def test_unet_flop_grows_with_the_side_of_the_latent(operators, growth):
    assert flop(unet_of(32), operators) / flop(unet_of(16), operators) == pytest.approx(growth)


def test_unet_convolution_flop():
    """Two levels: 64 channels at 16 x 16, 128 at 8 x 8; the way up reads the skips as well."""
    multiply_adds = 9 * (
        256 * (64 * 64 + 64 * 64)  # down, level 0
        + 64 * (64 * 128 + 128 * 128)  # down, level 1
        + 2 * 64 * (128 * 128 + 128 * 128)  # middle
        + 64 * ((128 + 128) * 128 + 128 * 128 + (128 + 64) * 128 + 128 * 128)  # up, level 1
        + 256 * ((128 + 64) * 64 + 64 * 64 + (64 + 64) * 64 + 64 * 64)  # up, level 0
    )
    assert flop(unet_of(16), "conv1") + flop(unet_of(16), "conv2") == 2 * multiply_adds


def test_cross_attention_reads_the_prompt_once_per_image():
    heads = Heads(num=4, num_kv=2, dim=8, causal=False, bias="o")
    keys = Keys(width=48, num=7, per_token=7 / 100)
    operators = {op.name: op for op in cross_attention_operators("cross", 32, heads, keys)}
    assert list(operators) == ["cross.q", "cross.k", "cross.v", "cross.attention", "cross.o"]
    assert (operators["cross.k"].in_features, operators["cross.k"].out_features) == (48, 16)
    assert 100 * operators["cross.v"].tokens_scale == pytest.approx(7)
    assert operators["cross.attention"].num_keys == 7
    assert [operators[f"cross.{letter}"].bias for letter in "qkvo"] == [False, False, False, True]
