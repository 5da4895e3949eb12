"""The UNet of latent diffusion models as layers: residual convolutions and transformers per level."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from workbench.model.layer import Layer, LayerKind, Matmul, Operator, Pointwise
from workbench.model.projector import Projection, Projector, projector_layer
from workbench.model.transformer import CROSS, Heads, Keys, cross_attention_operators


@dataclass(frozen=True, slots=True, kw_only=True)
class Unet:
    """A UNet for latents of one fixed size; a token is one position of the full-size latent.

    Args:
        channels: channels of each level; every level but the last halves both sides.
        attention_levels: number of levels, from the finest, with transformers.
        blocks: residual blocks per level on the way down; one more on the way up.
        head_dim: head width of all attentions.
        latent_channels: channels of input and output; latent_side: positions along one side.
        prompt_width, prompt_tokens: sizes of the text that cross-attention reads.
    """

    channels: tuple[int, ...]
    attention_levels: int
    blocks: int
    head_dim: int
    latent_channels: int
    latent_side: int
    prompt_width: int
    prompt_tokens: int

    @property
    def time_width(self) -> int:
        """Width of the embedding of the diffusion time."""
        return 4 * self.channels[0]


SHORTCUT = "shortcut"  # of a residual block that changes the width
# Tensors that group norms and the SiLU behind them read; none follows that of a transformer.
GROUP_NORM_TENSORS = {"norm1": 2, "norm2": 2, "norm_out": 2, "transformer_norm": 1}
STABLE_DIFFUSION_2_1 = Unet(
    channels=(320, 640, 1280, 1280),
    attention_levels=3,
    blocks=2,
    head_dim=64,
    latent_channels=4,
    latent_side=96,
    prompt_width=1024,
    prompt_tokens=77,
)


def unet_layers(unet: Unet = STABLE_DIFFUSION_2_1) -> tuple[Layer, ...]:
    """The layers: embed, one block per residual block (with its transformer and resampling), head.

    Differs: a chain. The skips from the way down to the way up are not edges here, so a stage
    boundary inside the UNet carries more than `out_width` says.
    """
    first = unet.channels[0]
    embed = Layer(
        name="embed",
        kind=LayerKind.EMBED,
        operators=(*_time_embedding(unet), _conv("conv_in", unet.latent_channels, first, level=0)),
        out_width=first,
    )
    blocks = [*_down(unet), _middle(unet), *_up(unet)]
    layers = tuple(
        Layer(name=f"block.{i}", kind=LayerKind.BLOCK, operators=operators, out_width=width)
        for i, (operators, width) in enumerate(blocks)
    )
    out = (
        _group_norm("norm_out", first, level=0),
        _conv("conv_out", first, unet.latent_channels, level=0),
    )
    head = Layer(name="head", kind=LayerKind.HEAD, operators=out, out_width=unet.latent_channels)
    return (embed, *layers, head)


_Block = tuple[tuple[Operator, ...], int]


def _down(unet: Unet) -> list[_Block]:
    blocks: list[_Block] = []
    width = unet.channels[0]
    for level, out in enumerate(unet.channels):
        for index in range(unet.blocks):
            operators = _residual(unet, width, out, level)
            if level < unet.attention_levels:
                operators += _transformer(unet, out, level)
            if index == unet.blocks - 1 and level < len(unet.channels) - 1:
                operators += (_conv("downsample", out, out, level=level + 1),)
            blocks.append((operators, out))
            width = out
    return blocks


def _middle(unet: Unet) -> _Block:
    width, level = unet.channels[-1], len(unet.channels) - 1
    first, second = (
        _renamed(_residual(unet, width, width, level), prefix) for prefix in ("first.", "second.")
    )
    return (*first, *_transformer(unet, width, level), *second), width


def _up(unet: Unet) -> list[_Block]:
    """Blocks of the way up, whose residual blocks also read the skips of their level."""
    skips = [unet.channels[0]]
    for level, out in enumerate(unet.channels):
        skips += [out] * unet.blocks + ([out] if level < len(unet.channels) - 1 else [])
    blocks: list[_Block] = []
    width = unet.channels[-1]
    for level in reversed(range(len(unet.channels))):
        out = unet.channels[level]
        for index in range(unet.blocks + 1):
            operators = _residual(unet, width + skips.pop(), out, level)
            if level < unet.attention_levels:
                operators += _transformer(unet, out, level)
            if index == unet.blocks and level > 0:
                operators += (_conv("upsample", out, out, level=level - 1),)
            blocks.append((operators, out))
            width = out
    return blocks


def _time_embedding(unet: Unet) -> tuple[Operator, ...]:
    """Two matmuls on one vector per image."""
    per_image = 1.0 / unet.latent_side**2
    width = unet.time_width
    return (
        Matmul(
            name="time.0",
            in_features=unet.channels[0],
            out_features=width,
            bias=True,
            tokens_scale=per_image,
        ),
        Matmul(name="time.2", in_features=width, out_features=width, bias=True, tokens_scale=per_image),
    )


def _residual(unet: Unet, width: int, out: int, level: int) -> tuple[Operator, ...]:
    scale = 0.25**level
    operators: list[Operator] = [
        _group_norm("norm1", width, level=level),
        _conv("conv1", width, out, level=level),
        Matmul(
            name="time_projection",
            in_features=unet.time_width,
            out_features=out,
            bias=True,
            tokens_scale=1.0 / unet.latent_side**2,
        ),
        _group_norm("norm2", out, level=level),
        _conv("conv2", out, out, level=level),
    ]
    if width != out:
        operators.append(
            Matmul(name=SHORTCUT, in_features=width, out_features=out, bias=True, tokens_scale=scale)
        )
    operators.append(Pointwise(name="residual", width=out, num_passes=3, tokens_scale=scale))
    return tuple(operators)


def _transformer(unet: Unet, width: int, level: int) -> tuple[Operator, ...]:
    """Self-attention, cross-attention to the prompt, gated MLP, between two square matmuls."""
    scale = 0.25**level
    norms = (("weight", width), ("bias", width))
    num_heads = width // unet.head_dim
    heads = Heads(num=num_heads, num_kv=num_heads, dim=unet.head_dim, causal=False, bias="o")
    positions = unet.latent_side**2
    self_keys = Keys(width=width, num=positions // 4**level, per_token=scale)
    prompt_keys = Keys(
        width=unet.prompt_width, num=unet.prompt_tokens, per_token=unet.prompt_tokens / positions
    )

    def matmul(name: str, enter: int, leave: int) -> Matmul:
        return Matmul(name=name, in_features=enter, out_features=leave, bias=True, tokens_scale=scale)

    def pointwise(name: str, width: int, passes: int, *weights: tuple[str, int]) -> Pointwise:
        return Pointwise(name=name, width=width, num_passes=passes, weights=weights, tokens_scale=scale)

    return (
        _group_norm("transformer_norm", width, level=level),
        matmul("proj_in", width, width),
        pointwise("self_norm", width, 2, *norms),
        *cross_attention_operators("self", width, heads, self_keys, tokens_scale=scale),
        pointwise("self_residual", width, 3),
        pointwise("cross_norm", width, 2, *norms),
        *cross_attention_operators(CROSS, width, heads, prompt_keys, tokens_scale=scale),
        pointwise("cross_residual", width, 3),
        pointwise("mlp_norm", width, 2, *norms),
        matmul("mlp.gate_up", width, 8 * width),
        pointwise("mlp.gelu", 4 * width, 3),
        matmul("mlp.down", 4 * width, width),
        pointwise("mlp_residual", width, 3),
        matmul("proj_out", width, width),
        pointwise("transformer_residual", width, 3),
    )


def _conv(name: str, width: int, out: int, *, level: int) -> Matmul:
    """A 3 x 3 convolution as a matmul; `level` is that of its output."""
    return Matmul(name=name, in_features=9 * width, out_features=out, bias=True, tokens_scale=0.25**level)


def _group_norm(name: str, width: int, *, level: int) -> Pointwise:
    """A group norm followed by SiLU."""
    weights = (("weight", width), ("bias", width))
    return Pointwise(name=name, width=width, num_passes=4, weights=weights, tokens_scale=0.25**level)


def _renamed(operators: tuple[Operator, ...], prefix: str) -> tuple[Operator, ...]:
    return tuple(replace(operator, name=prefix + operator.name) for operator in operators)


def behind_projector(layers: Sequence[Layer], prompt_width: int, llm_width: int) -> tuple[Layer, ...]:
    """A generator's layers after the projector that turns the LLM's states into its prompt."""
    kind = Projection(kind=Projector.MLP, in_width=llm_width, out_width=prompt_width, norm=None)
    return (projector_layer(kind), *layers)
