"""Small sizes of the parts of composites."""

WIDTH = 48
CLIP_S = 0.34  # a window and a part of one
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
EXAONE_SEEN = {
    **QWEN,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "out_hidden_size": WIDTH,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}
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
OCR_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
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
OVIS_SEEN = {**VIT, "vocab_size": 30, "num_visual_indicator_tokens": 5}
VIDEO_LLAMA_SEEN = {key: value for key, value in VIT.items() if key != "image_size"}
JANUS_SEEN = {
    **{key: value for key, value in VIT.items() if key != "intermediate_size"},
    "mlp_ratio": 1.75,
    "projection_dim": WIDTH,
}
JANUS_DRAWN = {  # what Janus generates images with
    "embed_dim": 4,
    "num_embeddings": 8,
    "latent_channels": 8,
    "base_channels": 32,
    "channel_multiplier": [1],
    "num_res_blocks": 1,
    "projection_dim": WIDTH,
    "image_token_embed_dim": WIDTH,
}
GLM_SEEN = {
    **QWEN,
    "hidden_size": 24,
    "intermediate_size": 40,
    "out_hidden_size": WIDTH,
    "image_size": 20,
    "attention_bias": True,
}
HEARD = {"num_mel_bins": 8, "max_source_positions": 10}
FLAMINGO_HEARD = {
    "model_type": "audioflamingo3_encoder",
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    **HEARD,
}
GLMASR_HEARD = {
    "model_type": "glmasr_encoder",
    "hidden_size": 24,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_mel_bins": 8,
    "max_position_embeddings": 12,
}
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
