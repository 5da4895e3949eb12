"""Language models whose MLPs have no gate: AFM, Nemotron, StarCoder2, Apertus, Cosmos 3 Edge."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from workbench.model.config_fields import Config, attention_bias, flag, whole
from workbench.model.families.decoder import default_sizes, llama_like, windowed
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.families.positions import check_fixed_positions, rotary_dim
from workbench.model.transformer import XIELU, Norm

_ARCEE = default_sizes(32000, 2560, 18432, 32, 32, hidden_act="relu2")
_NEMOTRON = default_sizes(256000, 6144, 24576, 32, 48, hidden_act="relu2")
_STARCODER = default_sizes(
    49152,
    3072,
    12288,
    30,
    24,
    num_key_value_heads=2,
    hidden_act="gelu_pytorch_tanh",
    tie_word_embeddings=True,
)
_APERTUS = default_sizes(131072, 4096, 14336, 32, 32, hidden_act=XIELU)
_COSMOS_HEAD = 128  # default width of a head
_COSMOS = default_sizes(
    131072, 2048, 9216, 28, 16, num_key_value_heads=8, head_dim=_COSMOS_HEAD, hidden_act="relu2"
)
_HALF = 0.5  # of a head of Nemotron is rotated


def _arcee(config: Config, defaults: Mapping[str, Any] = _ARCEE) -> Layers:
    return llama_like(
        config,
        defaults=defaults,
        heads={"bias": attention_bias(config)},
        mlp={"gated": False, "bias": flag(config, "mlp_bias")},
    )


def _nemotron(config: Config) -> Layers:
    """Layer norms whose scale is 1 + weight; a part of every head is rotated."""
    width = whole(config, "hidden_size", _NEMOTRON["hidden_size"])
    share = width // whole(config, "num_attention_heads", _NEMOTRON["num_attention_heads"])
    head_dim = 128 if "head_dim" not in config else whole(config, "head_dim", share)
    return llama_like(
        {**config, "head_dim": head_dim},
        defaults=_NEMOTRON,
        heads={"bias": attention_bias(config), "rotary_dim": rotary_dim(config, head_dim, _HALF)},
        mlp={"gated": False, "bias": flag(config, "mlp_bias")},
        block={"norm": Norm.LAYER},
    )


def _starcoder2(config: Config) -> Layers:
    has_bias = flag(config, "use_bias", default=True)
    layers = llama_like(
        config,
        defaults=_STARCODER,
        heads={"bias": "qkvo" if has_bias else ""},
        mlp={"gated": False, "bias": has_bias},
        block={"norm": Norm.LAYER},
    )
    return windowed(config, layers, default=None)


def _apertus(config: Config) -> Layers:
    """Its activation has two weights a block."""
    heads = {"bias": attention_bias(config), "qk_norm": Norm.RMS}
    return llama_like(config, defaults=_APERTUS, heads=heads, mlp={"gated": False})


ARCEE = LanguageModel(
    name="AFM (Arcee)",
    model_type="arcee",
    examples={"afm": Example(config=EXAMPLE_LLM)},
    make=_arcee,
)
NEMOTRON = LanguageModel(
    name="Nemotron",
    model_type="nemotron",
    examples={"nemotron": Example(config=EXAMPLE_LLM | {"head_dim": 32})},
    make=_nemotron,
)
STARCODER2 = LanguageModel(
    name="StarCoder2",
    model_type="starcoder2",
    examples={
        "starcoder2": Example(config=EXAMPLE_LLM | {"sliding_window": 64, "tie_word_embeddings": True})
    },
    make=_starcoder2,
)
APERTUS = LanguageModel(
    name="Apertus",
    model_type="apertus",
    examples={"apertus": Example(config=EXAMPLE_LLM | {"pad_token_id": 0})},
    make=_apertus,
)
COSMOS_EDGE_TEXT = LanguageModel(
    name="Cosmos 3 Edge text",
    model_type="cosmos3_edge_text",
    check_config=partial(check_fixed_positions, head_dim=_COSMOS_HEAD),
    examples={
        "cosmos 3 edge text": Example(
            config=EXAMPLE_LLM
            | {"head_dim": 32, "rope_parameters": {"rope_type": "default", "mrope_section": [6, 5, 5]}}
        )
    },
    make=lambda config: _arcee(config, _COSMOS),
)
