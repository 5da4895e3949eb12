"""Cohere 2 (Command R7B, Command A): attention beside the MLP, both behind one norm without a shift."""

from workbench.model.config_fields import Config, attention_bias, whole
from workbench.model.families.decoder import default_sizes, llama_like, scaled_logits, unrotated, windowed
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.families.positions import check_causal_positions
from workbench.model.layer import Attention, Layer
from workbench.model.transformer import Norm, Placement

_SIZES = default_sizes(256000, 8192, 22528, 40, 64, tie_word_embeddings=True)
_FULL_EVERY = 4  # blocks


def _cohere2(config: Config) -> Layers:
    """Blocks with a sliding window rotate; the others attend to everything, without positions.

    States are scaled before the head, which gives the scaled logits.
    """
    layers = llama_like(
        {key: value for key, value in config.items() if key != "head_dim"},  # heads share the width
        defaults=_SIZES,
        heads={"bias": attention_bias(config)},
        mlp={},
        block={"norm": Norm.UNSHIFTED, "placement": Placement.PARALLEL},
    )
    every = whole(config, "sliding_window_pattern", _FULL_EVERY)
    *blocks, head = windowed(config, layers, slides=lambda block: (block + 1) % every != 0)
    return (*(_positioned(block) for block in blocks), scaled_logits(head))


def _positioned(layer: Layer) -> Layer:
    """The layer, without a rotation where its attention has no window."""
    attentions = [operator for operator in layer.operators if isinstance(operator, Attention)]
    if all(attention.window is not None for attention in attentions):
        return layer
    return unrotated(layer)


COHERE2 = LanguageModel(
    name="Cohere 2",
    model_type="cohere2",
    check_config=check_causal_positions,
    examples={"cohere 2": Example(config=EXAMPLE_LLM | {"sliding_window": 64, "sliding_window_pattern": 2})},
    make=_cohere2,
)
