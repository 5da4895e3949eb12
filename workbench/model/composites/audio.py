"""Models of sound: Qwen2-Audio and Voxtral."""

from workbench.model.composites.composite import (
    AUDIO,
    DECODER,
    LLM,
    Composite,
    Part,
    Parts,
    part_config,
    text_config,
    token_id,
    token_ids,
    two_linears,
)
from workbench.model.config_fields import Config, text, whole
from workbench.model.projector import Projector, ProjectorStep

_CLIP_S = 30  # Whisper's window


def _qwen2_audio(config: Config) -> Parts:
    heard = part_config(config, "audio_config", "qwen2_audio_encoder")
    return Parts(
        modules={
            AUDIO: Part(
                config=heard,
                projector=Projector.LINEAR,
                items={"seconds": _CLIP_S},
                weights={"": "model.audio_tower.", "projector.": "model.multi_modal_projector."},
            ),
            LLM: Part(config=text_config(config, "qwen2"), weights=DECODER),
        },
        token_ids=token_ids(audio=token_id(config, "audio_token_index", "audio_token_id")),
    )


def _voxtral(config: Config) -> Parts:
    """Frames side by side, as many as fill the width of the encoder's MLP, then an MLP without biases.

    What the language model's configuration leaves out is Ministral's.
    """
    heard = part_config(config, "audio_config", "voxtral_encoder")
    width, ffn = whole(heard, "hidden_size", 1280), whole(heard, "intermediate_size", 5120)
    if ffn % width:
        raise ValueError(f"voxtral: intermediate_size must be a multiple of hidden_size {width}, got {ffn}")
    out = ProjectorStep(linear_out=True, bias=False)
    act = ProjectorStep(act=text(config, "projector_hidden_act", "gelu"))
    return Parts(
        modules={
            AUDIO: Part(
                config=heard,
                projector=(ProjectorStep(merge=ffn // width), out, act, out),
                items={"seconds": _CLIP_S},
                weights={"": "model.audio_tower.", **two_linears(1, 3)},
            ),
            LLM: Part(config={**_MINISTRAL, **text_config(config, "llama")}, weights=DECODER),
        },
        token_ids=token_ids(audio=token_id(config, "audio_token_id")),
    )


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
QWEN2_AUDIO = Composite(name="Qwen2-Audio", model_type="qwen2_audio", take_apart=_qwen2_audio)
VOXTRAL = Composite(name="Voxtral", model_type="voxtral", take_apart=_voxtral)
