"""Composites with audio encoders, alone or beside one for images: Qwen, Audio Flamingo, Voxtral, Phi."""

from collections.abc import Callable
from dataclasses import replace

from workbench.model.composites.composite import (
    AUDIO,
    AUDIO_TOWER,
    CLIP,
    CLIP_S,
    LLM,
    PROJECTOR,
    THINKER,
    TILES,
    VISION,
    Composite,
    Dropped,
    Part,
    Parts,
    check_width,
    joined,
    merging_tower,
    mlp_steps,
    part_config,
    text_config,
    two_linears,
    typed_config,
    unread_blocks,
    whole_or,
)
from workbench.model.config_fields import Config, flag, number, text, whole
from workbench.model.families.qwen3_omni_audio import CHUNK_TOKENS
from workbench.model.families.whisper import TIME_ROTARY
from workbench.model.projector import Merge, Projector, ProjectorStep, Steps


def _qwen2_audio(config: Config) -> Parts:
    audio = part_config(config, "audio_config", "qwen2_audio_encoder")
    clips = Part(
        config=audio,
        projector=Projector.LINEAR,
        items=CLIP,
        weights=AUDIO_TOWER | PROJECTOR,
    )
    return joined(config, {AUDIO: clips}, text_config(config, "qwen2"))


LONGEST_S, MUSIC_LONGEST_S = 600, 1200  # of a clip: `max_audio_len` of Audio and Music Flamingo's processors
_ENCODER_KEYS = {  # Audio Flamingo 3's keys -> those of Qwen2-Audio's encoder
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
    "intermediate_size": "encoder_ffn_dim",
    "layerdrop": "encoder_layerdrop",
}


def _audioflamingo3(config: Config, longest_s: int = LONGEST_S) -> Parts:
    """Qwen2-Audio's encoder in front of an MLP; it reads several windows of a clip."""
    nested = part_config(config, "audio_config", "audioflamingo3_encoder")
    audio = {_ENCODER_KEYS.get(key, key): value for key, value in nested.items()}
    act, bias = text(config, "projector_hidden_act", "gelu"), flag(config, "projector_bias", default=True)
    if (act, bias) != ("gelu", True):
        raise ValueError(
            f"{config['model_type']}: want projector_hidden_act gelu and projector_bias true, got {act} and "
            f"{bias}"
        )
    clips = Part(
        config=audio | {"model_type": "qwen2_audio_encoder", "most_windows": longest_s // CLIP_S},
        projector=Projector.MLP,
        items=CLIP,
        weights=AUDIO_TOWER | PROJECTOR,
    )
    return joined(config, {AUDIO: clips}, text_config(config, "qwen2"))


def _musicflamingo(config: Config) -> Parts:
    """As Audio Flamingo 3, with features that are rotated by their window and their time in it."""
    parts = _audioflamingo3(config, MUSIC_LONGEST_S)
    clips = parts.modules[AUDIO]
    rotary = {
        "rope_theta": 1200.0,
        "partial_rotary_factor": 0.2,
        **(config.get("rope_parameters") or {}),
        "frame_s": number(config, "audio_frame_step", 0.01),
    }
    return replace(
        parts, modules={**parts.modules, AUDIO: replace(clips, config={**clips.config, TIME_ROTARY: rotary})}
    )


def _voxtral(config: Config) -> Parts:
    """Frames concatenated to the width of the encoder's MLP, then an MLP without biases.

    Defaults of the language model's configuration are Ministral's.
    """
    audio = part_config(config, "audio_config", "voxtral_encoder")
    width, ffn = whole(audio, "hidden_size", 1280), whole(audio, "intermediate_size", 5120)
    if ffn % width:
        raise ValueError(f"voxtral: intermediate_size must be a multiple of hidden_size {width}, got {ffn}")
    mlp = mlp_steps(text(config, "projector_hidden_act", "gelu"), bias=False)
    clips = Part(
        config=audio,
        projector=(ProjectorStep(merge=ffn // width), *mlp),
        items=CLIP,
        weights=AUDIO_TOWER | two_linears(1, 3),
    )
    return joined(config, {AUDIO: clips}, {**_MINISTRAL, **text_config(config, "llama")})


_MINISTRAL = {
    "vocab_size": 131072,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e8,
}
_VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
    "dynamic_hd": 36,
}
_TEXT = {
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "pad_token_id": 199999,
}
_EMBED = "model.embed_tokens_extend."
_IMAGE, _SOUND = f"{_EMBED}image_embed.", f"{_EMBED}audio_embed."
_MLP = mlp_steps("gelu")


def _phi4(config: Config) -> Parts:
    """Means over squares of patches and an MLP; an MLP for clips; the LLM's keys are at the top level."""
    vision = {**_VISION, **typed_config(config, "vision_config", "siglip_vision_model")}
    audio = part_config(config, "audio_config", "phi4_multimodal_audio")
    rate = whole(audio, "downsample_rate", 1)
    if rate != 1:
        raise ValueError(f"phi4_multimodal: audio_config.downsample_rate must be 1, got {rate}; nearest: 1")
    layer = whole_or(vision, "feature_layer", -2)
    inner = ("vision_config", "audio_config", "architectures")
    llm = {**_TEXT, **{key: value for key, value in config.items() if key not in inner}, "model_type": "phi3"}
    tower = f"{_IMAGE}img_processor."
    return Parts(
        modules={
            VISION: Part(
                config=vision,
                projector=(ProjectorStep(merge=4, how=Merge.MEAN), *_MLP),
                feature_layer=layer,
                weights={
                    "": tower,
                    "projector.1.": f"{_IMAGE}img_projection_up.",
                    "projector.3.": f"{_IMAGE}img_projection_down.",
                },
            ),
            AUDIO: Part(
                config=audio,
                projector=_MLP,
                items=CLIP,
                weights={
                    "": f"{_SOUND}encoder.",
                    "projector.0.": f"{_SOUND}up_proj_for_speech.",
                    "projector.2.": f"{_SOUND}down_proj_for_speech.",
                },
            ),
            LLM: Part(config=llm, weights={"model.": "model.", "lm_head.": "lm_head."}),
        },
        token_ids={
            VISION: whole_or(vision, "image_token_id", 200010),
            AUDIO: whole_or(audio, "audio_token_id", 200011),
        },
        dropped=(
            Dropped(weights=f"{tower}post_layernorm.", what="final norm: an earlier state is read"),
            Dropped(weights=f"{tower}head.", what="SigLIP's pooling head"),
            *unread_blocks(vision, layer, f"{tower}encoder.layers"),
            Dropped(weights=f"{_IMAGE}global_img_feature_extensor", what="learned token between tiles"),
            Dropped(weights=f"{_IMAGE}sub_img_feature_extensor", what="learned token at the end of a row"),
            Dropped(weights=f"{_SOUND}up_proj_for_vision_speech.", what="projector of clips beside images"),
            Dropped(weights=f"{_SOUND}down_proj_for_vision_speech.", what="projector of clips beside images"),
        ),
        notes=(TILES,),
    )


_OMNI_TEXT = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_window_layers": 28,
    "rms_norm_eps": 1e-6,
}


def _thinker(config: Config) -> Parts:
    """Images as in Qwen2.5-VL; clips in separate windows, with two tokens merged into one."""
    llm = {**_OMNI_TEXT, **text_config(config, "qwen2_vl_text", ties=False), "model_type": "qwen2_vl_text"}
    vision = typed_config(config, "vision_config", "qwen2_5_omni_vision_encoder")
    audio = typed_config(config, "audio_config", "qwen2_5_omni_audio_encoder")
    check_width(config, vision, "out_hidden_size", llm, 3584)
    check_width(config, audio, "output_dim", llm, 3584, where="audio_config")
    clips = Part(
        config=audio,
        projector=Projector.LINEAR,
        items=CLIP,
        weights={**AUDIO_TOWER, "projector.linear.": "model.audio_tower.proj."},
    )
    unread = Dropped(weights="model.audio_tower.audio_bos_eos_token.", what="tokens that no forward reads")
    return joined(config, {VISION: merging_tower(vision), AUDIO: clips}, llm, dropped=(unread,))


def _thinker_3(config: Config) -> Parts:
    """Qwen3-VL's vision tower, an audio encoder with convolutions and windows, and an LLM with experts."""
    llm = {**text_config(config, "", ties=False), "model_type": "qwen3_omni_moe_text"}
    seen = typed_config(config, "vision_config", "qwen3_omni_moe_vision_encoder")
    heard = typed_config(config, "audio_config", "qwen3_omni_moe_audio_encoder")
    check_width(config, seen, "out_hidden_size", llm, 2048)
    check_width(config, heard, "output_dim", llm, 2048, where="audio_config")
    clips = Part(
        config=heard,
        projector=_own_mlp(heard, 1280),
        items=CLIP,
        weights={
            **AUDIO_TOWER,
            "projector.0.": "model.audio_tower.proj1.",
            "projector.2.": "model.audio_tower.proj2.",
        },
    )
    return joined(config, {VISION: merging_tower(seen), AUDIO: clips}, llm)


_ASR_HEARD = {  # what Qwen3-ASR's encoder has where its configuration leaves it out
    "encoder_layers": 24,
    "encoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "d_model": 1024,
}
_ASR_TEXT = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def _qwen3_asr(config: Config) -> Parts:
    """Qwen3-Omni's audio encoder under other names, an MLP as projector, and Qwen3."""
    llm = text_config(config, "qwen3", absent=_ASR_TEXT, ties=True)
    named = {**_ASR_HEARD, **part_config(config, "audio_config", "")}
    positions = whole(named, "max_position_embeddings", CHUNK_TOKENS)
    heard = {key: value for key, value in named.items() if key != "max_position_embeddings"}
    heard |= {"model_type": "qwen3_omni_moe_audio_encoder", "max_source_positions": positions}
    check_width(config, heard, "output_dim", llm, 2048, where="audio_config")
    clips = Part(
        config=heard,
        projector=_own_mlp(heard, 1024),
        items=CLIP,
        weights=AUDIO_TOWER | two_linears(0, 2),
    )
    return joined(config, {AUDIO: clips}, llm)


def _own_mlp(heard: Config, usual: int) -> Steps:
    """A square matmul, the encoder's activation, a matmul to the LLM's width; `usual`: default `d_model`."""
    act = text(heard, "activation_function", "gelu")
    return (
        ProjectorStep(linear=whole(heard, "d_model", usual)),
        ProjectorStep(act=act),
        ProjectorStep(linear_out=True),
    )


def _of_thinker(config: Config, kind: str, take_apart: Callable[[Config], Parts], vocoder: str) -> Parts:
    """The thinker of a model with a talker, with the prefix of its weights.

    Args:
        config: of the whole model.
        kind: model_type of its thinker; take_apart: its parts.
        vocoder: what turns the talker's codes into sound.
    """
    parts = take_apart(typed_config(config, "thinker_config", kind))
    modules = {
        name: replace(
            part,
            weights={prefix: THINKER + composite_prefix for prefix, composite_prefix in part.weights.items()},
        )
        for name, part in parts.modules.items()
    }
    return replace(
        parts,
        modules=modules,
        dropped=(
            *(replace(dropped, weights=THINKER + dropped.weights) for dropped in parts.dropped),
            Dropped(weights="talker.", what="the talker: it speaks what the thinker thought, after training"),
            Dropped(weights=f"{vocoder}.", what="the talker's vocoder"),
        ),
    )


COMPOSITES = (
    Composite(name="Qwen2-Audio", model_type="qwen2_audio", take_apart=_qwen2_audio),
    Composite(name="Audio Flamingo 3", model_type="audioflamingo3", take_apart=_audioflamingo3),
    Composite(name="Music Flamingo", model_type="musicflamingo", take_apart=_musicflamingo),
    Composite(name="Voxtral", model_type="voxtral", take_apart=_voxtral),
    Composite(name="Phi-4 multimodal", model_type="phi4_multimodal", take_apart=_phi4),
    Composite(name="Qwen2.5-Omni's thinker", model_type="qwen2_5_omni_thinker", take_apart=_thinker),
    Composite(
        name="Qwen2.5-Omni",
        model_type="qwen2_5_omni",
        take_apart=lambda config: _of_thinker(config, "qwen2_5_omni_thinker", _thinker, "token2wav"),
    ),
    Composite(name="Qwen3-ASR", model_type="qwen3_asr", take_apart=_qwen3_asr),
    Composite(name="Qwen3-Omni's thinker", model_type="qwen3_omni_moe_thinker", take_apart=_thinker_3),
    Composite(
        name="Qwen3-Omni",
        model_type="qwen3_omni_moe",
        take_apart=lambda config: _of_thinker(config, "qwen3_omni_moe_thinker", _thinker_3, "code2wav"),
    ),
)
