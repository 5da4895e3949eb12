"""Small configurations of composites with SigLIP's towers for images of any size."""

from typing import Any

from experiments.doors.whole_sizes import AXES, HYBRID, LFM2, TEXT, VIT

SIGLIP_CASES: dict[str, dict[str, Any]] = {
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
    "cosmos3_edge": {
        "text_config": {**TEXT, **AXES},
        "vision_config": {**VIT, "num_patches": 16},
        "projector_hidden_size": 40,
    },
    "cosmos3_edge, biases": {
        "model_type": "cosmos3_edge",
        "text_config": {**TEXT, **AXES, "mlp_bias": True, "attention_bias": True},
        "vision_config": {**VIT, "num_patches": 64},
        "projector_hidden_size": 40,
        "tie_word_embeddings": True,  # which transformers does not do
    },
    "minicpm_ocr": {
        "text_config": {"model_type": "qwen3_5_text", **TEXT, **HYBRID},
        "vision_config": VIT,
        "image_token_id": 90,
    },
    "minicpm_ocr, merged twice": {
        "model_type": "minicpm_ocr",
        "text_config": {"model_type": "qwen3", **TEXT},
        "vision_config": {**VIT, "image_size": 32},
        "merger_times": 2,
        "image_token_id": 90,
        "tie_word_embeddings": False,
    },
    "minicpmv4_6": {
        "text_config": {"model_type": "qwen3_5_text", **TEXT, **HYBRID},
        "vision_config": VIT,
        "insert_layer_id": 1,
        "image_token_id": 90,
    },
    "minicpmv4_6, many tokens": {
        "model_type": "minicpmv4_6",
        "text_config": {"model_type": "qwen3", **TEXT},
        "vision_config": {**VIT, "image_size": 24},
        "downsample_mode": "4x",
        "image_token_id": 90,
    },
    "minicpmv4_6, last block": {
        "model_type": "minicpmv4_6",
        "text_config": {"model_type": "qwen3", **TEXT},
        "vision_config": {**VIT, "image_size": 32},
        "insert_layer_id": 3,
        "image_token_id": 90,
        "tie_word_embeddings": True,
    },
}
