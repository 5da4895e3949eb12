"""A diffusion transformer with its condition as tokens: projector, embedding, blocks, head.

Source: Peebles and Xie 2023, "Scalable Diffusion Models with Transformers", section 3.2 (in-context
conditioning: time and condition stand beside the patches in one sequence of a plain transformer).
"""

from dataclasses import replace

from workbench.model.config_fields import Config, count, heads_of, text, whole
from workbench.model.families.family import EXAMPLE_WIDTH, Example, Generator, Layers
from workbench.model.layer import Layer, LayerKind, Matmul, Pointwise, TokenCount
from workbench.model.module_layers import block_layers
from workbench.model.projector import Projection, Projector, projector_layer
from workbench.model.transformer import Norm, norm, vit_block

TIME_TOKENS = 1


def _dit(config: Config, projector: Projector, llm_width: int) -> Layers:
    """The layers: projector, embed, block x N, head.

    An item's IN tokens are one for the time, its condition tokens and its latent patches; its OUT
    tokens are the condition's, which are in the LLM's sequence. The projector works on those.

    Differs: the time passes through an embedding as wide as the model, the paper's has 256 entries.

    Args:
        config: hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, and for the
            latent latent_channels, latent_side, patch_size, condition_tokens.
        projector: LINEAR or MLP.
        llm_width: width of the states that it reads.

    Raises:
        ValueError: a missing or impossible dimension, or a latent that patches do not cover.
    """
    width = whole(config, "hidden_size", 384)
    num_heads = whole(config, "num_attention_heads", 6)
    heads_of({"model_type": config["model_type"]}, width=width, num=num_heads)
    tokens_in, condition = _tokens(config)
    patches = tokens_in - condition - TIME_TOKENS
    elements = whole(config, "latent_channels", 4) * whole(config, "patch_size", 2) ** 2
    block = vit_block(
        width=width,
        num_heads=num_heads,
        ffn=whole(config, "intermediate_size", 4 * width),
        activation=text(config, "hidden_act", "gelu_pytorch_tanh"),
    )
    kind = Projection(kind=projector, in_width=llm_width, out_width=width, norm=None)
    return (
        projector_layer(kind),
        _embedding(width, elements, patches / tokens_in, TIME_TOKENS / tokens_in),
        *block_layers(block, count(config, "num_hidden_layers", 12)),
        _head(width, elements, patches / tokens_in),
    )


def _tokens(config: Config) -> tuple[int, int]:
    """(tokens inside, condition tokens) of an item of the configured size; ValueError for uneven patches."""
    side, patch = whole(config, "latent_side", 32), whole(config, "patch_size", 2)
    if side % patch:
        raise ValueError(f"{config['model_type']}: latent_side {side} must divide by patch_size {patch}")
    condition = whole(config, "condition_tokens", 77)
    return TIME_TOKENS + condition + (side // patch) ** 2, condition


def _embedding(width: int, elements: int, patch_share: float, time_share: float) -> Layer:
    patches = Matmul(
        name="patches", in_features=elements, out_features=width, bias=True, tokens_scale=patch_share
    )
    time = Matmul(name="time.0", in_features=width, out_features=width, bias=True, tokens_scale=time_share)
    joined = Pointwise(name="join", width=width, num_passes=2)
    operators = (patches, time, replace(time, name="time.2"), joined)
    return Layer(name="embed", kind=LayerKind.EMBED, operators=operators, out_width=width)


def _head(width: int, elements: int, patch_share: float) -> Layer:
    out = Matmul(name="out", in_features=width, out_features=elements, bias=True, tokens_scale=patch_share)
    loss = Pointwise(name="loss", width=elements, num_passes=2, tokens_scale=patch_share)
    return Layer(
        name="head",
        kind=LayerKind.HEAD,
        operators=(norm("final_norm", width, Norm.LAYER, tokens=TokenCount.IN), out, loss),
        out_width=elements,
    )


DIT = Generator(
    name="Diffusion transformer",
    model_type="dit",
    examples={
        "dit": Example(
            config={
                "hidden_size": EXAMPLE_WIDTH,
                "intermediate_size": 352,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "latent_channels": 4,
                "latent_side": 16,
                "patch_size": 2,
                "condition_tokens": 8,
            },
            tokens=(73, 8),
        )
    },
    make=_dit,
    native_tokens=_tokens,
    shares_tokens=False,
)
