"""Small configurations of Nemotron 3 Nano Omni, and sizes of its parts."""

from typing import Any

from experiments.doors.whole_sizes import TEXT, VIT

RADIO_SEEN = {
    **{key: value for key, value in VIT.items() if key != "intermediate_size"},
    "mlp_ratio": 1.75,
    "num_cls_tokens": 2,
    "num_registers": 3,
    "max_img_size": 24,
    "layerscale_value": 0.7,
    "video_temporal_patch_size": 2,
    "min_num_patches": 16,
}
PARAKEET_HEARD = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_mel_bins": 16,
    "subsampling_conv_channels": 6,
}
NEMOTRON = {
    **TEXT,
    "layers_block_type": ["linear_attention", "mlp", "full_attention"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 4,
    "n_groups": 2,
    "ssm_state_size": 6,
    "chunk_size": 16,
}
NEMOTRON_EXPERTS = {
    "layers_block_type": ["linear_attention", "moe", "full_attention"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 20,
    "num_nextn_predict_layers": 1,
}
NEMOTRON_CASES: dict[str, dict[str, Any]] = {
    "nemotron_h_omni": {
        "text_config": NEMOTRON,
        "vision_config": RADIO_SEEN,
        "vision_hidden_size": 24,
        "image_token_id": 90,
        "projector_hidden_size": 40,
    },
    "nemotron_h_omni, experts": {
        "model_type": "nemotron_h_omni",
        "llm_config": {**NEMOTRON, **NEMOTRON_EXPERTS},
        "vision_config": {**RADIO_SEEN, "use_swiglu_ffn": True, "qkv_bias": False},
        "vit_hidden_size": 24,
        "img_context_token_id": 90,
        "projector_hidden_size": 40,
    },
    "nemotron_h_omni, sound": {
        "model_type": "nemotron_h_omni",
        "llm_config": NEMOTRON,
        "vision_config": RADIO_SEEN,
        "sound_config": {
            **PARAKEET_HEARD,
            "convolution_bias": False,
            "projection_hidden_size": 40,
            "projection_bias": False,
        },
        "vit_hidden_size": 24,
        "projector_hidden_size": 40,
        "img_context_token_id": 90,
        "sound_context_token_id": 91,
    },
    "nemotron_h_omni, biases": {
        "model_type": "nemotron_h_omni",
        "text_config": NEMOTRON,
        "vision_config": RADIO_SEEN,
        "audio_config": {
            **PARAKEET_HEARD,
            "attention_bias": True,
            "scale_input": True,
            "projection_hidden_size": 32,
            "projection_bias": True,
        },
        "vision_hidden_size": 24,
        "projector_hidden_size": 40,
        "image_token_id": 90,
        "audio_token_id": 91,
    },
}
