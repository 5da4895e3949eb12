"""Phi-4 multimodal: SigLIP and a conformer in front of Phi."""

from workbench.model.composites.composite import (
    AUDIO,
    LLM,
    TILES,
    VISION,
    Composite,
    Dropped,
    Part,
    Parts,
    part_config,
    token_ids,
    whole_or,
)
from workbench.model.composites.llava import unread_blocks
from workbench.model.config_fields import Config, whole
from workbench.model.projector import Merge, ProjectorStep

_CLIP_S = 30
_VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
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
_OUT = ProjectorStep(linear_out=True)
_MLP = (_OUT, ProjectorStep(act="gelu"), _OUT)


def _phi4(config: Config) -> Parts:
    """Means over squares of patches and an MLP; an MLP for clips. The LLM's keys stand at the top."""
    vision = {**_VISION, **part_config(config, "vision_config", ""), "model_type": "siglip_vision_model"}
    heard = part_config(config, "audio_config", "phi4_multimodal_audio")
    rate = whole(heard, "downsample_rate", 1)
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
                config=heard,
                projector=_MLP,
                items={"seconds": _CLIP_S},
                weights={
                    "": f"{_SOUND}encoder.",
                    "projector.0.": f"{_SOUND}up_proj_for_speech.",
                    "projector.2.": f"{_SOUND}down_proj_for_speech.",
                },
            ),
            LLM: Part(config=llm, weights={"model.": "model.", "lm_head.": "lm_head."}),
        },
        token_ids=token_ids(
            vision=whole_or(vision, "image_token_id", 200010), audio=whole_or(heard, "audio_token_id", 200011)
        ),
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


PHI4_MULTIMODAL = Composite(name="Phi-4 multimodal", model_type="phi4_multimodal", take_apart=_phi4)
