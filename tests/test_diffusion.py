"""The UNet: how its work grows with the latent, and its convolutions counted by hand."""

import pytest

from workbench.cost.roofline import Grid, RowWork, Work
from workbench.memory.layer import layer_bytes, saved_bytes
from workbench.memory.setting import Setting
from workbench.model.diffusion import Unet, unet_layers
from workbench.model.frozen import Needs
from workbench.model.layer import Attention, Matmul
from workbench.model.transformer import Heads, Keys, cross_attention_operators
from workbench.plan.kernels import Kernels


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


def test_unet_keeps_each_tensor_once():
    """Each element of a convolution's input once; keys and values of a prompt have its rows."""
    fine, coarse, time, prompt = 256, 64, 4 * 64, 7

    def residual(width: int, out: int, positions: int) -> int:
        """Inputs of norm, SiLU and convolution, twice, and of time's product; a shortcut reads the first."""
        return 3 * positions * (width + out) + time

    def transformer(width: int, positions: int) -> int:
        """Inputs of four norms, of the two outer products, self-attention, cross-attention, and the MLP."""
        scores = 2 * positions * (width // 32) * 2  # a float32 log-sum-exp a head and query of both
        own = 4 + 2 + (1 + 4) + (1 + 2) + (1 + 8 + 4)
        return own * positions * width + prompt * (48 + 2 * width) + scores

    blocks = [
        residual(64, 64, fine) + transformer(64, fine) + fine * 64,
        residual(64, 128, coarse),
        2 * residual(128, 128, coarse) + transformer(128, coarse),
        residual(256, 128, coarse),
        residual(192, 128, coarse) + fine * 128,
        residual(192, 64, fine) + transformer(64, fine),
        residual(128, 64, fine) + transformer(64, fine),
    ]
    expected = [64 + time + fine * 4, *blocks, fine * 3 * 64]
    work = Work((RowWork(fine, fine, fine**2),))
    kept = [saved_bytes(each, Needs(True, True), work, Grid(), 2) for each in unet_layers(unet_of(16))]
    assert kept == [2 * elements for elements in expected]


@pytest.mark.parametrize("kernels", [each for each in Kernels if each.is_megatron])
def test_unet_keeps_as_much_and_masks_of_dropout_with_megatrons_kernels(kernels: Kernels):
    """Blocks of convolutions alone, 128 wide at 8 x 8; a sum's mask has a byte an element."""
    setting = Setting(Work((RowWork(256, 256, 256**2),)), Grid(), 2, is_gathered=False)
    _, _, down, _, up, *_ = unet_layers(unet_of(16))
    for block, width in ((down, 64), (up, 256)):
        kept = layer_bytes(block, Needs(True, True), setting, kernels).kept.num_bytes
        assert kept == 2 * (3 * 64 * (width + 128) + 4 * 64) + 64 * 128
