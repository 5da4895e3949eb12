"""The exhaustively listed spaces, with different models, machines, data and bottlenecks."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments.doors.export_jobs import SIGLIP, WHISPER, job_as_in_a_file
from experiments.search.listed_space import ListedSpace, Shape
from workbench.job.job import Job
from workbench.job.machines import cost_of

_LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
_QWEN = _LLAMA | {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
_VISION = SIGLIP | {"num_hidden_layers": 6}
_LARGE_VISION = SIGLIP | {"num_hidden_layers": 8, "image_size": 560}
_AUDIO = WHISPER | {"encoder_layers": 6}
_LARGE_AUDIO = WHISPER | {
    "encoder_layers": 8,
    "d_model": 1280,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
}


class Drawn(NamedTuple):
    """The distribution of samples: fewest and most tokens of text, most items of every encoder."""

    text_tokens: tuple[int, int]
    most_items: int = 2
    seed: int = 5


def _job(
    name: str,
    llm: Mapping[str, object],
    encoders: Mapping[str, Mapping[str, object]],
    *,
    cluster: Mapping[str, Any],
    distribution: Drawn,
    trainable: str = "all",
) -> Job:
    """A job of four drawn samples, with encoders and a language model."""
    modules = {
        module_name: {"config": config, "trainable": trainable} for module_name, config in encoders.items()
    }
    content = {
        "name": name,
        "model": {"modules": modules | {"llm": {"config": llm, "trainable": "all"}}},
        "cluster": cluster,
        "profile": cluster["device"],
        "batch": {
            "samples": 4,
            "microbatch_samples": 1,
            "mixture": {
                "seed": distribution.seed,
                "text_tokens": list(distribution.text_tokens),
                "items": {encoder: {"most": distribution.most_items} for encoder in encoders},
            },
        },
    }
    return job_as_in_a_file(content)


def _space(
    job: Job,
    shapes: Mapping[str, tuple[Shape, ...]],
    *,
    replicas: tuple[int, ...] = (1,),
    microbatches: tuple[int, ...] = (1,),
) -> ListedSpace:
    return ListedSpace(
        name=job.name,
        job=job,
        cost=cost_of(job, None, None),
        shapes=shapes,
        replicas=replicas,
        microbatches=microbatches,
    )


def spaces() -> tuple[ListedSpace, ...]:
    """The spaces, each with more than ten thousand feasible plans.

    The search was not tuned on the last two; for the others see the decision log.
    """
    return (_vision(), _frozen_audio(), _both(), _replicas(), _tight(), _slow_nodes(), _frozen_replicas())


def _vision() -> ListedSpace:
    """A trained encoder on one node of A40s."""
    job = _job(
        "vision trained",
        _LLAMA,
        {"vision": _VISION},
        cluster={"device": "A40", "nodes": 1, "ranks_per_node": 4},
        distribution=Drawn((256, 2048)),
    )
    shapes = {
        "vision": ((1, 1, 1), (1, 1, 2), (1, 2, 1)),
        "llm": ((1, 1, 1), (1, 1, 2), (1, 1, 3), (1, 2, 1), (2, 1, 1)),
    }
    return _space(job, shapes, microbatches=(1, 2))


def _frozen_audio() -> ListedSpace:
    """An encoder with only its projector trained, on H100s: most of it has no gradients."""
    job = _job(
        "audio frozen",
        _LLAMA,
        {"audio": _LARGE_AUDIO},
        cluster={"device": "H100", "nodes": 1, "ranks_per_node": 4},
        distribution=Drawn((128, 1024)),
        trainable="projector",
    )
    shapes = {
        "audio": ((1, 1, 1), (1, 1, 2), (1, 2, 1)),
        "llm": ((1, 1, 1), (1, 1, 2), (1, 1, 3), (1, 2, 1), (1, 3, 1), (2, 1, 1)),
    }
    return _space(job, shapes, microbatches=(1, 2))


def _both() -> ListedSpace:
    """Two encoders on A100s."""
    job = _job(
        "vision and audio",
        _LLAMA,
        {"vision": _VISION, "audio": _AUDIO},
        cluster={"device": "A100-40GB", "nodes": 1, "ranks_per_node": 5},
        distribution=Drawn((256, 2048)),
    )
    shapes = {
        "vision": ((1, 1, 1), (1, 2, 1)),
        "audio": ((1, 1, 1), (1, 2, 1)),
        "llm": ((1, 1, 1), (1, 1, 2), (1, 1, 3), (1, 2, 1), (2, 1, 1)),
    }
    return _space(job, shapes)


def _replicas() -> ListedSpace:
    """One or two replicas on two nodes of L40S, with gradients, keys or activations across network cards."""
    job = _job(
        "replicas on two nodes",
        _LLAMA,
        {"vision": _LARGE_VISION},
        cluster={"device": "L40S", "nodes": 2, "ranks_per_node": 3},
        distribution=Drawn((128, 3072)),
    )
    shapes = {
        "vision": ((1, 1, 1), (1, 1, 2), (1, 2, 1)),
        "llm": ((1, 1, 1), (1, 1, 2), (1, 2, 1)),
    }
    return _space(job, shapes, replicas=(1, 2), microbatches=(1, 2))


def _tight() -> ListedSpace:
    """A wide language model with a large vocabulary on devices that it barely fits: memory binds."""
    job = _job(
        "memory binds",
        _QWEN,
        {"vision": _LARGE_VISION},
        cluster={"device": "H200", "nodes": 1, "ranks_per_node": 5, "memory_gib": 40},
        distribution=Drawn((512, 4096), most_items=3),
    )
    shapes = {
        "vision": ((1, 1, 1), (1, 2, 1)),
        "llm": ((1, 1, 2), (1, 1, 3), (1, 2, 2), (2, 1, 2), (1, 2, 1), (2, 1, 1)),
    }
    return _space(job, shapes, microbatches=(1, 2))


def _slow_nodes() -> ListedSpace:
    """A trained audio encoder on two nodes of A10, with unequal samples: the network binds."""
    job = _job(
        "audio on slow nodes",
        _LLAMA | {"num_hidden_layers": 7},
        {"audio": _LARGE_AUDIO},
        cluster={"device": "A10", "nodes": 2, "ranks_per_node": 2, "memory_gib": 80},
        distribution=Drawn((64, 4096), most_items=3, seed=11),
    )
    shapes = {
        "audio": ((1, 1, 1), (1, 1, 2), (1, 2, 1)),
        "llm": ((1, 1, 1), (1, 1, 2), (1, 1, 3), (1, 2, 1), (1, 3, 1), (2, 1, 1)),
    }
    return _space(job, shapes, microbatches=(1, 2))


def _frozen_replicas() -> ListedSpace:
    """A frozen vision encoder and a wide language model, in one or two replicas on a node of B200s."""
    job = _job(
        "frozen replicas",
        _QWEN | {"num_hidden_layers": 5},
        {"vision": _LARGE_VISION},
        cluster={"device": "B200", "nodes": 1, "ranks_per_node": 6},
        distribution=Drawn((256, 3072), seed=23),
        trainable="projector",
    )
    shapes = {
        "vision": ((1, 1, 1), (1, 1, 2), (1, 2, 1)),
        "llm": ((1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1)),
    }
    return _space(job, shapes, replicas=(1, 2), microbatches=(1, 2))
