"""gpt-oss: attention with sinks, every other layer with a sliding window; experts with biases."""

from workbench.model.config_fields import Config, attention_bias, count, whole
from workbench.model.experts import CHOSEN_SOFTMAX, CLAMPED, Experts
from workbench.model.families.decoder import default_sizes, llama_like, windowed, with_attention
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.families.mixtures import sparse
from workbench.model.transformer import Mlp

_SIZES = default_sizes(201088, 2880, 2880, 36, 64, num_key_value_heads=8, head_dim=64)
_WINDOW = 128  # default sliding window


def _gpt_oss(config: Config) -> Layers:
    """A router's softmax runs over the scores of a token's experts alone; gate and up are one product."""
    bias = attention_bias(config, default=True)
    layers = llama_like(config, defaults=_SIZES, heads={"bias": bias}, mlp={})
    experts = Experts(
        num=count(config, "num_local_experts", 128),
        num_chosen=whole(config, "num_experts_per_tok", 4),
        mlp=Mlp(
            width=whole(config, "intermediate_size", _SIZES["intermediate_size"]),
            gated=True,
            activation=CLAMPED,
            bias=True,
            fused=True,
        ),
        scores=CHOSEN_SOFTMAX,
        router_bias=True,
    )
    sunk = tuple(with_attention(layer, has_sinks=True) for layer in sparse(layers, experts))
    return windowed({"sliding_window": _WINDOW, **config}, sunk, slides=lambda block: block % 2 == 0)


GPT_OSS = LanguageModel(
    name="gpt-oss",
    model_type="gpt_oss",
    examples={
        "gpt-oss": Example(
            config=EXAMPLE_LLM
            | {
                "intermediate_size": 96,
                "head_dim": 32,
                "sliding_window": 64,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
            }
        )
    },
    make=_gpt_oss,
)
