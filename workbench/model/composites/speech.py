"""Composites that transcribe speech, in windows that are filled up with silence: GLM-ASR and MOSS."""

from math import gcd

from workbench.model.composites.composite import (
    AUDIO,
    AUDIO_TOWER,
    CLIP,
    CLIP_S,
    QWEN3_SMALL,
    Composite,
    Part,
    Parts,
    joined,
    mlp_steps,
    part_config,
    text_config,
    two_linears,
    typed_config,
)
from workbench.model.config_fields import Config, flag, number, text, whole
from workbench.model.families.whisper import GLMASR_MERGE, MOSS_GROUP
from workbench.model.projector import ProjectorStep
from workbench.model.transformer import Norm


def _glmasr(config: Config) -> Parts:
    """Four tokens side by side, then an MLP whose inner width is twice the language model's."""
    heard = part_config(config, "audio_config", "glmasr_encoder")
    width, ffn = whole(heard, "hidden_size", 1280), whole(heard, "intermediate_size", 5120)
    if ffn != GLMASR_MERGE * width:
        raise ValueError(
            f"glmasr: audio_config.intermediate_size must be {GLMASR_MERGE * width}, {GLMASR_MERGE} times "
            f"hidden_size, as {GLMASR_MERGE} tokens become one, got {ffn}"
        )
    llm = {**_GLMASR_TEXT, **text_config(config, "llama", ties=True)}
    clips = Part(
        config=heard | {"most_windows": GLMASR_LONGEST_S // CLIP_S},
        projector=(
            ProjectorStep(merge=GLMASR_MERGE),
            ProjectorStep(linear=2 * whole(llm, "hidden_size")),
            ProjectorStep(act=text(config, "projector_hidden_act", "gelu")),
            ProjectorStep(linear_out=True),
        ),
        items=CLIP,
        weights=AUDIO_TOWER | two_linears(1, 3),
    )
    return joined(config, {AUDIO: clips}, llm)


def _moss(config: Config) -> Parts:
    """Tokens side by side in groups, an MLP, a norm."""
    group = whole(config, MOSS_GROUP, 4)
    heard = {**typed_config(config, "audio_config", "moss_transcribe_diarize_audio"), MOSS_GROUP: group}
    if (window := whole(heard, "max_source_positions", 1500)) % group:
        raise ValueError(
            f"{config['model_type']}: {MOSS_GROUP} must divide the {window} tokens of a window, got {group}; "
            f"nearest: {gcd(window, group)}"
        )
    llm = {**QWEN3_SMALL, **text_config(config, "qwen3", ties=True)}
    act, bias = text(config, "projector_hidden_act", "silu"), flag(config, "projector_bias", default=True)
    clips = Part(
        config=heard,
        projector=(
            ProjectorStep(merge=group),
            *mlp_steps(act, bias=bias),
            ProjectorStep(norm=Norm.LAYER, eps=number(llm, "rms_norm_eps", 1e-6)),
        ),
        items=CLIP,
        weights=AUDIO_TOWER | two_linears(1, 3) | {"projector.4.": "model.multi_modal_projector.norm."},
    )
    return joined(config, {AUDIO: clips}, llm)


GLMASR_LONGEST_S = 655  # of a clip: its processor's `max_audio_len`
_GLMASR_TEXT = {
    "vocab_size": 59264,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
}
COMPOSITES = (
    Composite(name="GLM-ASR", model_type="glmasr", take_apart=_glmasr),
    Composite(name="MOSS-Transcribe-Diarize", model_type="moss_transcribe_diarize", take_apart=_moss),
)
