"""A small configuration of every composite, and variants of some."""

from typing import Any

from experiments.doors.mistral_configs import mistral_cases

WIDTH = 48
TEXT = {
    "hidden_size": WIDTH,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "head_dim": 12,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 28}
AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}}
VIT = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
QWEN = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN3_SEEN = {
    **QWEN,
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 40,
    "out_hidden_size": WIDTH,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}
LFM2 = {
    **{key: value for key, value in TEXT.items() if key != "head_dim"},
    "model_type": "lfm2",
    "layer_types": ["conv", "full_attention", "conv"],
    "block_multiple_of": 8,
}
GLM_TEXT = {
    **TEXT,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 1],
    },
}
GLM_EXPERTS = {
    "n_routed_experts": 6,
    "n_group": 3,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 28,
    "routed_scaling_factor": 1.75,
}
LATENT_TEXT = {
    **{key: value for key, value in TEXT.items() if key != "head_dim"},
    **GLM_EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
}
KIMI_SEEN = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 4,
    "pos_emb_height": 6,
    "pos_emb_width": 6,
}
GEMMA4_SEEN = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 12,
    "max_soft_tokens": 6,
    "standardize": True,
}
GEMMA4_TEXT = {
    **TEXT,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 5,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 28}
GLM_SEEN = {
    **QWEN,
    "hidden_size": 24,
    "intermediate_size": 40,
    "out_hidden_size": WIDTH,
    "image_size": 20,
    "attention_bias": True,
}
HEARD = {"num_mel_bins": 8, "max_source_positions": 10}
OMNI_HEARD = {
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "num_mel_bins": 8,
    "n_window": 10,
    "output_dim": WIDTH,
}
OMNI_3_HEARD = {
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "num_mel_bins": 8,
    "n_window_infer": 200,
    "downsample_hidden_size": 6,
    "output_dim": WIDTH,
}
HYBRID = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [1, 1, 1],
        "partial_rotary_factor": 0.5,
    },
}
SEEN_5 = {key: value for key, value in QWEN3_SEEN.items() if key != "deepstack_visual_indexes"}
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
    "llava_next": {"text_config": {"model_type": "mistral", **TEXT}, "vision_config": VIT},
    "llava_onevision": {"text_config": {"model_type": "qwen2", **TEXT}, "vision_config": VIT},
    "qwen2_vl": {
        "text_config": {**TEXT, **AXES},
        "vision_config": {**QWEN, "embed_dim": 24, "hidden_size": WIDTH, "mlp_ratio": 2},
    },
    "qwen2_5_vl": {
        "text_config": {**TEXT, **AXES},
        "vision_config": {**QWEN, "hidden_size": 24, "intermediate_size": 40, "out_hidden_size": WIDTH},
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
    "gemma3": {"text_config": TEXT, "vision_config": VIT, "mm_tokens_per_image": 4},
    "gemma4": {"text_config": GEMMA4_TEXT, "vision_config": GEMMA4_SEEN, "video_token_id": 92},
    "gemma4, experts": {
        "model_type": "gemma4",
        "text_config": {**GEMMA4_TEXT, **GEMMA4_EXPERTS},
        "vision_config": {**GEMMA4_SEEN, "standardize": False},
        "video_token_id": 92,
        "tie_word_embeddings": False,
    },
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
    "lfm2_vl": {
        "text_config": LFM2,
        "vision_config": {"model_type": "siglip2_vision_model", **VIT, "num_patches": 16},
        "projector_hidden_size": 40,
    },
    "lfm2_vl, plain": {
        "model_type": "lfm2_vl",
        "text_config": {**LFM2, "layer_types": None, "full_attn_idxs": [0, 2]},
        "vision_config": {"model_type": "siglip2_vision_model", **VIT, "num_patches": 16},
        "projector_hidden_size": 40,
        "projector_bias": False,
        "projector_use_layernorm": False,
        "tie_word_embeddings": False,
    },
    "deepseek_vl": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "siglip_vision_model", **VIT},
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
        "audio_config": {
            "model_type": "audioflamingo3_encoder",
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 40,
            **HEARD,
        },
    },
    "qwen3_vl": {
        "text_config": {**TEXT, **AXES},
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
    "voxtral": {
        "audio_token_id": 5,
        "text_config": {"model_type": "llama", **TEXT},
        "audio_config": {
            "model_type": "voxtral_encoder",
            "hidden_size": 24,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            **HEARD,
            "max_source_positions": 12,
        },
    },
}
CASES["qwen2_5_omni"] = {"thinker_config": CASES["qwen2_5_omni_thinker"], "enable_audio_output": False}
CASES["qwen3_omni_moe"] = {
    "thinker_config": CASES["qwen3_omni_moe_thinker"],
    "enable_audio_output": False,
}
CONFIGS = {name: {"model_type": name, **case} for name, case in CASES.items()}
