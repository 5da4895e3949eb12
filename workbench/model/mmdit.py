"""Diffusion transformers over latent patches: modulated by a class, or with a text in its own stream.

Source: Esser et al. 2024, "Scaling Rectified Flow Transformers", section 4 and figure 2 (Stable Diffusion 3:
both streams have their own weights and attend to all tokens); black-forest-labs/flux, `model.py` and
`modules/layers.py` (Flux: single-stream blocks behind, attention and MLP side by side in one product);
Peebles and Xie 2023, "Scalable Diffusion Models with Transformers", section 3.2 (DiT: no text, a class
beside the time). The time and the class or pooled text give one vector an image, so that their products
work on one token of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from workbench.model.layer import Attention, Layer, LayerKind, Lookup, Matmul, Operator, Pointwise, Shard
from workbench.model.projector import Projection, Projector, projector_layer
from workbench.model.transformer import residual

TIME_WIDTH = 256  # of the sines and cosines of a time
JOINT, TEXT = "attention", "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mmdit:
    """Sizes of such a transformer over latents of one size; a token is a patch of the latent.

    Args:
        width: width of both streams; heads: attention heads of width head_dim; ffn: inner width of the MLPs.
        layers: blocks of two streams; single_layers: blocks of one stream after them. Without these the
            text's stream ends in the last block's attention.
        patches, text_tokens: tokens of an image and of its text; without a text there is one stream.
        patch_elements: numbers in a patch of the latent; out_elements: numbers predicted for it.
        classes: classes of images, in place of a text.
        text_width, pooled_width: widths of the text's vectors and of its pooled vector.
        qk_norm: norms over each head's queries and keys.
        rotary: positions rotate queries and keys; else they are added to the patches.
        guidance: the guidance strength is embedded like the time (distilled models).
    """

    width: int
    heads: int
    head_dim: int
    ffn: int
    layers: int
    single_layers: int = 0
    patches: int
    text_tokens: int
    patch_elements: int = 64
    out_elements: int = 64
    classes: int = 0
    text_width: int = 4096
    pooled_width: int = 2048
    qk_norm: bool = False
    rotary: bool = False
    guidance: bool = False

    @property
    def text_scale(self) -> float:
        """Text tokens per patch."""
        return self.text_tokens / self.patches

    @property
    def all_scale(self) -> float:
        """Tokens of both streams per patch."""
        return 1.0 + self.text_scale

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim


SD3_MEDIUM = Mmdit(
    width=1536, heads=24, head_dim=64, ffn=6144, layers=24, patches=4096, text_tokens=154
)  # 1024 px; stabilityai/stable-diffusion-3-medium-diffusers, transformer/config.json
FLUX_SCHNELL = Mmdit(
    width=3072,
    heads=24,
    head_dim=128,
    ffn=12288,
    layers=19,
    single_layers=38,
    patches=4096,
    text_tokens=256,
    pooled_width=768,
    qk_norm=True,
    rotary=True,
)  # black-forest-labs/FLUX.1-schnell, transformer/config.json
DIT_XL_2 = Mmdit(
    width=1152,
    heads=16,
    head_dim=72,
    ffn=4608,
    layers=28,
    patches=256,
    text_tokens=0,
    patch_elements=16,
    out_elements=32,
    classes=1000,
)  # 256 px; facebookresearch/DiT, models.py: noise and its variance
FLUX_DEV = replace(FLUX_SCHNELL, text_tokens=512, guidance=True)
MMDITS = {
    "dit-xl-2": DIT_XL_2,
    "sd3-medium": SD3_MEDIUM,
    "flux.1-schnell": FLUX_SCHNELL,
    "flux.1-dev": FLUX_DEV,
}


def mmdit_layers(model: Mmdit) -> tuple[Layer, ...]:
    """The layers: embed, one per block, head.

    Differs: a stage boundary between two-stream blocks carries both streams, but `out_width` counts one.
    Under tensor parallelism messages leave out the sum of the text's gradient before its products.
    """
    double, single = tuple(double_block(model)), tuple(single_block(model))
    blocks = [double] * model.layers + [single] * model.single_layers
    if model.text_tokens and not model.single_layers:
        blocks[-1] = tuple(double_block(model, is_last=True))
    return (
        embedding(model),
        *(
            Layer(name=f"block.{i}", kind=LayerKind.BLOCK, operators=operators, out_width=model.width)
            for i, operators in enumerate(blocks)
        ),
        head(model),
    )


def behind_text_projector(layers: tuple[Layer, ...], model: Mmdit, llm_width: int) -> tuple[Layer, ...]:
    """The layers after the projector that turns an LLM's states into their text or class."""
    width = model.text_width if model.text_tokens else model.width
    kind = Projection(kind=Projector.MLP, in_width=llm_width, out_width=width, norm=None)
    return (projector_layer(kind), *layers)


def double_block(model: Mmdit, *, is_last: bool = False) -> Iterator[Operator]:
    """Operators of a two-stream block; in the last one the text is only read by the image."""
    streams = [("", 1.0, False), ("text.", model.text_scale, is_last)][: 1 + (model.text_tokens > 0)]
    for prefix, scale, only_read in streams:
        yield from _before_attention(model, prefix, scale, 2 if only_read else 6)
    yield _joint(model)
    for prefix, scale, only_read in streams:
        if not only_read:
            yield from _after_attention(model, prefix, scale)


def single_block(model: Mmdit) -> Iterator[Operator]:
    """Operators of a one-stream block: one product into attention and MLP, one out of both."""
    scale, inner = model.all_scale, model.q_width + model.ffn
    moved, product = partial(elementwise, scale=scale), partial(_product, scale=scale)
    yield of_image(model, "modulation", model.width, 3 * model.width)
    yield moved("attention_norm", model.width)
    yield moved("attention_norm.modulated", model.width)
    yield product("linear1", model.width, 3 * model.q_width + model.ffn, Shard.COLUMN)
    yield from _norm_and_rotary(model, "", scale)
    yield _joint(model)
    yield replace(elementwise("mlp.gelu", model.ffn, scale), shard=Shard.COLUMN)
    yield product("linear2", inner, model.width, Shard.ROW)
    yield moved("mlp_residual.gated", model.width)
    yield replace(residual("mlp_residual", model.width), tokens_scale=scale)


def embedding(model: Mmdit) -> Layer:
    """The embedding layer: patches, the text, and the vector of time and pooled text."""
    operators: list[Operator] = [
        _product("patches", model.patch_elements, model.width, Shard.REPLICATED, 1.0)
    ]
    if not model.rotary:
        operators.append(residual("add_positions", model.width))
    conditions = [("time", TIME_WIDTH)]
    if model.text_tokens:
        operators.append(_product(TEXT, model.text_width, model.width, Shard.REPLICATED, model.text_scale))
        conditions.append(("pooled", model.pooled_width))
    else:
        operators.append(Lookup(name="classes", num_rows=model.classes + 1, width=model.width))  # and none
    for name, width in conditions + [("guidance", TIME_WIDTH)] * model.guidance:
        operators += [
            of_image(model, f"{name}.0", width, model.width),
            of_image(model, f"{name}.2", model.width, model.width),
        ]
    return Layer(name="embed", kind=LayerKind.EMBED, operators=tuple(operators), out_width=model.width)


def head(model: Mmdit) -> Layer:
    """The head: predictions for every element of every patch, and their loss."""
    operators = (
        of_image(model, "modulation", model.width, 2 * model.width),
        elementwise("final_norm", model.width, 1.0),
        elementwise("final_norm.modulated", model.width, 1.0),
        _product("out", model.width, model.out_elements, Shard.REPLICATED, 1.0),
        Pointwise(name="loss", width=model.out_elements, num_passes=2),
    )
    return Layer(name="head", kind=LayerKind.HEAD, operators=operators, out_width=model.out_elements)


def _before_attention(model: Mmdit, prefix: str, scale: float, num_vectors: int) -> Iterator[Operator]:
    """Operators of one stream before the attention."""
    yield of_image(model, f"{prefix}modulation", model.width, num_vectors * model.width)
    yield elementwise(f"{prefix}attention_norm", model.width, scale)
    yield elementwise(f"{prefix}attention_norm.modulated", model.width, scale)
    yield _product(f"{prefix}qkv_proj", model.width, 3 * model.q_width, Shard.COLUMN, scale)
    yield from _norm_and_rotary(model, prefix, scale)


def _norm_and_rotary(model: Mmdit, prefix: str, scale: float) -> Iterator[Operator]:
    if model.qk_norm:
        weights = (("weight", model.head_dim),)
        for name in ("q_norm", "k_norm"):
            norm_operator = replace(elementwise(f"{prefix}{name}", model.q_width, scale), weights=weights)
            yield replace(norm_operator, shard=Shard.COLUMN)
    if model.rotary:
        yield replace(elementwise(f"{prefix}rotary", 2 * model.q_width, scale), shard=Shard.COLUMN)


def _joint(model: Mmdit) -> Attention:
    """Full attention over the tokens of both streams."""
    return Attention(
        name=JOINT,
        num_heads=model.heads,
        num_kv_heads=model.heads,
        head_dim=model.head_dim,
        causal=False,
        tokens_scale=model.all_scale,
        num_keys=model.patches + model.text_tokens,
    )


def _after_attention(model: Mmdit, prefix: str, scale: float) -> Iterator[Operator]:
    """Operators of one stream after the attention."""
    moved, product = partial(elementwise, scale=scale), partial(_product, scale=scale)
    mlp = f"mlp.{prefix}"
    yield product(f"{prefix}o_proj", model.q_width, model.width, Shard.ROW)
    yield moved(f"{prefix}attention_residual.gated", model.width)
    yield replace(residual(f"{prefix}attention_residual", model.width), tokens_scale=scale)
    yield moved(f"{prefix}mlp_norm", model.width)
    yield moved(f"{prefix}mlp_norm.modulated", model.width)
    yield product(f"{mlp}up", model.width, model.ffn, Shard.COLUMN)
    yield replace(moved(f"{mlp}gelu", model.ffn), shard=Shard.COLUMN)
    yield product(f"{mlp}down", model.ffn, model.width, Shard.ROW)
    yield moved(f"{prefix}mlp_residual.gated", model.width)
    yield replace(residual(f"{prefix}mlp_residual", model.width), tokens_scale=scale)


def of_image(model: Mmdit, name: str, in_features: int, out_features: int) -> Matmul:
    """A product of the vector of time and class or pooled text, one of an image's tokens."""
    return _product(name, in_features, out_features, Shard.REPLICATED, 1 / model.patches)


def _product(name: str, in_features: int, out_features: int, shard: Shard, scale: float) -> Matmul:
    return Matmul(
        name=name,
        in_features=in_features,
        out_features=out_features,
        bias=True,
        shard=shard,
        tokens_scale=scale,
    )


def elementwise(name: str, width: int, scale: float = 1.0) -> Pointwise:
    """An operator that reads and writes every element once."""
    return Pointwise(name=name, width=width, num_passes=2, tokens_scale=scale)
