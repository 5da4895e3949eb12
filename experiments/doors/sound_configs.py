"""Small configurations of composites that hear clips in whole windows: GLM-ASR, MOSS, Voxtral."""

from typing import Any

from experiments.doors.whole_sizes import GLMASR_HEARD, HEARD, TEXT

SOUND_CASES: dict[str, dict[str, Any]] = {
    "glmasr": {
        "text_config": {"model_type": "llama", **TEXT},
        "audio_config": GLMASR_HEARD,
    },
    "glmasr, grouped": {
        "model_type": "glmasr",
        "text_config": {"model_type": "llama", **TEXT},
        "audio_config": {**GLMASR_HEARD, "num_attention_heads": 4, "num_key_value_heads": 2},
        "tie_word_embeddings": False,
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
    "moss_transcribe_diarize": {
        "text_config": {"model_type": "qwen3", **TEXT},
        "audio_config": {
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            **HEARD,
            "max_source_positions": 12,
        },
        "audio_token_id": 5,
    },
}
