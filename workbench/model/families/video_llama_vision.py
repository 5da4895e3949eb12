"""VideoLLaMA 3's vision tower: SigLIP's blocks for images of any size, with rotary positions."""

from dataclasses import replace
from typing import Any

from workbench.data.corpus import QWEN_MAX_PIXELS, QWEN_MIN_PIXELS
from workbench.model.config_fields import Config, whole
from workbench.model.families.family import EXAMPLE_VIT, Encoder, Example, Tower
from workbench.model.families.qwen_vision import image_limits, image_tokens
from workbench.model.families.vit import Vit, check_turned_pairs, tower_of
from workbench.model.projector import Projector

_TOWER = Vit(patch=16, activation="gelu_pytorch_tanh", rotary=True, has_table=False)
_SIDE, MOST_SIDE = "spatial_merge_size", 2  # of the squares of patches that become one


def _video_llama(config: Config) -> Tower:
    """The mean of each square of patches, where there are squares, follows the final norm."""
    return replace(
        tower_of(config, _TOWER),
        merge=whole(config, _SIDE, 1) ** 2,
        projectors=(Projector.MLP, Projector.LINEAR),
    )


def _check(config: Config) -> None:
    """Raise ValueError for squares that bilinear interpolation does not average, and for odd heads."""
    side = whole(config, _SIDE, 1)
    if side > MOST_SIDE:
        raise ValueError(
            f"{config['model_type']}: {_SIDE} must be 1 or {MOST_SIDE}, as the interpolation between patches "
            f"is no mean of larger squares, got {side}; nearest: {MOST_SIDE}"
        )
    check_turned_pairs(config, _TOWER)


def _processed(processor: Config) -> dict[str, Any]:
    """Limits on areas, and the side of squares, which is the processor's choice."""
    side = processor.get("merge_size")
    return image_limits(processor) | ({} if side is None else {_SIDE: side})


VIDEO_LLAMA_VISION = Encoder(
    name="VideoLLaMA 3 vision",
    role="vision",
    model_type="video_llama_3_vision",
    examples={
        "video-llama-3": Example(
            config={key: value for key, value in EXAMPLE_VIT.items() if key != "image_size"}, tokens=(64, 64)
        )
    },
    make=_video_llama,
    check_config=_check,
    image_tokens=lambda config, height_px, width_px: image_tokens(
        {"patch_size": _TOWER.patch, _SIDE: 1, **config}, height_px, width_px
    ),
    processed=_processed,
    unprocessed=(
        f"images are brought to {QWEN_MIN_PIXELS} to {QWEN_MAX_PIXELS} pixels, each patch a token, as "
        "transformers does where no preprocessor_config.json says otherwise"
    ),
    shares_tokens=False,
)
