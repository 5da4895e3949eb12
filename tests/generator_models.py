"""A tiny vision + language model that also makes images, and batches for it."""

from collections.abc import Sequence

from tests.tiny_valm import LLM, VISION, WIDTH
from workbench.data.sample import Sample, Segment
from workbench.model.hf_config import module_from_config
from workbench.model.model_graph import ModelGraph, Module, connect
from workbench.model.trainable import Trainable

CONDITION = 3
PATCHES = 6  # 2 x 3 patches of 2 x 2
DIT = {
    "model_type": "dit",
    "hidden_size": 20,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "latent_channels": 3,
    "latent_side": 4,
    "patch_size": 2,
    "condition_tokens": CONDITION,
}
ALL, PROJECTOR, NONE = Trainable.ALL, Trainable.PROJECTOR, Trainable.NONE

# DistTrain section 7.3: what is trained of encoder, LLM and generator.
SETTINGS = {
    "everything": (ALL, ALL, ALL),
    "projectors": (PROJECTOR, NONE, PROJECTOR),
    "encoder": (ALL, NONE, PROJECTOR),
    "llm": (PROJECTOR, ALL, PROJECTOR),
    "generator": (PROJECTOR, NONE, ALL),
    "generator-alone": (NONE, NONE, ALL),
    "llm-behind-frozen": (NONE, ALL, NONE),
}


def generator(trainable: Trainable = ALL) -> Module:
    return module_from_config(
        DIT, name="generator", modality="generator", trainable=trainable, llm_width=WIDTH
    )


def drawing_model(setting: str = "everything") -> ModelGraph:
    """Layers: vision 5, LLM 6, generator 5 (projector, embed, 2 blocks, head)."""
    vision, llm, dit = SETTINGS[setting]
    encoder = module_from_config(VISION, name="vision", modality="image", trainable=vision, llm_width=WIDTH)
    language = module_from_config(LLM, name="llm", modality="text", trainable=llm)
    return connect("tiny-drawing", (encoder, language, generator(dit)))


def drawing_sample(index: int, *, images: int, drawn: int) -> Sample:
    """Text, what is seen, text, what is drawn, with more text before the last of it."""
    text = 3 + index % 3
    seen = [Segment("image", k, 16, 16) for k in range(images)]
    made = [Segment("generator", k, 1 + CONDITION + k + PATCHES, CONDITION + k) for k in range(drawn)]
    between = Segment("text", 1, 2, 2)
    return Sample(index, (Segment("text", 0, text, text), *seen, between, *made, Segment("text", 2, 4, 4)))


def drawing_batch(
    images: Sequence[int] = (1, 2, 0, 1), drawn: Sequence[int] = (1, 0, 2, 1)
) -> tuple[Sample, ...]:
    return tuple(
        drawing_sample(index, images=num_images, drawn=num_drawn)
        for index, (num_images, num_drawn) in enumerate(zip(images, drawn, strict=True))
    )
