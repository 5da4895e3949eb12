"""Aria's language model: experts of which a router's softmax weighs the chosen, and an MLP for all tokens."""

from workbench.model.config_fields import Config, attention_bias, count, flag, text, whole
from workbench.model.experts import CHOSEN_SOFTMAX, Experts
from workbench.model.families.decoder import default_sizes, llama_like
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.families.mixtures import sparse
from workbench.model.transformer import Mlp

_SIZES = default_sizes(32000, 4096, 4096, 32, 32)


def _aria(config: Config) -> Layers:
    """Routed experts have SiLU and no biases, whatever the configuration says of the MLP for all tokens."""
    heads = {"bias": attention_bias(config)}
    width = whole(config, "intermediate_size", _SIZES["intermediate_size"])
    experts = Experts(
        num=count(config, "moe_num_experts", 8),
        num_chosen=whole(config, "moe_topk", 2),
        mlp=Mlp(width=width, gated=True, activation="silu", fused=True),
        shared=Mlp(
            width=width * whole(config, "moe_num_shared_experts", 2),
            gated=True,
            activation=text(config, "hidden_act", "silu"),
            bias=flag(config, "mlp_bias"),
        ),
        scores=CHOSEN_SOFTMAX,
    )
    return sparse(llama_like(config, defaults=_SIZES, heads=heads, mlp={}), experts)


ARIA_TEXT = LanguageModel(
    name="Aria text",
    model_type="aria_text",
    examples={
        "aria text": Example(
            config=EXAMPLE_LLM
            | {"intermediate_size": 96, "moe_num_experts": 4, "moe_topk": 2, "pad_token_id": 0}
        )
    },
    make=_aria,
)
