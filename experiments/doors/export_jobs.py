"""Jobs whose plans are exported: half of one module, half of several, all small enough to plan in seconds."""

from collections.abc import Mapping
from pathlib import Path

import yaml

from workbench.job.job import Job, job_from_spec
from workbench.job.job_file import parse_spec


def _decoder(**sizes: object) -> dict[str, object]:
    usual: dict[str, object] = {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    return usual | sizes


LLAMA = _decoder(model_type="llama", rope_theta=500000.0)
SIGLIP: dict[str, object] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
    "vision_use_head": False,
}
WHISPER: dict[str, object] = {
    "model_type": "whisper",
    "d_model": 1024,
    "encoder_layers": 12,
    "encoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "num_mel_bins": 80,
    "max_source_positions": 1500,
}

_ALONE: dict[str, tuple[dict[str, object], dict[str, object], int]] = {
    "llama": (LLAMA, {"tp": 2}, 2),
    "llama-deep": (_decoder(model_type="llama", num_hidden_layers=24, rope_theta=500000.0), {}, 1),
    "mistral": (_decoder(model_type="mistral", sliding_window=None), {"tp": 2, "sequence_parallel": True}, 1),
    "qwen2": (_decoder(model_type="qwen2", tie_word_embeddings=True), {"recompute": "full"}, 1),
    "qwen3": (_decoder(model_type="qwen3", head_dim=128), {"tp": 2, "cp": 2}, 2),
    "qwen3-experts": (
        _decoder(
            model_type="qwen3_moe",
            head_dim=128,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=768,
            num_hidden_layers=8,
        ),
        {"tp": 2, "ep": 2},
        2,
    ),
    "mixtral": (
        _decoder(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2, num_hidden_layers=8),
        {"tp": 2, "ep": 2},
        2,
    ),
}
_SEVERAL: dict[str, tuple[dict[str, dict[str, object]], dict[str, str], dict[str, int]]] = {
    "llava": (
        {"vision": SIGLIP | {"model_type": "clip_vision_model"}, "llm": LLAMA},
        {"vision": "projector", "llm": "all"},
        {"vision": 2},
    ),
    "frozen-tower": (
        {"vision": SIGLIP, "llm": LLAMA},
        {"vision": "projector", "llm": "none"},
        {"vision": 2},
    ),
    "audio": (
        {"audio": WHISPER, "llm": _decoder(model_type="qwen2")},
        {"audio": "all", "llm": "all"},
        {"audio": 1},
    ),
    "both": (
        {"vision": SIGLIP, "audio": WHISPER, "llm": LLAMA},
        {"vision": "all", "audio": "projector", "llm": "all"},
        {"vision": 1, "audio": 1},
    ),
    "experts": (
        {"vision": SIGLIP, "llm": _ALONE["mixtral"][0]},
        {"vision": "all", "llm": "all"},
        {"vision": 1},
    ),
    "qwen3-experts-tower": (
        {"vision": SIGLIP, "llm": _ALONE["qwen3-experts"][0]},
        {"vision": "projector", "llm": "all"},
        {"vision": 1},
    ),
    "qwen3-tower": (
        {"vision": SIGLIP, "llm": _decoder(model_type="qwen3", head_dim=128)},
        {"vision": "all", "llm": "all"},
        {"vision": 1},
    ),
}


def export_jobs() -> tuple[Job, ...]:
    """The jobs: half of one module, half of several."""
    return (*map(_alone, _ALONE), *map(_several, _SEVERAL))


def small_job() -> Job:
    """A tower and a language model small enough to train on a host."""
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 4,
        "vision_use_head": False,
    }
    llm = LLAMA | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    modules = {
        "vision": {"config": vision, "trainable": "projector"},
        "llm": {"config": llm | heads, "trainable": "all"},
    }
    batch = {"samples": 4, "microbatch_samples": 1}
    fixed = {"text_tokens": 8, "items": {"vision": {"each": 1}}}
    job_keys = {"batch": batch | {"fixed": fixed}, "precision": "float32", "max_ranks": 2}
    return _job("small", modules, 1, job_keys)


def _alone(name: str) -> Job:
    config, layout, replicas = _ALONE[name]
    batch = {"samples": 16, "microbatch_samples": 1, "replicas": replicas, "fixed": {"text_tokens": 2048}}
    modules = {"llm": {"config": config, "trainable": "all"}}
    return _job(name, modules, 2, {"batch": batch, "layouts": {"llm": layout}})


def _several(name: str) -> Job:
    configs, trained, most = _SEVERAL[name]
    modules = {
        module_name: {"config": config, "trainable": trained[module_name]}
        for module_name, config in configs.items()
    }
    items = {module_name: {"most": number} for module_name, number in most.items()}
    mixture = {"seed": 3, "text_tokens": [256, 1024], "items": items}
    return _job(name, modules, 2, {"batch": {"samples": 16, "microbatch_samples": 1, "mixture": mixture}})


def _job(name: str, modules: Mapping[str, object], nodes: int, job_keys: Mapping[str, object]) -> Job:
    cluster = {"device": "H100", "nodes": nodes, "ranks_per_node": 4}
    return job_as_in_a_file(
        {"name": name, "model": {"modules": modules}, "cluster": cluster, "profile": "H100", **job_keys}
    )


def job_as_in_a_file(content: Mapping[str, object]) -> Job:
    """The job of a file's content."""
    where = str(content["name"])
    return job_from_spec(parse_spec(yaml.safe_dump(dict(content)), where=where), folder=Path())
