"""A real but tiny vision + audio + language model, and batches for it."""

from collections.abc import Sequence

from workbench.data.sample import Sample, Segment
from workbench.model.hf_config import module_from_config
from workbench.model.model_graph import ModelGraph, connect
from workbench.model.trainable import Trainable

WIDTH = 32

VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_channels": 3,
    "image_size": 16,
    "patch_size": 4,
}
AUDIO = {
    "model_type": "whisper",
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "num_mel_bins": 8,
    "max_source_positions": 12,
}
LLM = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "tie_word_embeddings": False,
}


def tiny_valm(
    *,
    vision: Trainable = Trainable.PROJECTOR,
    audio: Trainable = Trainable.PROJECTOR,
    llm: Trainable = Trainable.ALL,
    tied: bool = False,
) -> ModelGraph:
    """Layers: vision 5 (embed, 3 blocks, projector), audio 4, LLM 6 (embed, 4 blocks, head)."""
    vision_module = module_from_config(
        VISION, name="vision", modality="image", trainable=vision, llm_width=WIDTH
    )
    audio_module = module_from_config(AUDIO, name="audio", modality="audio", trainable=audio, llm_width=WIDTH)
    llm_module = module_from_config(
        LLM | {"tie_word_embeddings": tied}, name="llm", modality="text", trainable=llm
    )
    return connect("tiny-valm", (vision_module, llm_module), (audio_module, llm_module))


def tiny_sample(index: int, *, images: int = 1, clips: int = 1) -> Sample:
    """Text, images and clips of sizes that differ from sample to sample."""
    segments = [Segment("text", 0, 3 + index % 3, 3 + index % 3)]
    segments += [Segment("image", k, 16, 16) for k in range(images)]
    segments += [Segment("text", 1, 2, 2)]
    segments += [Segment("audio", k, 6 + 2 * k, 6 + 2 * k) for k in range(clips)]
    return Sample(index, (*segments, Segment("text", 2, 4, 4)))


def tiny_batch(
    images: Sequence[int] = (1, 2, 0, 1), clips: Sequence[int] = (1, 0, 0, 2)
) -> tuple[Sample, ...]:
    """One sample per place; the counts say how many images and clips each has."""
    return tuple(
        tiny_sample(index, images=num_images, clips=num_clips)
        for index, (num_images, num_clips) in enumerate(zip(images, clips, strict=True))
    )
