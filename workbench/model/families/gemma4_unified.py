"""Gemma 4 without towers: one matmul over large patches of images, and raw samples of clips as they are."""

from math import ceil

from workbench.data.corpus import ItemTokens, sound_samples
from workbench.model.config_fields import Config, whole
from workbench.model.families import gemma4_vision
from workbench.model.families.family import EXAMPLE_WIDTH, Encoder, Example, Tower
from workbench.model.families.gemma4_vision import POOLED
from workbench.model.layer import Layer, LayerKind, Matmul
from workbench.model.module_layers import learned_positions
from workbench.model.projector import Projector
from workbench.model.transformer import UNSCALED_NORM, Norm, norm

_WIDTH, _LONGEST = 3840, 1120  # defaults: of a patch's vector, and rows of each axis' table of positions
_FRAME = 640  # default samples of a token


def _patches(config: Config) -> Tower:
    """Norms around the matmul, positions of both axes, and a norm behind them; there are no blocks."""
    width, rows = whole(config, "mm_embed_dim", _WIDTH), whole(config, "mm_posemb_size", _LONGEST)
    numbers = 3 * (whole(config, "patch_size", 16) * whole(config, "pooling_kernel_size", POOLED)) ** 2
    operators = (
        norm("patch_norm", numbers, Norm.LAYER),
        Matmul(name="patch_embedding", in_features=numbers, out_features=width, bias=True),
        norm("embedding_norm", width, Norm.LAYER),
        *learned_positions(2 * rows, width),
        norm("position_norm", width, Norm.LAYER),
    )
    return _without_blocks(Layer(name="embed", kind=LayerKind.EMBED, operators=operators, out_width=width))


def _frames(config: Config) -> Tower:
    """A norm without weights over the samples of a token."""
    width = whole(config, "audio_embed_dim", _FRAME)
    normed = norm(UNSCALED_NORM, width, Norm.UNSCALED)
    return _without_blocks(Layer(name="embed", kind=LayerKind.EMBED, operators=(normed,), out_width=width))


def _without_blocks(embed: Layer) -> Tower:
    return Tower(
        layers=(embed,), width=embed.out_width, norm=None, projectors=(Projector.LINEAR, Projector.MLP)
    )


def check_widths(config: Config) -> None:
    """Raise ValueError unless the matmul into the language model reads what the last norm gives."""
    width, given = whole(config, "mm_embed_dim", _WIDTH), whole(config, "output_proj_dims", _WIDTH)
    if width != given:
        raise ValueError(
            f"{config['model_type']}: output_proj_dims must be mm_embed_dim {width}, got {given}; nearest: "
            f"{width}"
        )


def _image_tokens(config: Config, height_px: int, width_px: int) -> ItemTokens:
    """A token for each soft token of Gemma 4's tower."""
    num = gemma4_vision.image_tokens(config, height_px, width_px).tokens_out
    return ItemTokens(num, num)


def _native_tokens(config: Config) -> tuple[int, int]:
    return (gemma4_vision.most_soft_tokens(config),) * 2


def _clip_tokens(config: Config, duration_s: float) -> tuple[ItemTokens, ...]:
    """One item: a token for each started run of samples, which zeros fill up.

    Source: `_extract_waveform_features` of transformers' `Gemma4UnifiedAudioFeatureExtractor`.
    """
    num = ceil(sound_samples(duration_s) / whole(config, "audio_embed_dim", _FRAME))
    return (ItemTokens(num, num),)


_PX = {"patch_size": 4, "pooling_kernel_size": 2, "mm_posemb_size": 64, "max_soft_tokens": 128}
GEMMA4_PATCHES = Encoder(
    name="Gemma 4 unified vision",
    role="vision",
    model_type="gemma4_unified_vision",
    examples={"gemma4 unified vision": Example(config={"mm_embed_dim": EXAMPLE_WIDTH, **_PX})},
    make=_patches,
    native_tokens=_native_tokens,
    image_tokens=_image_tokens,
    processed=gemma4_vision.GEMMA4_VISION.processed,
    unprocessed=gemma4_vision.GEMMA4_VISION.unprocessed,
)
GEMMA4_FRAMES = Encoder(
    name="Gemma 4 unified audio",
    role="audio",
    model_type="gemma4_unified_audio",
    examples={"gemma4 unified audio": Example(config={"audio_embed_dim": EXAMPLE_WIDTH})},
    make=_frames,
    clip_tokens=_clip_tokens,
)
