"""The models that the papers train, tiny: which run, and why the rest do not.

Cornstarch (ICML) Table 6 and Cornstarch v1 section 6.3 name them.
"""

from typing import Any

from tests import tiny_models

LLAMA = tiny_models.LLAMA
SLIDING = LLAMA | {"head_dim": 8, "sliding_window": 4, "pad_token_id": 0, "query_pre_attn_scalar": 8}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_inner": 48,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 64,
    "n_positions": 128,
    "scale_attn_by_inverse_layer_idx": True,
}
OPT: dict[str, Any] = {
    "model_type": "opt",
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
DEEPSEEK: dict[str, Any] = LLAMA | {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_routed_experts": 6,
    "n_group": 3,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.75,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
}
GEMMA4: dict[str, Any] = SLIDING | {
    "model_type": "gemma4_text",
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "global_head_dim": 16,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 5.0,
    "hidden_size_per_layer_input": 0,
}
GEMMA4_SPARSE = GEMMA4 | {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
DECODERS: dict[str, dict[str, Any]] = {
    "qwen2.5": LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 16},
    "qwen3_moe": LLAMA
    | {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": False,
    },
    "mixtral": LLAMA | {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2},
    "gemma2": SLIDING | {"model_type": "gemma2", "attn_logit_softcapping": 2.0},
    "gemma3": SLIDING
    | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "sliding_window_pattern": 2,
        "final_logit_softcapping": 5.0,
    },
    "gemma4": GEMMA4,
    "gemma4, own values": GEMMA4 | {"attention_k_eq_v": False, "attention_bias": True},
    "gemma4, experts": GEMMA4_SPARSE,
    "phi-4": LLAMA | {"model_type": "phi3", "pad_token_id": 0, "partial_rotary_factor": 0.5},
    "gpt2": GPT2,
    "opt": OPT,
    "glm4": LLAMA | {"model_type": "glm4", "head_dim": 12, "partial_rotary_factor": 0.5, "pad_token_id": 0},
    "glm4_moe": LLAMA
    | {
        "model_type": "glm4_moe",
        "head_dim": 8,
        "num_hidden_layers": 3,
        "n_routed_experts": 6,
        "n_group": 3,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.75,
        "use_qk_norm": True,
    },
    "deepseek_v2": DEEPSEEK
    | {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "mlp_bias": True},
    "deepseek_v2, greedy": DEEPSEEK | {"model_type": "deepseek_v2", "q_lora_rank": None},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": DEEPSEEK
    | {"model_type": "deepseek_v32", "index_topk": 5, "index_n_heads": 3, "index_head_dim": 12},
    "glm_moe_dsa": DEEPSEEK
    | {
        "model_type": "glm_moe_dsa",
        "index_topk": 4,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "indexer_types": ["full", "shared", "full"],
    },
    "deepseek_v3, queries without a latent": DEEPSEEK
    | {"q_lora_rank": None, "rope_interleave": False, "v_head_dim": 12, "attention_bias": True},
}
