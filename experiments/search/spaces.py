"""The exhaustively listed spaces, with different models, machines, data and bottlenecks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.doors.export_jobs import SIGLIP, WHISPER, job_as_in_a_file
from experiments.search.listed_space import ListedSpace, Shape
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


_WHOLE_OR_HALVES: tuple[Shape, ...] = ((1, 1, 1), (1, 1, 2), (1, 2, 1))
_WHOLE_OR_CUT: tuple[Shape, ...] = ((1, 1, 1), (1, 2, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A space as the table lists it.

    Args:
        llm: configuration of the language model, which is trained.
        encoders: configurations by module, of each of which `trainable` is trained.
        cluster: as in a job file; the profile is its device's.
        text_tokens, most_items, seed: of four drawn samples: fewest and most tokens of text, most items of
            every encoder.
        shapes, replicas, microbatches: as of `ListedSpace`.
    """

    name: str
    llm: Mapping[str, object]
    encoders: Mapping[str, Mapping[str, object]]
    cluster: Mapping[str, Any]
    text_tokens: tuple[int, int]
    shapes: Mapping[str, tuple[Shape, ...]]
    trainable: str = "all"
    most_items: int = 2
    seed: int = 5
    replicas: tuple[int, ...] = (1,)
    microbatches: tuple[int, ...] = (1, 2)

    def space(self) -> ListedSpace:
        """The space, with its job and the machine's costs."""
        modules = {
            name: {"config": config, "trainable": self.trainable} for name, config in self.encoders.items()
        }
        content = {
            "name": self.name,
            "model": {"modules": modules | {"llm": {"config": self.llm, "trainable": "all"}}},
            "cluster": self.cluster,
            "profile": self.cluster["device"],
            "batch": {
                "samples": 4,
                "microbatch_samples": 1,
                "mixture": {
                    "seed": self.seed,
                    "text_tokens": list(self.text_tokens),
                    "items": {encoder: {"most": self.most_items} for encoder in self.encoders},
                },
            },
        }
        job = job_as_in_a_file(content)
        return ListedSpace(
            name=self.name,
            job=job,
            cost=cost_of(job, None, None),
            shapes=self.shapes,
            replicas=self.replicas,
            microbatches=self.microbatches,
        )


_SPACES = (
    _Entry(  # a trained encoder on one node
        name="vision trained",
        llm=_LLAMA,
        encoders={"vision": _VISION},
        cluster={"device": "A40", "nodes": 1, "ranks_per_node": 4},
        text_tokens=(256, 2048),
        shapes={
            "vision": _WHOLE_OR_HALVES,
            "llm": ((1, 1, 1), (1, 1, 2), (1, 1, 3), (1, 2, 1), (2, 1, 1)),
        },
    ),
    _Entry(  # only the projector of an encoder is trained: most of it has no gradients
        name="audio frozen",
        llm=_LLAMA,
        encoders={"audio": _LARGE_AUDIO},
        cluster={"device": "H100", "nodes": 1, "ranks_per_node": 4},
        text_tokens=(128, 1024),
        shapes={
            "audio": _WHOLE_OR_HALVES,
            "llm": ((1, 1, 1), (1, 1, 2), (1, 1, 3), (1, 2, 1), (1, 3, 1), (2, 1, 1)),
        },
        trainable="projector",
    ),
    _Entry(  # two encoders
        name="vision and audio",
        llm=_LLAMA,
        encoders={"vision": _VISION, "audio": _AUDIO},
        cluster={"device": "A100-40GB", "nodes": 1, "ranks_per_node": 5},
        text_tokens=(256, 2048),
        shapes={
            "vision": _WHOLE_OR_CUT,
            "audio": _WHOLE_OR_CUT,
            "llm": ((1, 1, 1), (1, 1, 2), (1, 1, 3), (1, 2, 1), (2, 1, 1)),
        },
        microbatches=(1,),
    ),
    _Entry(  # one or two replicas, with gradients, keys or activations across network cards
        name="replicas on two nodes",
        llm=_LLAMA,
        encoders={"vision": _LARGE_VISION},
        cluster={"device": "L40S", "nodes": 2, "ranks_per_node": 3},
        text_tokens=(128, 3072),
        shapes={"vision": _WHOLE_OR_HALVES, "llm": _WHOLE_OR_HALVES},
        replicas=(1, 2),
    ),
    _Entry(  # a wide language model with a large vocabulary on devices that it barely fits
        name="memory binds",
        llm=_QWEN,
        encoders={"vision": _LARGE_VISION},
        cluster={"device": "H200", "nodes": 1, "ranks_per_node": 5, "memory_gib": 40},
        text_tokens=(512, 4096),
        most_items=3,
        shapes={
            "vision": _WHOLE_OR_CUT,
            "llm": ((1, 1, 2), (1, 1, 3), (1, 2, 2), (2, 1, 2), (1, 2, 1), (2, 1, 1)),
        },
    ),
    _Entry(  # a trained encoder with unequal samples: the network binds
        name="audio on slow nodes",
        llm=_LLAMA | {"num_hidden_layers": 7},
        encoders={"audio": _LARGE_AUDIO},
        cluster={"device": "A10", "nodes": 2, "ranks_per_node": 2, "memory_gib": 80},
        text_tokens=(64, 4096),
        most_items=3,
        seed=11,
        shapes={
            "audio": _WHOLE_OR_HALVES,
            "llm": ((1, 1, 1), (1, 1, 2), (1, 1, 3), (1, 2, 1), (1, 3, 1), (2, 1, 1)),
        },
    ),
    _Entry(  # a frozen encoder and a wide language model
        name="frozen replicas",
        llm=_QWEN | {"num_hidden_layers": 5},
        encoders={"vision": _LARGE_VISION},
        cluster={"device": "B200", "nodes": 1, "ranks_per_node": 6},
        text_tokens=(256, 3072),
        seed=23,
        shapes={"vision": _WHOLE_OR_HALVES, "llm": (*_WHOLE_OR_HALVES, (2, 1, 1))},
        trainable="projector",
        replicas=(1, 2),
    ),
)


def spaces() -> tuple[ListedSpace, ...]:
    """The spaces, each with more than ten thousand feasible plans.

    The search was not tuned on the last two; for the others see the decision log.
    """
    return tuple(entry.space() for entry in _SPACES)
