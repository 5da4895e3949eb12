"""Small configurations of Mistral 3 with each of its language models."""

from collections.abc import Mapping
from typing import Any

_GROWING = {  # queries, from the fourth position on
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4,
    "max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 28,
}


def mistral_cases(text: Mapping[str, Any], vit: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Name -> configuration, from sizes that composites share."""
    latent = {key: value for key, value in text.items() if key != "head_dim"} | _LATENT
    around = {
        "vision_config": {"model_type": "pixtral", **vit, "head_dim": 12},
        "spatial_merge_size": 2,
    }
    untied = {"model_type": "mistral3", "tie_word_embeddings": False, **around}
    return {
        "mistral3": {"text_config": {"model_type": "mistral", **text}, **around},
        "mistral3, ministral 3": {
            **untied,
            "text_config": {"model_type": "ministral3", **text, "rope_parameters": _GROWING},
        },
        "mistral3, mistral small 4": {
            **untied,
            "text_config": {
                "model_type": "mistral4",
                **latent,
                "rope_parameters": {**_GROWING, "partial_rotary_factor": 1 / 3},
            },
        },
    }
