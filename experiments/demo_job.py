"""The demo's jobs: one vision + audio + language model, trained in two ways, on this machine's cores."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import yaml

from workbench.cost.hardware import Cluster, Link, Node
from workbench.cost.model import CostModel
from workbench.data.sample import Sample, Segment
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.model.hf_config import module_from_config
from workbench.model.model_graph import TEXT, ModelGraph, connect
from workbench.model.projector import Projector
from workbench.model.trainable import Trainable
from workbench.plan.kernels import Kernels
from workbench.plan.plan import Plan, Precision, Settings
from workbench.strategies import cornstarch, encoders_colocated, encoders_replicated
from workbench.units import GB, GIB, US_PER_S
from workbench.whole_file import write_text

LLM_WIDTH = 512
IMAGE_TOKENS = 196  # 224 x 224 pixels in patches of 16
AUDIO_S = 3.0
AUDIO_TOKENS = 150  # of Whisper frames
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
ENCODERS = (("vision", "image", VISION), ("audio", "audio", AUDIO))  # name, modality, configuration
STRATEGIES: tuple[Callable[[Job, CostModel], Plan], ...] = (
    cornstarch.plan,
    cornstarch.plan_frozen_unaware,
    encoders_colocated.plan,
    encoders_replicated.plan,
)
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
        for name, modality, config in ENCODERS
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


def write_job_file(mix: str, path: Path, cluster: Cluster, profile: str) -> None:
    """The job as a file, with the sizes of its samples beside it: of two batches, for twice the samples.

    Its samples hold as many tokens of everything; files of sizes put text behind images and clips.

    Args:
        cluster: as `local_cluster` makes it.
        profile: of this machine, from the file's folder.
    """
    node, link = cluster.nodes[0], cluster.intra
    sizes = path.with_name(f"{path.stem}-sizes.jsonl")
    rows = [json.dumps(_sizes(sample)) + "\n" for sample in demo_batch()]
    write_text("".join(2 * rows), sizes)
    encoders = {
        name: {"config": config, "modality": modality, "trainable": "projector", "projector": "mlp"}
        for name, modality, config in ENCODERS
    }
    spec = {
        "name": f"demo {mix}",
        "model": {"modules": {**encoders, "llm": {"config": LLM, "trainable": MIXES[mix].value}}},
        "cluster": {
            "local": {"ranks": node.num_ranks, "cores": node.num_cores},
            "memory_gib": node.memory_bytes / GIB,
            "intra": {"gb_per_s": link.bytes_per_s / GB, "latency_us": link.latency_s * US_PER_S},
        },
        "batch": {"samples": NUM_SAMPLES, "sizes": sizes.name},
        "precision": Precision.FLOAT32.value,
        "profile": profile,
    }
    write_text(yaml.safe_dump(spec, sort_keys=False, default_flow_style=None, width=100), path)


def _sizes(sample: Sample) -> dict[str, object]:
    """A row of a file of sizes."""
    tokens = dict.fromkeys((TEXT, "image", "audio"), 0)
    for segment in sample.segments:
        tokens[segment.modality] += segment.tokens_out
    side_px = VISION["image_size"] if tokens["image"] else None
    return {
        "text_tokens": tokens[TEXT],
        "image_width": side_px,
        "image_height": side_px,
        "audio_seconds": AUDIO_S if tokens["audio"] else None,
    }
