"""A small configuration of every composite, and variants of some."""

from typing import Any

from experiments.doors.gemma_configs import GEMMA_CASES
from experiments.doors.mistral_configs import mistral_cases
from experiments.doors.nemotron_configs import NEMOTRON_CASES
from experiments.doors.siglip_configs import SIGLIP_CASES
from experiments.doors.sound_configs import SOUND_CASES
from experiments.doors.whole_sizes import (
    AXES,
    EXAONE_SEEN,
    EXPERTS,
    FLAMINGO_HEARD,
    GLM_EXPERTS,
    GLM_SEEN,
    GLM_TEXT,
    HEARD,
    HYBRID,
    JANUS_DRAWN,
    JANUS_SEEN,
    KIMI_SEEN,
    LATENT_TEXT,
    OCR_AXES,
    OMNI_3_HEARD,
    OMNI_HEARD,
    OVIS_SEEN,
    QWEN,
    QWEN3_SEEN,
    SEEN_5,
    TEXT,
    VIDEO_LLAMA_SEEN,
    VIT,
    WIDTH,
)

CASES: dict[str, dict[str, Any]] = {
    "llava": {"text_config": {"model_type": "llama", **TEXT}, "vision_config": VIT},
    "llava, mistral, no bias": {
        "model_type": "llava",
        "text_config": {"model_type": "mistral", **TEXT},
        "vision_config": {"model_type": "siglip_vision_model", **VIT},
        "vision_feature_layer": -3,
        "vision_feature_select_strategy": "full",
        "multimodal_projector_bias": False,
        "tie_word_embeddings": True,
    },
    "llava, several states": {
        "model_type": "llava",
        "text_config": {"model_type": "granite", **TEXT, "logits_scaling": 4.0, "embedding_multiplier": 3.0},
        "vision_config": {"model_type": "siglip_vision_model", **VIT},
        "vision_feature_layer": [-4, -3, -1],
        "vision_feature_select_strategy": "full",
        "tie_word_embeddings": True,
    },
    "vipllava": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": VIT,
        "vision_feature_layer": [-2, 0, 2],
        "projector_layernorm_eps": 1e-4,
    },
    "llava_next": {"text_config": {"model_type": "mistral", **TEXT}, "vision_config": VIT},
    "llava_next_video": {"text_config": {"model_type": "llama", **TEXT}, "vision_config": VIT},
    "llava_next_video, convolution": {
        "model_type": "llava_next_video",
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": VIT,
        "spatial_pool_mode": "conv",
    },
    "video_llava": {"text_config": {"model_type": "llama", **TEXT}, "vision_config": VIT},
    "llava_onevision": {"text_config": {"model_type": "qwen2", **TEXT}, "vision_config": VIT},
    "qwen2_vl": {
        "text_config": {**TEXT, **AXES},
        "vision_config": {**QWEN, "embed_dim": 24, "hidden_size": WIDTH, "mlp_ratio": 2},
    },
    "qwen2_5_vl": {
        "text_config": {**TEXT, **AXES},
        "vision_config": {**QWEN, "hidden_size": 24, "intermediate_size": 40, "out_hidden_size": WIDTH},
    },
    "exaone4_5": {
        "text_config": {"model_type": "exaone4", **TEXT, "sliding_window": 6, "sliding_window_pattern": 2},
        "vision_config": EXAONE_SEEN,
    },
    "hyperclovax_vision_v2": {
        "text_config": {
            **TEXT,
            "logits_scaling": 0.5,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
        },
        "vision_config": {**QWEN, "hidden_size": 24, "intermediate_size": 40, "out_hidden_size": 36},
    },
    "internvl": {"text_config": {"model_type": "qwen2", **TEXT}, "vision_config": VIT},
    "internvl, earlier state": {
        "model_type": "internvl",
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": VIT,
        "vision_feature_layer": -2,
        "tie_word_embeddings": False,
    },
    "internvl, experts": {
        "model_type": "internvl",
        "text_config": {"model_type": "qwen3_moe", **TEXT, **EXPERTS, "norm_topk_prob": True},
        "vision_config": VIT,
        "tie_word_embeddings": False,
    },
    "qianfan_ocr": {
        "text_config": {"model_type": "qwen3", **TEXT},
        "vision_config": {**VIT, "use_qk_norm": True, "use_mean_pooling": False},
    },
    "qianfan_ocr, earlier state": {
        "model_type": "qianfan_ocr",
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {**VIT, "norm_type": "rms_norm", "attention_bias": False, "drop_path_rate": 0.0},
        "vision_feature_layer": -2,
        "tie_word_embeddings": True,
    },
    "gemma3": {"text_config": TEXT, "vision_config": VIT, "mm_tokens_per_image": 4},
    **GEMMA_CASES,
    "paligemma": {
        "text_config": {"model_type": "gemma", **TEXT},
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **VIT},
        "projection_dim": WIDTH,
    },
    "paligemma, gemma2": {
        "model_type": "paligemma",
        "text_config": {"model_type": "gemma2", **TEXT},
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **VIT},
        "projection_dim": WIDTH,
    },
    "mllama": {
        "text_config": {**TEXT, "cross_attention_layers": [1]},
        "vision_config": {
            **{key: value for key, value in VIT.items() if key != "num_attention_heads"},
            "num_global_layers": 1,
            "attention_heads": 2,
            "intermediate_layers_indices": [1, 3],
            "vision_output_dim": 72,
        },
    },
    "idefics3": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": VIT,
        "scale_factor": 2,
        "pad_token_id": 0,
    },
    "smolvlm": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": VIT,
        "scale_factor": 4,
        "pad_token_id": 0,
    },
    **mistral_cases(TEXT, VIT),
    "lighton_ocr": {
        "text_config": {"model_type": "qwen3", **TEXT},
        "vision_config": {"model_type": "pixtral", **VIT, "head_dim": 12},
        "spatial_merge_size": 2,
    },
    "aya_vision": {
        "text_config": {"model_type": "cohere2", **TEXT, "sliding_window": 6, "sliding_window_pattern": 2},
        "vision_config": {"model_type": "siglip_vision_model", **VIT},
        "alignment_intermediate_size": 40,
        "adapter_layer_norm_eps": 1e-4,
    },
    "aya_vision, earlier state": {
        "model_type": "aya_vision",
        "text_config": {"model_type": "cohere2", **TEXT},
        "vision_config": {"model_type": "siglip_vision_model", **VIT},
        "vision_feature_layer": -2,
        "tie_word_embeddings": False,
    },
    "cohere2_vision": {
        "text_config": {"model_type": "cohere2", **TEXT, "sliding_window": 6, "sliding_window_pattern": 2},
        "vision_config": {"model_type": "siglip_vision_model", **VIT},
        "alignment_intermediate_size": 40,
    },
    **NEMOTRON_CASES,
    **SIGLIP_CASES,
    "deepseek_vl": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "siglip_vision_model", **VIT},
        "tie_word_embeddings": False,
    },
    "janus": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {**JANUS_SEEN, "depth": 3},
        "vq_config": JANUS_DRAWN,
    },
    "janus, untied": {
        "model_type": "janus",
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {**JANUS_SEEN, "attention_bias": False, "depth": 1},
        "vq_config": JANUS_DRAWN,
        "tie_word_embeddings": False,
    },
    "qwen2_audio": {
        "text_config": {"model_type": "qwen2", **TEXT},
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "d_model": 24,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 40,
            **HEARD,
        },
    },
    "audioflamingo3": {
        "text_config": {"model_type": "qwen2", **TEXT},
        "audio_config": FLAMINGO_HEARD,
    },
    "musicflamingo": {
        "text_config": {"model_type": "qwen2", **TEXT},
        "audio_config": FLAMINGO_HEARD,
    },
    "musicflamingo, fast": {
        "model_type": "musicflamingo",
        "text_config": {"model_type": "qwen2", **TEXT},
        "audio_config": FLAMINGO_HEARD,
        "audio_frame_step": 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 30.0, "partial_rotary_factor": 0.5},
    },
    "qwen3_vl": {
        "text_config": {**TEXT, **AXES},
        "vision_config": QWEN3_SEEN,
    },
    "cosmos3_omni": {
        "text_config": {"model_type": "qwen3_vl_text", **TEXT, **AXES},
        "vision_config": QWEN3_SEEN,
    },
    "cohere_compass": {
        "text_config": {
            **TEXT,
            "num_attention_heads": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 6,
            "logit_scale": 0.25,
            "rope_parameters": {"sliding_attention": AXES["rope_parameters"], "full_attention": None},
        },
        "vision_config": QWEN3_SEEN,
    },
    "qwen3_vl_moe": {
        "text_config": {**TEXT, **AXES, **EXPERTS, "tie_word_embeddings": False},
        "vision_config": QWEN3_SEEN,
    },
    "qwen3_5": {"text_config": {**TEXT, **HYBRID}, "vision_config": SEEN_5},
    "qwen3_5_moe": {
        "text_config": {**TEXT, **HYBRID, **EXPERTS, "shared_expert_intermediate_size": 20},
        "vision_config": SEEN_5,
    },
    "glm4v": {"text_config": GLM_TEXT, "vision_config": GLM_SEEN},
    "glm4v, tied": {
        "model_type": "glm4v",
        "text_config": {**GLM_TEXT, "tie_word_embeddings": True},
        "vision_config": {**GLM_SEEN, "attention_bias": False},
    },
    "glm4v_moe": {"text_config": {**GLM_TEXT, **GLM_EXPERTS}, "vision_config": GLM_SEEN},
    "glm46v": {
        "text_config": {"model_type": "glm4v_text", **GLM_TEXT},
        "vision_config": {"model_type": "glm4v_vision", **GLM_SEEN},
    },
    "glm46v, experts": {
        "model_type": "glm46v",
        "text_config": {
            "model_type": "glm4v_moe_text",
            **GLM_TEXT,
            **GLM_EXPERTS,
            "n_group": 1,
            "topk_group": 1,
        },
        "vision_config": {"model_type": "glm4v_moe_vision", **GLM_SEEN},
    },
    "glmga": {
        "text_config": {"model_type": "glm4v_text", **GLM_TEXT},
        "vision_config": {"model_type": "glm4v_vision", **GLM_SEEN},
    },
    "glm_ocr": {"text_config": GLM_TEXT, "vision_config": {**GLM_SEEN, "attention_bias": True}},
    "glm_ocr, no bias": {
        "model_type": "glm_ocr",
        "text_config": {**GLM_TEXT, "head_dim": 16, "rope_parameters": OCR_AXES},
        "vision_config": {**GLM_SEEN, "attention_bias": False},
    },
    "ovis2": {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": OVIS_SEEN,
        "hidden_size": WIDTH,
    },
    "ovis2, squares": {
        "model_type": "ovis2",
        "text_config": {"model_type": "qwen3", **TEXT},
        "vision_config": {**OVIS_SEEN, "hidden_stride": 2, "qkv_bias": True, "mlp_bias": True},
        "hidden_size": WIDTH,
        "vocab_size": TEXT["vocab_size"],
        "tie_word_embeddings": False,
    },
    "video_llama_3": {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": VIDEO_LLAMA_SEEN,
    },
    "video_llama_3, squares": {
        "model_type": "video_llama_3",
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {**VIDEO_LLAMA_SEEN, "spatial_merge_size": 2},
        "tie_word_embeddings": True,
    },
    "paddleocr_vl": {"text_config": {**TEXT, **AXES}, "vision_config": VIT},
    "paddleocr_vl, biases": {
        "model_type": "paddleocr_vl",
        "text_config": {**TEXT, **AXES, "use_bias": True, "tie_word_embeddings": False},
        "vision_config": {**VIT, "image_size": 24},
        "tie_word_embeddings": False,
    },
    "kimi_k25": {
        "text_config": LATENT_TEXT,
        "vision_config": KIMI_SEEN,
        "projection_hidden_size": 24,
        "tie_word_embeddings": False,
    },
    "kimi_k25, tied": {
        "model_type": "kimi_k25",
        "text_config": {**LATENT_TEXT, "model_type": "kimi_k2", "q_lora_rank": None},
        "vision_config": {**KIMI_SEEN, "model_type": "kimi_k25"},
        "projection_hidden_size": 24,
    },
    "qwen2_5_omni_thinker": {
        "text_config": {**TEXT, **AXES, "tie_word_embeddings": False},
        "vision_config": {**QWEN, "hidden_size": 24, "intermediate_size": 40, "out_hidden_size": WIDTH},
        "audio_config": {**OMNI_HEARD},
        "vision_start_token_id": 92,
        "audio_start_token_id": 93,
    },
    "qwen3_asr": {"text_config": {"model_type": "qwen3", **TEXT}, "audio_config": OMNI_3_HEARD},
    "qwen3_omni_moe_thinker": {
        "text_config": {**TEXT, **AXES, **EXPERTS},
        "vision_config": QWEN3_SEEN,
        "audio_config": OMNI_3_HEARD,
        "vision_start_token_id": 92,
        "audio_start_token_id": 93,
    },
    "llama4": {
        "text_config": {**TEXT, "num_local_experts": 2, "intermediate_size_mlp": 96},
        "vision_config": {
            **VIT,
            "intermediate_size": 96,
            "vision_output_dim": 56,
            "projector_input_dim": 56,
            "projector_output_dim": 56,
        },
    },
    "phi4_multimodal": {
        **TEXT,
        "vision_config": VIT,
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_blocks": 2,
            "num_attention_heads": 4,
            "input_size": 16,
            "time_reduction": 4,
            "nemo_conv_channels": 8,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "bias_max_distance": 16,
        },
    },
    **SOUND_CASES,
}
CASES["qwen2_5_omni"] = {"thinker_config": CASES["qwen2_5_omni_thinker"], "enable_audio_output": False}
CASES["qwen3_omni_moe"] = {
    "thinker_config": CASES["qwen3_omni_moe_thinker"],
    "enable_audio_output": False,
}
CONFIGS = {name: {"model_type": name, **case} for name, case in CASES.items()}
