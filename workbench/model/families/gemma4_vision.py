"""Gemma 4's vision tower: images of any aspect ratio, squares of whose patches become one soft token."""

from dataclasses import dataclass, fields, replace
from math import floor, sqrt
from typing import Any

from workbench.data.corpus import ItemTokens
from workbench.model.config_fields import Config, count, flag, heads_of, text, whole
from workbench.model.families.family import EXAMPLE_VIT, Encoder, Example, Tower
from workbench.model.feature_layers import FeatureLayers
from workbench.model.layer import Layer, Operator, Pointwise
from workbench.model.module_layers import block_layers, learned_positions, patch_embedding
from workbench.model.projector import ProjectorKind
from workbench.model.transformer import Block, Mlp, Norm, Placement, value_norm

POOLED = 3  # default side of the squares of patches
_SOFT_TOKENS = 280  # default most soft tokens of an image
_LONGEST = 10 * 1024  # default rows of each axis' table of positions


@dataclass(frozen=True, slots=True, kw_only=True)
class _SoftTokens(Tower):
    """A tower whose output is scaled, or standardised, before the projector."""

    def up_to(self, feature_layer: FeatureLayers) -> Tower:
        """A hidden state, which is neither."""
        earlier = super(_SoftTokens, self).up_to(feature_layer)
        return Tower(**{each.name: getattr(earlier, each.name) for each in fields(Tower)})

    def projector(self, kind: ProjectorKind, llm_width: int) -> Layer:
        layer = super(_SoftTokens, self).projector(kind, llm_width)
        scale = Pointwise(name="soft_token_scale", width=self.width, num_passes=2)
        return replace(layer, operators=(scale, *layer.operators))


def _gemma4(config: Config) -> Tower:
    """Blocks as of the language model, which see all of an image; positions of its two axes are added."""
    if flag(config, "use_clipped_linears"):
        raise ValueError(
            f"{config['model_type']}: use_clipped_linears must be false: products between bounds (E2B, E4B) "
            "are not supported; the towers of gemma-4-31B and gemma-4-26B-A4B have none"
        )
    width, num = whole(config, "hidden_size", 768), whole(config, "num_attention_heads", 12)
    num_kv = whole(config, "num_key_value_heads", 12)
    heads = heads_of({"head_dim": 64, **config}, width=width, num=num, causal=False, num_kv=num_kv)
    activation = text(config, "hidden_activation", "gelu_pytorch_tanh")
    block = Block(
        width=width,
        heads=replace(heads, qk_norm=Norm.RMS, rotary=True),
        mlp=Mlp(width=whole(config, "intermediate_size", 3072), gated=True, activation=activation),
        norm=Norm.RMS,
        placement=Placement.SANDWICH,
    )
    embed = patch_embedding(patch_elements=3 * whole(config, "patch_size", 16) ** 2, width=width, bias=False)
    positions = learned_positions(2 * _longest(config), width)
    blocks = block_layers(block, count(config, "num_hidden_layers", 16))
    return _SoftTokens(
        layers=(
            replace(embed, operators=(*embed.operators, *positions)),
            *(_with_value_norm(each, heads.num_kv, heads.dim) for each in blocks),
        ),
        width=width,
        norm=None,
        merge=_side(config) ** 2,
    )


def _with_value_norm(block: Layer, num_kv: int, head_dim: int) -> Layer:
    operators: list[Operator] = []
    for operator in block.operators:
        operators.append(operator)
        if operator.name == "k_norm":
            operators.append(value_norm(num_kv, head_dim))
    return replace(block, operators=tuple(operators))


def _side(config: Config) -> int:
    """Side of the squares of patches that become a soft token."""
    return whole(config, "pooling_kernel_size", POOLED)


def _longest(config: Config) -> int:
    """Rows of each axis' table of positions: most patches along a side of an image."""
    return whole(config, "position_embedding_size", _LONGEST)


def image_tokens(config: Config, height_px: int, width_px: int) -> ItemTokens:
    """Tokens of an image, whose aspect ratio is kept: as many whole squares of patches as are allowed.

    `max_soft_tokens` is a checkpoint's own. Small images grow.

    Source: `get_aspect_ratio_preserving_size` of transformers' image processor for Gemma 4.

    Raises:
        ValueError: an image so narrow that it would have more tokens than are allowed, or none.
    """
    square, most = whole(config, "patch_size", 16) * _side(config), most_soft_tokens(config)
    factor = sqrt(most * square**2 / (height_px * width_px))
    rows, columns = (floor(factor * px / square) for px in (height_px, width_px))
    if rows == 0 and columns > 0:
        rows, columns = 1, min(width_px // height_px, most)
    elif columns == 0 and rows > 0:
        rows, columns = min(height_px // width_px, most), 1
    if not 1 <= rows * columns <= most:
        raise ValueError(
            f"image of {height_px} x {width_px} px: want 1 to {most} soft tokens, got {rows} rows of "
            f"{columns}"
        )
    return ItemTokens(rows * columns * _side(config) ** 2, rows * columns)


def most_soft_tokens(config: Config) -> int:
    """Of an image."""
    return whole(config, "max_soft_tokens", _SOFT_TOKENS)


def _native_tokens(config: Config) -> tuple[int, int]:
    return most_soft_tokens(config) * _side(config) ** 2, most_soft_tokens(config)


def _processed(processor: Config) -> dict[str, Any]:
    most = processor.get("max_soft_tokens")
    return {} if most is None else {"max_soft_tokens": most}


def _check(config: Config) -> None:
    """Raise ValueError for heads whose pairs of channels rows and columns do not share equally."""
    head_dim = whole(config, "head_dim", 64)
    if head_dim % 4:
        raise ValueError(
            f"{config['model_type']}: half of a head's pairs turn by the column, half by the row: want a "
            f"head_dim that is a multiple of 4, got {head_dim}; nearest: {head_dim // 4 * 4 + 4}"
        )


GEMMA4_VISION = Encoder(
    name="Gemma 4 vision",
    role="vision",
    model_type="gemma4_vision",
    examples={
        "gemma4 vision": Example(
            config={key: value for key, value in EXAMPLE_VIT.items() if key != "image_size"}
            | {
                "num_key_value_heads": 4,
                "head_dim": 32,
                "pooling_kernel_size": 2,
                "position_embedding_size": 64,
                "standardize": True,
                "max_soft_tokens": 32,
            },
            tokens=(128, 32),
        )
    },
    make=_gemma4,
    check_config=_check,
    native_tokens=_native_tokens,
    image_tokens=image_tokens,
    processed=_processed,
    unprocessed=(
        f"images are brought to at most {_SOFT_TOKENS} soft tokens, as transformers does where no "
        "preprocessor_config.json has max_soft_tokens"
    ),
    shares_tokens=False,
)
