"""PaddleOCR-VL: SigLIP's blocks for images of any size before ERNIE 4.5's language model with three axes."""

from functools import partial
from typing import Any

from workbench.data.corpus import ItemTokens, qwen2_vl_tokens
from workbench.model.composites.composite import (
    PAGE,
    VISION,
    Composite,
    Dropped,
    Part,
    Parts,
    joined,
    normed_squares,
    text_config,
    typed_config,
)
from workbench.model.config_fields import Config, flag, whole
from workbench.model.families.decoder import default_sizes, llama_like
from workbench.model.families.family import EXAMPLE_LLM, EXAMPLE_VIT, Encoder, Example, LanguageModel, Layers
from workbench.model.families.positions import check_fixed_positions
from workbench.model.families.qwen_vision import image_limits
from workbench.model.families.vit import Vit, check_turned_pairs, tower_of

_HEAD = 128  # default width of a head of the language model
_TEXT = default_sizes(
    103424, 1024, 3072, 18, 16, num_key_value_heads=2, head_dim=_HEAD, tie_word_embeddings=True
)
_TOWER = Vit(
    width=1152,
    heads=16,
    ffn=4304,
    layers=27,
    patch=14,
    image_px=384,
    activation="gelu_pytorch_tanh",
    rotary=True,
)
_LEAST_PIXELS, _MOST_PIXELS = 384**2, 1536**2
_SEEN, _SAID, _SIDE = "paddleocr_vl_vision", "paddleocr_vl_text", "spatial_merge_size"


def _text(config: Config) -> Layers:
    has_bias = flag(config, "use_bias")
    heads = {"bias": "qkvo" if has_bias else ""}
    return llama_like(config, defaults=_TEXT, heads=heads, mlp={"bias": has_bias})


def image_tokens(config: Config, height_px: int, width_px: int) -> ItemTokens:
    """Tokens of an image: Qwen2-VL's rule, after each side narrower than a square of patches has grown to it.

    Source: `smart_resize` of transformers' image processor for PaddleOCR-VL.

    Raises:
        ValueError: an image that the rule does not resize, or a smallest area above the largest.
    """
    least, most = whole(config, "min_pixels", _LEAST_PIXELS), whole(config, "max_pixels", _MOST_PIXELS)
    if least > most:
        raise ValueError(f"min_pixels must be <= max_pixels {most}, got {least}; nearest: {most}")
    patch, side = whole(config, "patch_size", _TOWER.patch), whole(config, _SIDE, 1)
    square_px = patch * side
    if 1 <= height_px < square_px:
        height_px, width_px = square_px, round(width_px * square_px / height_px)
    if 1 <= width_px < square_px:
        height_px, width_px = round(height_px * square_px / width_px), square_px
    return qwen2_vl_tokens(
        height_px, width_px, patch_px=patch, merge_side=side, min_pixels=least, max_pixels=most
    )


def _take_apart(config: Config) -> Parts:
    """A norm of every patch, squares of patches side by side, an MLP as wide as a square.

    Released files have the language model's keys at the top level.
    """
    given = typed_config(config, "vision_config", _SEEN)
    width, side = whole(given, "hidden_size", _TOWER.width), whole(given, _SIDE, 2)
    vision_part = Part(
        config={key: value for key, value in given.items() if key != _SIDE},  # a matter of the projector
        projector=normed_squares(width, side),
        items=PAGE,
        weights={
            "": "model.visual.vision_model.",
            "projector.0.": "model.projector.pre_norm.",
            "projector.2.": "model.projector.linear_1.",
            "projector.4.": "model.projector.linear_2.",
        },
    )
    return joined(config, {VISION: vision_part}, _language_model(config), dropped=_UNREAD)


def _language_model(config: Config) -> dict[str, Any]:
    """Its configuration; one of the two that ties head and embedding is enough."""
    inner = text_config(config, _SAID)
    if config.get("text_config") is None:
        inner = {**{key: value for key, value in config.items() if key not in _NOT_TEXT}, **inner}
        inner.pop("tie_word_embeddings", None)
    ties = [flag(each, "tie_word_embeddings", default=True) for each in (config, inner)]
    return {**inner, "model_type": _SAID, "tie_word_embeddings": any(ties)}


_NOT_TEXT = ("vision_config", "text_config", "model_type", "architectures")
_UNREAD = (
    Dropped(weights="model.visual.vision_model.head.", what="SigLIP's pooling head"),
    Dropped(
        weights="model.visual.vision_model.embeddings.packing_position_embedding.",
        what="positions of packed images, which transformers leaves out",
    ),
)
PADDLEOCR_TEXT = LanguageModel(
    name="PaddleOCR-VL text",
    model_type=_SAID,
    check_config=partial(check_fixed_positions, head_dim=_HEAD),
    examples={
        "paddleocr-vl text": Example(
            config=EXAMPLE_LLM
            | {"head_dim": 32, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]}}
        )
    },
    make=_text,
    composites=(Composite(name="PaddleOCR-VL", model_type="paddleocr_vl", take_apart=_take_apart),),
)
PADDLEOCR_VISION = Encoder(
    name="PaddleOCR-VL vision",
    role="vision",
    model_type=_SEEN,
    examples={"paddleocr-vl vision": Example(config=EXAMPLE_VIT, tokens=(64, 64))},
    make=lambda config: tower_of(config, _TOWER),
    check_config=partial(check_turned_pairs, vit=_TOWER),
    image_tokens=image_tokens,
    processed=image_limits,
    unprocessed=(
        f"images are brought to {_LEAST_PIXELS} to {_MOST_PIXELS} pixels, as transformers does where no "
        "preprocessor_config.json says otherwise"
    ),
    shares_tokens=False,
)
