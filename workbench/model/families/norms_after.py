"""Language models with norms behind attention and MLP instead of before them: OLMo 2, OLMo 3, EXAONE 4."""

from workbench.model.config_fields import Config, attention_bias, whole
from workbench.model.families.decoder import WINDOW, default_sizes, llama_like, unrotated, windowed
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.families.positions import check_fixed_positions
from workbench.model.layer import Attention, Layer, LayerKind
from workbench.model.transformer import Norm, Placement

_OLMO = default_sizes(50304, 4096, 11008, 32, 32)
_EXAONE = default_sizes(102400, 4096, 16384, 32, 32, num_key_value_heads=32)
_FULL_EVERY = 4  # blocks


def _olmo2(config: Config) -> Layers:
    """Norms of the queries, and of the keys, of all heads at once."""
    bias = attention_bias(config)
    return llama_like(
        config,
        defaults=_OLMO,
        heads={"bias": bias, "qk_norm": Norm.RMS, "norms_all_heads": True},
        mlp={},
        block={"placement": Placement.AFTER},
    )


def _olmo3(config: Config) -> Layers:
    return windowed(config, _olmo2(config), slides=lambda block: (block + 1) % _FULL_EVERY != 0)


def _exaone4(config: Config) -> Layers:
    """Norms of each head; where others have a window, blocks without one know no positions."""
    layers = llama_like(
        config,
        defaults=_EXAONE,
        heads={"qk_norm": Norm.RMS},
        mlp={},
        block={"placement": Placement.AFTER},
    )
    if config.get("sliding_window", WINDOW) is None:
        return layers
    every = _FULL_EVERY if config.get("layer_types") else whole(config, "sliding_window_pattern", _FULL_EVERY)
    slid = windowed(config, layers, slides=lambda block: (block + 1) % every != 0)
    return tuple(
        layer if layer.kind is not LayerKind.BLOCK or _slides(layer) else unrotated(layer) for layer in slid
    )


def _slides(block: Layer) -> bool:
    return any(isinstance(op, Attention) and op.window is not None for op in block.operators)


def _check_exaone4(config: Config) -> None:
    """Raise ValueError where transformers divides by an absent pattern, or for positions that do not run."""
    check_fixed_positions(config)
    if config.get("sliding_window", WINDOW) is None and config.get("layer_types") is None:
        raise ValueError(
            "exaone4: layer_types must be given to run where sliding_window is null; nearest: "
            "'full_attention' for every block"
        )


_EXAMPLE = EXAMPLE_LLM | {"pad_token_id": 0}
_SLIDING = _EXAMPLE | {"sliding_window": 64}
OLMO2 = LanguageModel(
    name="OLMo 2",
    model_type="olmo2",
    examples={"olmo 2": Example(config=_EXAMPLE)},
    make=_olmo2,
)
OLMO3 = LanguageModel(
    name="OLMo 3",
    model_type="olmo3",
    examples={"olmo 3": Example(config=_SLIDING)},
    make=_olmo3,
)
EXAONE4 = LanguageModel(
    name="EXAONE 4.0",
    model_type="exaone4",
    check_config=_check_exaone4,
    examples={"exaone 4": Example(config=_SLIDING | {"sliding_window_pattern": 2})},
    make=_exaone4,
)
