"""Small configurations of Gemma 4 with and without towers, and sizes of its parts."""

from typing import Any

from experiments.doors.whole_sizes import TEXT

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
UNIFIED_TEXT = {key: value for key, value in GEMMA4_TEXT.items() if key != "hidden_size_per_layer_input"}
UNIFIED_SEEN = {
    "patch_size": 2,
    "pooling_kernel_size": 2,
    "mm_embed_dim": 24,
    "output_proj_dims": 24,
    "mm_posemb_size": 12,
    "max_soft_tokens": 6,
}
GEMMA_CASES: dict[str, dict[str, Any]] = {
    "gemma4": {"text_config": GEMMA4_TEXT, "vision_config": GEMMA4_SEEN, "video_token_id": 92},
    "gemma4, experts": {
        "model_type": "gemma4",
        "text_config": {**GEMMA4_TEXT, **GEMMA4_EXPERTS},
        "vision_config": {**GEMMA4_SEEN, "standardize": False},
        "video_token_id": 92,
        "tie_word_embeddings": False,
    },
    "gemma4_unified": {"text_config": UNIFIED_TEXT, "vision_config": UNIFIED_SEEN, "video_token_id": 92},
    "gemma4_unified, sound": {
        "model_type": "gemma4_unified",
        "text_config": {**UNIFIED_TEXT, "use_bidirectional_attention": None, "final_logit_softcapping": 20.0},
        "vision_config": UNIFIED_SEEN,
        "audio_config": {"audio_embed_dim": 500},
        "video_token_id": 92,
        "tie_word_embeddings": False,
    },
}
