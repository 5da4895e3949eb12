"""Qwen3-VL and the thinker of Qwen2.5-Omni."""

from workbench.model.composites.composite import (
    AUDIO,
    DECODER,
    LLM,
    VISION,
    Composite,
    Dropped,
    Part,
    Parts,
    part_config,
    text_config,
    token_id,
    token_ids,
)
from workbench.model.composites.native import PAGE_PX, check_width
from workbench.model.config_fields import Config
from workbench.model.projector import Projector

_CLIP_S = 30
_VISUAL = {"": "model.visual."}
_OMNI_TEXT = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}


def _qwen3_vl(config: Config) -> Parts:
    llm = {**text_config(config, "qwen3_vl_text", ties=False), "model_type": "qwen3_vl_text"}
    seen = {**part_config(config, "vision_config", "qwen3_vl_vision"), "model_type": "qwen3_vl_vision"}
    check_width(config, seen, "out_hidden_size", llm, 4096)
    return Parts(
        modules={
            VISION: Part(config=seen, weights=_VISUAL, items={"images": [PAGE_PX]}),
            LLM: Part(config=llm, weights=DECODER),
        },
        token_ids=token_ids(vision=token_id(config, "image_token_id")),
        notes=("what DeepStack hands to the LLM's first blocks is no message of the plan",),
    )


def _thinker(config: Config) -> Parts:
    """Images as Qwen2.5-VL reads them; clips in windows of their own, two tokens of which become one."""
    llm = {**_OMNI_TEXT, **text_config(config, "qwen2_vl_text", ties=False), "model_type": "qwen2_vl_text"}
    seen = {**part_config(config, "vision_config", ""), "model_type": "qwen2_5_vl_vision"}
    heard = {**part_config(config, "audio_config", ""), "model_type": "qwen2_5_omni_audio_encoder"}
    check_width(config, seen, "out_hidden_size", llm, 3584)
    check_width(config, heard, "output_dim", llm, 3584, where="audio_config")
    return Parts(
        modules={
            VISION: Part(config=seen, weights=_VISUAL, items={"images": [PAGE_PX]}),
            AUDIO: Part(
                config=heard,
                projector=Projector.LINEAR,
                items={"seconds": _CLIP_S},
                weights={"": "model.audio_tower.", "projector.": "model.audio_tower.proj."},
            ),
            LLM: Part(config=llm, weights=DECODER),
        },
        token_ids=token_ids(
            vision=token_id(config, "image_token_id", "image_token_index"),
            audio=token_id(config, "audio_token_id", "audio_token_index"),
        ),
        dropped=(
            Dropped(weights="model.audio_tower.audio_bos_eos_token.", what="tokens that no forward reads"),
        ),
    )


def _omni(config: Config) -> Parts:
    thinker = part_config(config, "thinker_config", "qwen2_5_omni_thinker")
    parts = _thinker({**thinker, "model_type": "qwen2_5_omni_thinker"})
    return Parts(
        modules=parts.modules,
        token_ids=parts.token_ids,
        dropped=(
            *parts.dropped,
            Dropped(weights="talker.", what="the talker: it speaks what the thinker thought, after training"),
            Dropped(weights="token2wav.", what="the talker's vocoder"),
        ),
        notes=("the thinker alone; its names in a checkpoint begin with thinker.",),
    )


QWEN3_VL = Composite(name="Qwen3-VL", model_type="qwen3_vl", take_apart=_qwen3_vl)
THINKER = Composite(name="Qwen2.5-Omni's thinker", model_type="qwen2_5_omni_thinker", take_apart=_thinker)
OMNI = Composite(name="Qwen2.5-Omni", model_type="qwen2_5_omni", take_apart=_omni)
