"""Whisper's encoder, and others built like it: of Qwen2-Audio, Qwen2.5-Omni, Voxtral, GLM-ASR and MOSS."""

from dataclasses import replace
from typing import Any

from workbench.data.corpus import WHISPER_FRAME_S, ItemTokens, padded_windows, whisper_tokens, windowed_tokens
from workbench.model.config_fields import Config, count, heads_of, number, text, whole
from workbench.model.families.family import EXAMPLE_TOKENS, EXAMPLE_WIDTH, Encoder, Example, Tower
from workbench.model.families.positions import PARTIAL, rotated_share
from workbench.model.layer import Lookup
from workbench.model.module_layers import block_layers, whisper_stem
from workbench.model.projector import Projector
from workbench.model.shape import Shape
from workbench.model.transformer import Block, Mlp, Norm, vit_block

TIME_ROTARY = "time_rotary"  # a composite's parameters of the rotation of features by time
GLMASR_MERGE, _ROTATED = 4, 0.5  # tokens that become one; the share of a head that is rotated
MOSS_GROUP = "audio_merge_size"  # a composite's key: tokens that become one
OMNI_LONGEST_S = 300  # of a clip, in the processors of the released checkpoints


def _whisper(config: Config) -> Tower:
    """The encoder half; the decoder's dimensions are ignored. Keys have no bias."""
    width = whole(config, "d_model", 384)
    num_heads = whole(config, "encoder_attention_heads", 6)
    heads_of(config, width=width, num=num_heads)
    block = vit_block(
        width=width,
        num_heads=num_heads,
        ffn=whole(config, "encoder_ffn_dim", 1536),
        activation=text(config, "activation_function", "gelu"),
        bias="qvo",
    )
    stem = whisper_stem(
        mel_bins=whole(config, "num_mel_bins", 80),
        width=width,
        num_positions=whole(config, "max_source_positions", 1500),
    )
    layers = (stem, *block_layers(block, count(config, "encoder_layers", 4)))
    return Tower(layers=layers, width=width, norm=Norm.LAYER)


def _qwen2_audio(config: Config) -> Tower:
    """Whisper's encoder; two of its tokens become one before the final norm."""
    sizes = {
        "d_model": 1280,
        "encoder_layers": 32,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "num_mel_bins": 128,
    }
    given = {key: value for key, value in config.items() if value is not None}
    tower = _whisper({**sizes, **given})
    return replace(
        tower,
        merge=2,
        projectors=(Projector.LINEAR, Projector.MLP),
        rotated=_rotated_by_time(config, tower.width),
    )


def _rotated_by_time(config: Config, width: int) -> int:
    """Numbers of a token that turn by its time, half of them by its window, in Music Flamingo.

    Raises:
        ValueError: more of them than the token has.
    """
    if config.get(TIME_ROTARY) is None:
        return 0
    half = int(width * number({"model_type": config["model_type"], **config[TIME_ROTARY]}, PARTIAL, 1.0))
    rotated = 2 * (half + half % 2)
    if rotated > width:
        raise ValueError(
            f"{PARTIAL} must be at most 0.5, as window and time rotate a share each, got "
            f"{config[TIME_ROTARY].get(PARTIAL)}; nearest: 0.5"
        )
    return rotated


def _omni(config: Config) -> Tower:
    """Qwen2-Audio's encoder over independent windows, each an item; its positions are not weights."""
    tower = _qwen2_audio(config)
    stem, *blocks = tower.layers
    operators = tuple(operator for operator in stem.operators if not isinstance(operator, Lookup))
    return replace(tower, layers=(replace(stem, operators=operators), *blocks))


def _omni_window(config: Config) -> int:
    """Tokens of a full window: half as many as it has frames."""
    return whole(config, "n_window", 100)


def _check_omni(config: Config) -> None:
    """Raise ValueError for windows that depend on each other, or with more tokens than positions."""
    window, most = _omni_window(config), whole(config, "max_source_positions", 1500)
    if window % 2:
        raise ValueError(
            "n_window must be even: a mean of two tokens would cross the border of two windows, "
            f"got {window}; nearest: {window + 1}"
        )
    if window > most:
        raise ValueError(f"n_window must be <= max_source_positions {most}, got {window}; nearest: {most}")


def _voxtral(config: Config) -> Tower:
    """Whisper's encoder, configured by a decoder's keys."""
    sizes = {
        "d_model": whole(config, "hidden_size", 1280),
        "encoder_layers": count(config, "num_hidden_layers", 32),
        "encoder_attention_heads": whole(config, "num_attention_heads", 20),
        "encoder_ffn_dim": whole(config, "intermediate_size", 5120),
        "num_mel_bins": whole(config, "num_mel_bins", 128),
        "max_source_positions": whole(config, "max_source_positions", 1500),
    }
    return _whisper({"model_type": config["model_type"], **sizes})


def _moss(config: Config) -> Tower:
    sizes = {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "num_mel_bins": 80,
    }
    return _voxtral({**sizes, **{key: value for key, value in config.items() if value is not None}})


def heard_in_groups(num_tokens: int, group: int) -> int:
    """Tokens that are read of a window: the clip's, and of the silence behind it, to whole groups."""
    return -(-num_tokens // group) * group


def _moss_tokens(config: Config, duration_s: float) -> tuple[ItemTokens, ...]:
    """Items of a clip; a window's tokens are merged in groups, the last of which silence fills up."""
    group = whole(config, MOSS_GROUP, 1)
    clips = padded_windows(duration_s, window_tokens=whole(config, "max_source_positions", 1500))
    return tuple(ItemTokens(inside, heard_in_groups(heard, group)) for inside, heard in clips)


def _glmasr(config: Config) -> Tower:
    """Whisper's encoder with rotary positions of a part of every head instead of a table."""
    width = whole(config, "hidden_size", 1280)
    num = whole(config, "num_attention_heads", 20)
    heads = heads_of(
        config, width=width, num=num, causal=False, num_kv=whole(config, "num_key_value_heads", num)
    )
    rotated = int(heads.dim * rotated_share(config, _ROTATED))  # in pairs
    block = Block(
        width=width,
        heads=replace(heads, bias="qvo", rotary=True, rotary_dim=rotated + rotated % 2),
        mlp=Mlp(
            width=whole(config, "intermediate_size", 5120),
            gated=False,
            activation=text(config, "hidden_act", "gelu"),
            bias=True,
        ),
        norm=Norm.LAYER,
    )
    stem = whisper_stem(mel_bins=whole(config, "num_mel_bins", 128), width=width, num_positions=None)
    layers = (stem, *block_layers(block, count(config, "num_hidden_layers", 32)))
    return Tower(layers=layers, width=width, norm=Norm.LAYER)


def _glmasr_window(config: Config) -> int:
    return whole(config, "max_position_embeddings", 1500)


def _glmasr_tokens(config: Config, duration_s: float) -> tuple[ItemTokens, ...]:
    """Items of a clip: windows filled up with silence, of which only the clip's own tokens are read.

    Four of them become one, so a rest of fewer is dropped.

    Source: `_get_audio_token_length` of transformers' processor for GLM-ASR.

    Raises:
        ValueError: a clip that is too short for a token.
    """
    window, most = _glmasr_window(config), count(config, "most_windows", 1)
    clips = windowed_tokens(duration_s, window_tokens=window, most_windows=most)
    heard = [clip.tokens_out for clip in clips if clip.tokens_out >= GLMASR_MERGE]
    if not heard:
        least_s = (GLMASR_MERGE - 1) * WHISPER_FRAME_S
        raise ValueError(f"audio clip: want a duration of more than {least_s} s, got {duration_s} s")
    return tuple(ItemTokens(window, tokens) for tokens in heard)


def _clip_tokens(config: Config, duration_s: float) -> tuple[ItemTokens, ...]:
    return whisper_tokens(duration_s, window_tokens=whole(config, "max_source_positions", 1500))


def _qwen2_audio_tokens(config: Config, duration_s: float) -> tuple[ItemTokens, ...]:
    """Items of a clip at its own length, up to the windows that the composite reads, by default one."""
    return windowed_tokens(
        duration_s,
        window_tokens=whole(config, "max_source_positions", 1500),
        most_windows=count(config, "most_windows", 1),
    )


def _omni_tokens(config: Config, duration_s: float) -> tuple[ItemTokens, ...]:
    """Items of a clip, cut off at `chunk_length`, a key of a checkpoint's processor."""
    longest_s = number(config, "chunk_length", OMNI_LONGEST_S)
    return windowed_tokens(min(duration_s, longest_s), window_tokens=_omni_window(config))


def _omni_processed(processor: Config) -> dict[str, Any]:
    longest_s = processor.get("chunk_length")
    return {} if longest_s is None else {"chunk_length": longest_s}


def _shaped(shape: Shape) -> dict[str, Any]:
    return {
        "model_type": "whisper",
        "d_model": shape.hidden,
        "encoder_layers": shape.layers,
        "encoder_attention_heads": shape.heads,
        "encoder_ffn_dim": shape.ffn,
        "num_mel_bins": 128 if "large-v3" in shape.name else 80,
        "max_source_positions": shape.max_seq,
    }


_EXAMPLE = {
    "d_model": EXAMPLE_WIDTH,
    "encoder_layers": 4,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 352,
    "num_mel_bins": 80,
    "max_source_positions": EXAMPLE_TOKENS,
}
_EXAMPLE_BLOCKS = {
    "hidden_size": EXAMPLE_WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 512,
}
WHISPER = Encoder(
    name="Whisper",
    role="audio",
    model_type="whisper",
    examples={"whisper": Example(config=_EXAMPLE)},
    make=_whisper,
    clip_tokens=_clip_tokens,
    has_longest_item=True,
    shapes={"whisper": _shaped},
)
QWEN2_AUDIO = Encoder(
    name="Qwen2-Audio",
    role="audio",
    model_type="qwen2_audio_encoder",
    examples={"qwen2-audio": Example(config=_EXAMPLE, tokens=(EXAMPLE_TOKENS, EXAMPLE_TOKENS // 2))},
    make=_qwen2_audio,
    clip_tokens=_qwen2_audio_tokens,
    has_longest_item=True,
)
OMNI_AUDIO = Encoder(
    name="Qwen2.5-Omni audio",
    role="audio",
    model_type="qwen2_5_omni_audio_encoder",
    examples={
        "omni audio": Example(
            config=_EXAMPLE | {"n_window": EXAMPLE_TOKENS}, tokens=(EXAMPLE_TOKENS, EXAMPLE_TOKENS // 2)
        )
    },
    make=_omni,
    clip_tokens=_omni_tokens,
    processed=_omni_processed,
    longest_item=_omni_window,
    check_config=_check_omni,
)
VOXTRAL_ENCODER = Encoder(
    name="Voxtral encoder",
    role="audio",
    model_type="voxtral_encoder",
    examples={
        "voxtral": Example(
            config=_EXAMPLE_BLOCKS | {"num_mel_bins": 80, "max_source_positions": EXAMPLE_TOKENS}
        )
    },
    make=_voxtral,
    clip_tokens=_clip_tokens,
    has_longest_item=True,
)
GLMASR_ENCODER = Encoder(
    name="GLM-ASR encoder",
    role="audio",
    model_type="glmasr_encoder",
    examples={
        "glm-asr": Example(
            config=_EXAMPLE_BLOCKS | {"num_mel_bins": 80, "max_position_embeddings": EXAMPLE_TOKENS}
        )
    },
    make=_glmasr,
    clip_tokens=_glmasr_tokens,
    pads_items=True,
    longest_item=_glmasr_window,
    shares_tokens=False,
)
MOSS_AUDIO = Encoder(
    name="MOSS audio",
    role="audio",
    model_type="moss_transcribe_diarize_audio",
    examples={"moss": Example(config=_EXAMPLE_BLOCKS | {"max_source_positions": EXAMPLE_TOKENS})},
    make=_moss,
    clip_tokens=_moss_tokens,
    pads_items=True,
    has_longest_item=True,
    shares_tokens=False,
)
