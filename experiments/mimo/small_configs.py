"""Configurations of small modules that train on processors, as Hugging Face spells them."""

from typing import Any

WIDTH = 16  # of a small LLM
HEADS = 4  # divides by every tensor-parallel degree that runs

SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_channels": 3,
    "image_size": 8,
    "patch_size": 4,
}
WHISPER: dict[str, Any] = {
    "model_type": "whisper",
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "encoder_ffn_dim": 32,
    "num_mel_bins": 8,
    "max_source_positions": 12,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": 40,
    "tie_word_embeddings": False,
}
