"""The demo's jobs: one vision + audio + language model, trained in two ways, on this machine's cores."""

import os

from workbench.cost.hardware import Cluster, Link, Node
from workbench.data.sample import Sample, Segment
from workbench.job.job import Job, ModuleLayout
from workbench.model.hf_config import module_from_config
from workbench.model.model_graph import ModelGraph, connect
from workbench.model.projector import Projector
from workbench.model.trainable import Trainable
from workbench.plan.kernels import Kernels
from workbench.plan.plan import Precision, Settings

LLM_WIDTH = 512
IMAGE_TOKENS = 196  # 224 x 224 pixels in patches of 16
AUDIO_TOKENS = 150  # 3 s of Whisper frames
NUM_SAMPLES = 8
NUM_RANKS = 4
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 16,
    "num_attention_heads": 6,
    "image_size": 224,
    "patch_size": 16,
}
AUDIO = {
    "model_type": "whisper",
    "d_model": 384,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "num_mel_bins": 80,
    "max_source_positions": AUDIO_TOKENS,
}
LLM = {
    "model_type": "llama",
    "hidden_size": LLM_WIDTH,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 259,
    "tie_word_embeddings": False,
}
MIXES = {"projectors": Trainable.NONE, "projectors+llm": Trainable.ALL}


def demo_model(llm: Trainable) -> ModelGraph:
    """SigLIP, a Whisper encoder and Llama, cut to what two cores train in seconds; encoders stay frozen."""
    encoders = [
        module_from_config(
            config,
            name=name,
            modality=modality,
            trainable=Trainable.PROJECTOR,
            projector=Projector.MLP,
            llm_width=LLM_WIDTH,
        )
        for name, modality, config in (("vision", "image", VISION), ("audio", "audio", AUDIO))
    ]
    text = module_from_config(LLM, name="llm", modality="text", trainable=llm)
    return connect("demo-valm", *((encoder, text) for encoder in encoders))


def demo_batch() -> tuple[Sample, ...]:
    """Text around an image and a clip; one sample has no clip and one no image."""
    return tuple(_sample(index) for index in range(NUM_SAMPLES))


def _sample(index: int) -> Sample:
    segments = [Segment("text", 0, 24, 24)]
    if index != 5:
        segments.append(Segment("image", 0, IMAGE_TOKENS, IMAGE_TOKENS))
    segments.append(Segment("text", 1, 24, 24))
    if index != 2:
        segments.append(Segment("audio", 0, AUDIO_TOKENS, AUDIO_TOKENS))
    return Sample(index, (*segments, Segment("text", 2, 40, 40)))


def local_cluster(link: Link, memory_bytes: int) -> Cluster:
    """This machine: its ranks share its memory, and its cores where there are fewer cores than ranks."""
    node = Node(
        device="cpu",
        num_ranks=NUM_RANKS,
        memory_bytes=memory_bytes // NUM_RANKS,
        num_cores=len(os.sched_getaffinity(0)),
    )
    return Cluster(name="this machine", nodes=(node,), intra=link, inter=link)


def demo_job(mix: str, cluster: Cluster, counts: dict[str, int] | None = None) -> Job:
    """One way to train. Stage counts that are not given are searched under the ranks there are."""
    return Job(
        name=f"demo {mix}",
        model=demo_model(MIXES[mix]),
        cluster=cluster,
        batch=demo_batch(),
        layouts=tuple(ModuleLayout(module=module, pp=pp) for module, pp in (counts or {}).items()),
        settings=Settings(precision=Precision.FLOAT32, kernels=Kernels.EAGER),
    )
