"""transformers' own towers, where a configuration alone does not make them, with norms in float64."""

from typing import Any

from torch import nn
from transformers import AutoModel
from transformers.models.gemma4_unified import modeling_gemma4_unified as unified
from transformers.models.ovis2 import modeling_ovis2 as ovis2
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as omni
from transformers.models.radio import modeling_radio as radio

from runtime.models.norm import widen_norms


def omni_tower(config: dict[str, Any]) -> nn.Module:
    model = omni.Qwen2_5OmniVisionEncoder(omni.Qwen2_5OmniVisionEncoderConfig.from_dict(config))
    widen_norms(model, omni.Qwen2_5OmniRMSNorm)
    return model


def whole_model(config: dict[str, Any]) -> nn.Module:
    """transformers' own, with norms that stay in float64."""
    (config_class,) = (each for each in AutoModel._model_mapping if each.model_type == config["model_type"])
    model: nn.Module = AutoModel.from_config(config_class.from_dict(config))
    for norm in {type(each) for each in model.modules() if type(each).__name__.endswith("RMSNorm")}:
        widen_norms(model, norm)
    return model


def ovis_tower(config: dict[str, Any]) -> nn.Module:
    read = ovis2.Ovis2VisionConfig.from_dict(config)
    read._attn_implementation = "sdpa"  # a part alone would compute softmaxes in float32
    model = ovis2.Ovis2VisionTransformer(read)
    widen_norms(model, ovis2.Ovis2RMSNorm)
    return model


def radio_tower(config: dict[str, Any]) -> nn.Module:
    """Without its own normalisation of pixels, as before Nemotron."""
    model = radio.RadioModel(radio.RadioConfig.from_dict(config))
    model.make_preprocessor_external()
    return model


def unified_patches(config: unified.Gemma4UnifiedVisionConfig) -> nn.Module:
    """With a projector, which is none of the tower's."""
    return unified.Gemma4UnifiedVisionEmbedder(config, unified.Gemma4UnifiedTextConfig())


def unified_frames(config: unified.Gemma4UnifiedAudioConfig) -> nn.Module:
    model = unified.Gemma4UnifiedMultimodalEmbedder(config, unified.Gemma4UnifiedTextConfig())
    widen_norms(model, unified.Gemma4UnifiedRMSNorm)
    return model
