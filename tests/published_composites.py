"""Composites at full size: transformers' defaults, or sizes of released checkpoints."""

from typing import Any

from transformers import AutoConfig

from tests.test_adapters_gemma4 import PUBLISHED, PUBLISHED_SPARSE
from tests.test_nemotron_h_plan import NEMOTRON_3_NANO

GEMMA4_SEEN = {
    "model_type": "gemma4_vision",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "standardize": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}
SIGLIP_400M = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
}
QWEN_1_5B = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}


EMBEDDED = {"projection_hidden_size": 4096, "projection_bias": False}


def default(kind: str, **parts: dict[str, Any]) -> dict[str, Any]:
    """The configuration that transformers makes of nothing but these parts."""
    config: dict[str, Any] = AutoConfig.for_model(kind, **parts).to_dict()
    return config


DEFAULTS = (
    *(
        "audioflamingo3",
        "cohere2_vision",
        "cosmos3_edge",
        "deepseek_vl",
        "glmasr",
        "idefics3",
        "internvl",
        "lfm2_vl",
    ),
    *("lighton_ocr", "llava", "llava_next", "llava_next_video", "llava_onevision", "mistral3", "mllama"),
    *("musicflamingo", "paddleocr_vl", "paligemma", "phi4_multimodal", "qianfan_ocr", "qwen2_5_omni"),
    *(
        "minicpm_ocr",
        "minicpmv4_6",
        "moss_transcribe_diarize",
        "nemotron_h_omni",
        "qwen2_audio",
        "smolvlm",
        "video_llama_3",
        "video_llava",
        "vipllava",
        "voxtral",
    ),
)
CONFIGS: dict[str, dict[str, Any]] = {
    **{kind: default(kind) for kind in (*DEFAULTS, "kimi_k25", "glm4v")},
    "exaone4_5": default("exaone4_5", vision_config={"out_hidden_size": 4096}),
    "ovis2": default("ovis2", text_config={"model_type": "qwen2", "hidden_size": 1536}),
    # 16 heads, as the tower's width is no multiple of the default
    "aya_vision": default("aya_vision", vision_config={"num_attention_heads": 16, "hidden_size": 1152}),
    "glm4v_moe": default("glm4v_moe", text_config={"head_dim": 128}),
    "glm46v": default("glm46v", text_config={"model_type": "glm4v_text"}),
    "glmga": default("glmga", text_config={"model_type": "glm4v_text"}),
    "glm_ocr": default("glm_ocr", text_config={"hidden_size": 1536, "head_dim": 128}),
    "gemma-4-31B": {"model_type": "gemma4", "text_config": PUBLISHED, "vision_config": GEMMA4_SEEN},
    "gemma-4-26B-A4B": {
        "model_type": "gemma4",
        "text_config": PUBLISHED_SPARSE,
        "vision_config": GEMMA4_SEEN,
    },
    "Janus-Pro-1B": {
        "model_type": "janus",
        "text_config": {
            "model_type": "llama",
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "vocab_size": 102400,
        },
        "tie_word_embeddings": False,
    },
    # towers' sizes are the defaults, and names of keys those of its release
    "Nemotron-3-Nano-Omni": {
        "model_type": "nemotron_h_omni",
        "llm_config": NEMOTRON_3_NANO,
        "vision_config": {"patch_size": 16, "video_temporal_patch_size": 2},
        "sound_config": {"num_mel_bins": 128, "convolution_bias": False, **EMBEDDED},
        "vit_hidden_size": 1280,
        "projector_hidden_size": 20480,
    },
    "VideoLLaMA3-2B": {
        "model_type": "video_llama_3",
        "text_config": QWEN_1_5B,
        "vision_config": {"model_type": "video_llama_3_vision", **SIGLIP_400M},
        "tie_word_embeddings": True,
    },
}
