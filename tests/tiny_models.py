"""Tiny real architectures for runtime tests, and plans that put them on stages."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from workbench.cost.hardware import Cluster, Link, Node
from workbench.data.sample import Item, Sample, Segment
from workbench.model.hf_config import module_from_config
from workbench.model.model_graph import TEXT, ModelGraph, Module, connect
from workbench.model.projector import Projector
from workbench.plan.plan import Microbatch, Plan, Precision, Settings
from workbench.plan.stage import Stage

WIDTH = 32

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
TIED = LLAMA | {"tie_word_embeddings": True}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-tied": TIED,
    "qwen2": LLAMA | {"model_type": "qwen2"},
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": 4},
    "gemma": LLAMA | {"model_type": "gemma", "head_dim": 8, "pad_token_id": 0},
    "phi3": LLAMA | {"model_type": "phi3", "pad_token_id": 0},
    "phi": LLAMA | {"model_type": "phi", "num_key_value_heads": 4},
}
SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 12,
    "patch_size": 4,
}
SIGLIP2: dict[str, Any] = {
    **{key: value for key, value in SIGLIP.items() if key != "image_size"},
    "model_type": "siglip2_vision_model",
    "num_patches": 9,
}
CLIP: dict[str, Any] = SIGLIP | {"model_type": "clip_vision_model"}
WHISPER: dict[str, Any] = {
    "model_type": "whisper",
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "num_mel_bins": 8,
    "max_source_positions": 10,
}
ENCODERS = (SIGLIP, SIGLIP2, CLIP, WHISPER)


def llm(config: dict[str, Any] | None = None) -> Module:
    return module_from_config(LLAMA if config is None else config, name="llm", modality=TEXT)


def encoder(config: dict[str, Any], name: str, *, projector: Projector = Projector.MLP) -> Module:
    return module_from_config(config, name=name, modality=name, projector=projector, llm_width=WIDTH)


def two_encoders(
    llm_config: dict[str, Any] | None = None, vision: dict[str, Any] | None = None
) -> ModelGraph:
    """Vision and audio into one LLM; the projectors differ."""
    text = llm(llm_config)
    images = encoder(SIGLIP if vision is None else vision, "vision")
    sounds = encoder(WHISPER, "audio", projector=Projector.LINEAR)
    return connect("two-encoders", (images, text), (sounds, text))


def frozen(module: Module, layers: Sequence[int]) -> Module:
    """The module with those layers frozen."""
    flagged = (replace(layer, trainable=i not in layers) for i, layer in enumerate(module.layers))
    return replace(module, layers=tuple(flagged))


def mixed_batch() -> tuple[Sample, ...]:
    """Unequal samples: two modalities, one, none; two images in one; an image that comes first."""
    return (
        Sample(0, (Segment(TEXT, 0, 3, 3), Segment("vision", 0, 9, 9), Segment(TEXT, 1, 5, 5))),
        Sample(3, (Segment("audio", 0, 7, 7), Segment(TEXT, 0, 4, 4), Segment("vision", 0, 6, 6))),
        Sample(4, (Segment(TEXT, 0, 8, 8),)),
        Sample(
            7,
            (
                Segment("vision", 1, 9, 9),
                Segment(TEXT, 0, 2, 2),
                Segment("vision", 0, 9, 9),
                Segment("audio", 0, 10, 10),
                Segment(TEXT, 1, 4, 4),
            ),
        ),
    )


def plan_of(
    model: ModelGraph,
    batch: tuple[Sample, ...],
    cuts: dict[str, Sequence[int]] | None = None,
    settings: Settings | None = None,
) -> Plan:
    """One replica, each stage on a rank of its own, the whole batch as one microbatch per module.

    Args:
        cuts: module -> number of layers of each stage; by default a module is one stage.
    """
    stages: list[Stage] = []
    for module in model.modules:
        first = 0
        for num_layers in (cuts or {}).get(module.name, (len(module.layers),)):
            layers = (first, first + num_layers)
            rank = len(stages)
            stages.append(Stage(id=rank, module=module.name, replica=0, layers=layers, ranks=((rank,),)))
            first += num_layers
    link = Link(name="wire", bytes_per_s=1e9, latency_s=1e-6)
    node = Node(device="toy", num_ranks=len(stages), memory_bytes=2**34)
    return Plan(
        strategy="test",
        model=model,
        cluster=Cluster(name="toy", nodes=(node,), intra=link, inter=link),
        batch=batch,
        stages=tuple(stages),
        microbatches=tuple(whole_batch(module, batch) for module in model.modules),
        programs=(),
        settings=Settings(precision=Precision.FLOAT64) if settings is None else settings,
    )


def whole_batch(module: Module, batch: Sequence[Sample]) -> Microbatch:
    """All items of a module in rows of up to two."""
    items = [
        Item(sample.id, segment.k)
        for sample in batch
        for segment in (sample.segments[:1] if module.modality == TEXT else sample.of(module.modality))
    ]
    if module.modality == TEXT:
        items = [Item(item.sample, 0) for item in items]
    rows = tuple(tuple(items[start : start + 2]) for start in range(0, len(items), 2))
    return Microbatch(module=module.name, replica=0, index=0, rows=rows)
