"""Granite: embeddings, scores, both parts of a block and logits are multiplied by numbers."""

from dataclasses import replace

from workbench.model.config_fields import Config, attention_bias, flag
from workbench.model.families.decoder import default_sizes, llama_like, scaled_logits
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.layer import Layer, Operator, Pointwise

_SIZES = default_sizes(32000, 4096, 11008, 32, 32)


def _granite(config: Config) -> Layers:
    layers = llama_like(
        config,
        defaults=_SIZES,
        heads={"bias": attention_bias(config)},
        mlp={"bias": flag(config, "mlp_bias")},
        scales_embedding=True,
    )
    *others, head = map(_with_scaled_parts, layers)
    return (*others, scaled_logits(head))


def _with_scaled_parts(layer: Layer) -> Layer:
    """The layer with a factor in front of each residual sum."""
    operators: list[Operator] = []
    for operator in layer.operators:
        if operator.name.endswith("_residual"):
            name = operator.name.replace("_residual", "_scale")
            operators.append(Pointwise(name=name, width=layer.out_width, num_passes=2))
        operators.append(operator)
    return replace(layer, operators=tuple(operators))


GRANITE = LanguageModel(
    name="Granite",
    model_type="granite",
    examples={
        "granite": Example(
            config=EXAMPLE_LLM
            | {
                "embedding_multiplier": 12.0,
                "attention_multiplier": 0.05,
                "residual_multiplier": 0.22,
                "logits_scaling": 8.0,
            }
        )
    },
    make=_granite,
)
