"""Granite and HyperCLOVA X: embeddings, scores, both parts of a block and logits have factors."""

from dataclasses import replace

from workbench.model.config_fields import Config, attention_bias, flag
from workbench.model.families.decoder import default_sizes, llama_like, scaled_logits
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.layer import Layer, Operator, Pointwise
from workbench.model.transformer import Placement

_SIZES = default_sizes(32000, 4096, 11008, 32, 32)


def _granite(config: Config, placement: Placement = Placement.PRE) -> Layers:
    layers = llama_like(
        config,
        defaults=_SIZES,
        heads={"bias": attention_bias(config)},
        mlp={"bias": flag(config, "mlp_bias")},
        block={"placement": placement},
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


def _hyperclovax(config: Config) -> Layers:
    """Granite's blocks with norms behind both parts, too, unless the configuration has none."""
    is_peri = flag(config, "use_post_norm", default=True)
    return _granite(config, Placement.SANDWICH if is_peri else Placement.PRE)


_FACTORS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.05,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
GRANITE = LanguageModel(
    name="Granite",
    model_type="granite",
    examples={"granite": Example(config=EXAMPLE_LLM | _FACTORS)},
    make=_granite,
)
HYPERCLOVAX = LanguageModel(
    name="HyperCLOVA X",
    model_type="hyperclovax",
    examples={
        "hyperclova x": Example(config=EXAMPLE_LLM | _FACTORS | {"logits_scaling": 0.25}),
        "hyperclova x, norms before alone": Example(config=EXAMPLE_LLM | {"use_post_norm": False}),
    },
    make=_hyperclovax,
)
