"""Encoders small enough to be held against transformers, and its answers to their items."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Dinov2Config,
    Dinov2Model,
    Qwen2AudioEncoder,
    Qwen2AudioEncoderConfig,
)
from transformers.models.gemma4_unified import modeling_gemma4_unified as unified
from transformers.models.janus import modeling_janus as janus
from transformers.models.kimi_k25 import modeling_kimi_k25 as kimi
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.minicpm_ocr import modeling_minicpm_ocr as minicpm_ocr
from transformers.models.minicpmv4_6 import modeling_minicpmv4_6 as minicpm
from transformers.models.paddleocr_vl import modeling_paddleocr_vl as paddleocr
from transformers.models.parakeet import modeling_parakeet as parakeet
from transformers.models.phi4_multimodal import modeling_phi4_multimodal as phi4
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as omni
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as omni_3
from transformers.models.video_llama_3 import modeling_video_llama_3 as llama_3

from experiments.doors.detours import DETOURS
from experiments.doors.gemma_configs import GEMMA4_SEEN, UNIFIED_SEEN
from experiments.doors.nemotron_configs import PARAKEET_HEARD, RADIO_SEEN
from experiments.doors.whole_features import patches_of_kimi, patches_of_video_llama, qwen_features
from experiments.doors.whole_sizes import (
    JANUS_SEEN,
    KIMI_SEEN,
    VIDEO_LLAMA_SEEN,
)
from runtime.models.choose import ADAPTERS
from runtime.models.encoder import given_to
from runtime.models.vision_gemma4 import as_processed
from runtime.models.vision_minicpm import in_a_row
from runtime.step.stage_module import StageModule
from tests import cross_models, tiny_models
from tests.encoder_originals import (
    omni_tower,
    ovis_tower,
    radio_tower,
    unified_frames,
    unified_patches,
    whole_model,
)
from workbench.data.sample import Sample, Segment
from workbench.model.families.family import Encoder
from workbench.model.families.registry import ARCHITECTURES
from workbench.model.hf_config import modality_of, module_from_config
from workbench.model.model_graph import Module

VIT = {key: value for key, value in tiny_models.SIGLIP.items() if key != "model_type"}
QWEN = {"depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "hidden_act": "quick_gelu"}
WINDOWED: dict[str, Any] = QWEN | {
    "hidden_size": 32,
    "out_hidden_size": 32,
    "intermediate_size": 40,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}
STACKED: dict[str, Any] = QWEN | {
    "hidden_size": 32,
    "out_hidden_size": tiny_models.WIDTH,
    "intermediate_size": 40,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [2, 0],
}

GLM: dict[str, Any] = QWEN | {
    "hidden_size": 32,
    "out_hidden_size": tiny_models.WIDTH,
    "intermediate_size": 40,
    "image_size": 20,
    "hidden_act": "silu",
}


class Case(NamedTuple):
    """A configuration, (tokens in, tokens out) of two items, and transformers' answer to raw inputs."""

    config: dict[str, Any]
    items: tuple[tuple[int, int], ...]
    original: Callable[[dict[str, Any]], nn.Module]
    features: Callable[[nn.Module, Tensor], Tensor]
    projected: bool = True  # by our projector, which transformers' part does not have


def patches(model: nn.Module, image_CHW: Tensor) -> Tensor:
    return model(image_CHW[None]).last_hidden_state[0, 1:]


def paddle_features(model: nn.Module, image: Tensor) -> Tensor:
    patches, grid = patches_of_kimi(image)
    return model(patches[None], grid_thw=grid).last_hidden_state


# Of its own adapter, which has to fit, though it is no part of the tower.
LLAMA4_ENDING = {"pixel_shuffle_ratio": 1 / 3, "projector_input_dim": 24, "projector_output_dim": 24}
DINO = VIT | {"model_type": "dinov2", "mlp_ratio": 2, "layerscale_value": 0.3, "hidden_act": "gelu"}
OMNI = tiny_models.WHISPER | {"model_type": "qwen2_5_omni_audio_encoder", "n_window": 10}
OMNI_3 = tiny_models.WHISPER | {
    "model_type": "qwen3_omni_moe_audio_encoder",
    "max_source_positions": 13,
    "downsample_hidden_size": 6,
}
INTERNVIT = VIT | {"model_type": "internvl_vision", "hidden_act": "gelu", "layer_scale_init_value": 0.4}
CASES = {
    "dinov2": Case(DINO, ((10, 9), (7, 6)), lambda c: Dinov2Model(Dinov2Config.from_dict(c)), patches),
    "dinov2-gated": Case(
        DINO | {"use_swiglu_ffn": True, "qkv_bias": False},
        ((10, 9), (10, 9)),
        lambda c: Dinov2Model(Dinov2Config.from_dict(c)),
        patches,
    ),
    "radio": Case(
        RADIO_SEEN | {"model_type": "radio"},
        ((29, 24), (65, 60)),
        radio_tower,
        lambda model, image: model(image[None]).features[0],
    ),
    "radio, gated": Case(
        RADIO_SEEN | {"model_type": "radio", "use_swiglu_ffn": True, "qkv_bias": False, "num_registers": 0},
        ((14, 12), (18, 16)),
        radio_tower,
        lambda model, image: model(image[None]).features[0],
    ),
    "internvit": Case(INTERNVIT, ((10, 9), (5, 4)), whole_model, patches),
    "internvit-6b-style": Case(
        INTERNVIT | {"norm_type": "rms_norm", "use_qk_norm": True, "use_mean_pooling": False},
        ((10, 9), (10, 9)),
        whole_model,
        patches,
    ),
    "pixtral": Case(
        VIT | {"model_type": "pixtral", "hidden_size": 32, "hidden_act": "silu"},
        ((12, 12), (6, 6)),
        whole_model,
        lambda model, image: model(image[None]).last_hidden_state[0],
    ),
    "qwen2-vl": Case(
        QWEN | {"model_type": "qwen2_vl_vision", "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
        ((24, 6), (16, 4)),
        lambda c: qwen2.Qwen2VisionTransformerPretrainedModel(qwen2.Qwen2VLVisionConfig.from_dict(c)),
        qwen_features,
        projected=False,
    ),
    "qwen2.5-vl": Case(
        WINDOWED | {"model_type": "qwen2_5_vl_vision"},
        ((48, 12), (60, 15)),
        whole_model,
        qwen_features,
        projected=False,
    ),
    "exaone-4.5": Case(
        WINDOWED | {"model_type": "exaone4_5_vision", "num_heads": 4, "num_key_value_heads": 2},
        ((48, 12), (60, 15)),
        whole_model,
        qwen_features,
        projected=False,
    ),
    "qwen3-vl": Case(
        STACKED | {"model_type": "qwen3_vl_vision"},
        ((48, 12), (60, 15)),
        whole_model,
        qwen_features,
        projected=False,
    ),
    "qwen3.5-vision": Case(
        {key: value for key, value in STACKED.items() if key != "deepstack_visual_indexes"}
        | {"model_type": "qwen3_5_vision"},
        ((48, 12), (60, 15)),
        whole_model,
        qwen_features,
        projected=False,
    ),
    "qwen3-omni-vision": Case(
        STACKED | {"model_type": "qwen3_omni_moe_vision_encoder"},
        ((48, 12), (60, 15)),
        lambda c: omni_3.Qwen3OmniMoeVisionEncoder(omni_3.Qwen3OmniMoeVisionEncoderConfig.from_dict(c)),
        qwen_features,
        projected=False,
    ),
    "glm-4v": Case(
        GLM | {"model_type": "glm4v_vision"},
        ((48, 12), (60, 15)),
        whole_model,
        qwen_features,
        projected=False,
    ),
    "glm-ocr": Case(
        GLM | {"model_type": "glm_ocr_vision"},
        ((48, 12), (60, 15)),
        whole_model,
        qwen_features,
        projected=False,
    ),
    "kimi": Case(
        KIMI_SEEN | {"model_type": "kimi_k25_vision"},
        ((24, 24), (60, 60)),
        lambda c: kimi.Kimi_K25VisionModel(kimi.Kimi_K25VisionConfig.from_dict(c)),
        lambda model, image: model(*patches_of_kimi(image)).last_hidden_state,
    ),
    "video-llama-3": Case(
        VIDEO_LLAMA_SEEN | {"model_type": "video_llama_3_vision"},
        ((24, 24), (60, 60)),
        lambda c: llama_3.VideoLlama3VisionModel(llama_3.VideoLlama3VisionConfig.from_dict(c)),
        lambda model, image: model(*patches_of_video_llama(image, 1)).last_hidden_state,
    ),
    "video-llama-3, squares": Case(
        VIDEO_LLAMA_SEEN | {"model_type": "video_llama_3_vision", "spatial_merge_size": 2},
        ((24, 6), (60, 15)),
        lambda c: llama_3.VideoLlama3VisionModel(llama_3.VideoLlama3VisionConfig.from_dict(c)),
        lambda model, image: model(*patches_of_video_llama(image, 2)).last_hidden_state,
    ),
    "paddleocr-vl": Case(
        VIT | {"model_type": "paddleocr_vl_vision", "hidden_size": 32},
        ((24, 24), (60, 60)),
        lambda c: paddleocr.PaddleOCRVisionTransformer(paddleocr.PaddleOCRVisionConfig.from_dict(c)),
        paddle_features,
    ),
    "ovis-2": Case(
        VIT | {"model_type": "ovis2_vision"},
        ((9, 9), (9, 9)),
        ovis_tower,
        lambda model, image: model(image[None]).last_hidden_state[0],
    ),
    "janus": Case(
        JANUS_SEEN | {"model_type": "janus_vision_model"},
        ((16, 16), (6, 6)),
        lambda c: janus.JanusVisionModel(janus.JanusVisionConfig.from_dict(c)),
        lambda model, image: model(
            image[None], interpolate_pos_encoding=image.shape[1:] != (16, 16)
        ).last_hidden_state[0],
    ),
    "gemma4": Case(
        GEMMA4_SEEN | {"model_type": "gemma4_vision"},
        ((48, 12), (60, 15)),
        whole_model,
        lambda model, image: model(*as_processed(image, 4)).last_hidden_state,
    ),
    "gemma4 unified": Case(
        UNIFIED_SEEN | {"model_type": "gemma4_unified_vision"},
        ((12, 12), (15, 15)),
        lambda c: unified_patches(unified.Gemma4UnifiedVisionConfig.from_dict(c)),
        lambda model, image: model(*as_processed(image, 4)).last_hidden_state[0],
    ),
    "gemma4 unified, sound": Case(
        {"model_type": "gemma4_unified_audio", "audio_embed_dim": 20},
        ((7, 7), (5, 5)),
        lambda c: unified_frames(unified.Gemma4UnifiedAudioConfig.from_dict(c)),
        lambda model, samples: given_to("embedding_projection", model, samples.mT[None])[0],
    ),
    "minicpm-ocr": Case(
        VIT | {"model_type": "minicpm_ocr_vision"},
        ((9, 9), (12, 12)),
        lambda c: minicpm_ocr.MiniCPMOcrVisionModel(minicpm_ocr.MiniCPMOcrVisionConfig.from_dict(c)),
        lambda model, image: model(*in_a_row(image[None], 4), use_vit_merger=False).last_hidden_state[0],
    ),
    "minicpm-v": Case(
        VIT | {"model_type": "minicpmv4_6_vision", "insert_layer_id": 1},
        ((16, 4), (24, 6)),
        lambda c: minicpm.MiniCPMV4_6VisionModel(minicpm.MiniCPMV4_6VisionConfig.from_dict(c)),
        lambda model, image: model(*in_a_row(image[None], 4)).last_hidden_state[0],
    ),
    "omni-vision": Case(
        WINDOWED | {"model_type": "qwen2_5_omni_vision_encoder"},
        ((48, 12), (60, 15)),
        omni_tower,
        qwen_features,
        projected=False,
    ),
    "qwen2-audio": Case(
        tiny_models.WHISPER | {"model_type": "qwen2_audio_encoder"},
        ((10, 5), (10, 5)),
        lambda c: Qwen2AudioEncoder(Qwen2AudioEncoderConfig.from_dict(c)),
        lambda model, mel: model(mel[None]).last_hidden_state[0],
    ),
    "omni-audio": Case(
        OMNI,
        ((10, 5), (7, 3)),
        lambda c: omni.Qwen2_5OmniAudioEncoder(omni.Qwen2_5OmniAudioEncoderConfig.from_dict(c)),
        lambda model, mel: given_to("proj", model, mel, torch.tensor([mel.shape[1]])),
    ),
    "qwen3-omni-audio": Case(
        OMNI_3,
        ((104, 104), (101, 101)),
        lambda c: omni_3.Qwen3OmniMoeAudioEncoder(omni_3.Qwen3OmniMoeAudioEncoderConfig.from_dict(c)),
        lambda model, mel: given_to("proj1", model, mel, torch.tensor([mel.shape[1]])),
    ),
    "llama4-vision": Case(
        VIT | {"model_type": "llama4_vision_model", "intermediate_size": 9 * VIT["hidden_size"]},
        ((10, 9), (10, 9)),
        lambda c: llama4.Llama4VisionModel(llama4.Llama4VisionConfig.from_dict(LLAMA4_ENDING | c)),
        lambda model, image: given_to("vision_adapter", model, image[None])[0],
    ),
    "parakeet": Case(
        PARAKEET_HEARD | {"model_type": "parakeet_encoder"},
        ((7, 7), (5, 5)),
        lambda c: parakeet.ParakeetEncoder(parakeet.ParakeetEncoderConfig.from_dict(c)),
        lambda model, mel: model(mel.t()[None]).last_hidden_state[0],
    ),
    "parakeet, no bias": Case(
        PARAKEET_HEARD
        | {"model_type": "parakeet_encoder", "subsampling_factor": 4, "conv_kernel_size": 5}
        | {"attention_bias": False, "convolution_bias": False, "scale_input": False},
        ((9, 9), (1, 1)),
        lambda c: parakeet.ParakeetEncoder(parakeet.ParakeetEncoderConfig.from_dict(c)),
        lambda model, mel: model(mel.t()[None]).last_hidden_state[0],
    ),
    "phi-4-audio": Case(
        {
            "model_type": "phi4_multimodal_audio",
            "hidden_size": 24,
            "intermediate_size": 20,
            "num_blocks": 2,
            "num_attention_heads": 2,
            "input_size": 8,
            "time_reduction": 4,
            "nemo_conv_channels": 6,
            "ext_pw_out_channel": 24,
            "depthwise_separable_out_channel": 24,
            "bias_max_distance": 4,
        },
        ((7, 7), (5, 5)),
        lambda c: phi4.Phi4MultimodalAudioModel(phi4.Phi4MultimodalAudioConfig.from_dict(c)),
        lambda model, mel: model(mel.t()[None], None)[0],
    ),
}


# Every family that no other test holds against transformers is tried by its examples.
ELSEWHERE = {config["model_type"] for config in tiny_models.ENCODERS}
ELSEWHERE |= {cross_models.VISION["model_type"], *(case.config["model_type"] for case in CASES.values())}
CASES |= {
    name: Case(
        {"model_type": kind, **example.config},
        (example.tokens, example.tokens),
        whole_model,
        lambda model, item: model(item[None]).last_hidden_state[0],
    )
    for kind, family in ARCHITECTURES.items()
    if isinstance(family, Encoder) and family.runs(ADAPTERS) and kind not in ELSEWHERE
    for name, example in family.examples.items()
}


def module_of(case: Case) -> Module:
    modality = modality_of(case.config)
    return module_from_config(case.config, name=modality, modality=modality, llm_width=tiny_models.WIDTH)


def samples_of(case: Case, modality: str) -> tuple[Sample, ...]:
    return tuple(Sample(k, (Segment(modality, 0, *tokens),)) for k, tokens in enumerate(case.items))


def original(case: Case, ours: StageModule) -> nn.Module:
    theirs = case.original(case.config).double().eval()  # complex angles stay complex
    weights = {key: value.detach() for key, value in ours.named_weights() if not key.startswith("projector.")}
    missing, unexpected = theirs.load_state_dict(weights | ours.named_constants(), strict=False)
    assert not unexpected
    assert all(key.startswith(("layernorm.", *ours.adapter.ignored)) for key in missing), missing
    return theirs


def widen_vision_rotations(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes in float64 where it converts to float32."""
    for owner, name, made in DETOURS:
        monkeypatch.setattr(owner, name, made)


@pytest.fixture(autouse=True)
def wide_rotations(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every test of the files that import it."""
    widen_vision_rotations(monkeypatch)
