"""Mistral, and Mixtral with its experts."""

from typing import Any

from workbench.model.config_fields import Config, count, text, whole
from workbench.model.experts import Experts, with_experts
from workbench.model.families.decoder import absent, llama_like, shaped
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.families.windows import windowed
from workbench.model.shape import Shape
from workbench.model.transformer import Mlp


def _mistral(config: Config) -> Layers:
    """Work beyond a sliding window is counted; rows are rarely longer than one."""
    defaults = absent(32000, 4096, 14336, 32, 32, num_key_value_heads=8)
    return windowed(config, llama_like(config, defaults=defaults, heads={}, mlp={}))


def _mixtral(config: Config) -> Layers:
    """Every block's MLP becomes a router and experts, of which a token runs a few."""
    defaults = absent(32000, 4096, 14336, 32, 32, num_key_value_heads=8)
    plain = llama_like(config, defaults=defaults, heads={}, mlp={})
    embed, *blocks, head = windowed(config, plain, default=None)
    experts = Experts(
        num=count(config, "num_local_experts", 8),
        num_chosen=whole(config, "num_experts_per_tok", 2),
        mlp=Mlp(
            width=whole(config, "intermediate_size", 14336),
            gated=True,
            activation=text(config, "hidden_act", "silu"),
            fused=True,
        ),
    )
    return (embed, *(with_experts(block, experts) for block in blocks), head)


def _shaped(shape: Shape) -> dict[str, Any]:
    return shaped(shape) | {"model_type": "mistral", "rms_norm_eps": 1e-5, "sliding_window": 4096}


MISTRAL = LanguageModel(
    name="Mistral",
    model_type="mistral",
    examples={"mistral": Example(config=EXAMPLE_LLM | {"sliding_window": 64})},
    make=_mistral,
    shapes={"mistral": _shaped},
)
MIXTRAL = LanguageModel(
    name="Mixtral",
    model_type="mixtral",
    examples={"mixtral": Example(config=EXAMPLE_LLM | {"num_local_experts": 4, "num_experts_per_tok": 2})},
    make=_mixtral,
)
