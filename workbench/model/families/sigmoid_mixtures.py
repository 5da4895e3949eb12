"""Mixtures whose routers give every expert a sigmoid of its own: dots.llm1, Solar Open, MiniMax-M2."""

from workbench.model.config_fields import Config, attention_bias, count, text, whole
from workbench.model.experts import SIGMOID, Experts
from workbench.model.families.decoder import WINDOW, default_sizes, llama_like, windowed
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.families.grouped_router import FIRST_DENSE, check_groups, mixed
from workbench.model.families.mixtures import sparse
from workbench.model.families.positions import PARTIAL, check_fixed_positions, rope_of, rotary_dim
from workbench.model.transformer import Mlp, Norm

_DOTS = default_sizes(152064, 4608, 10944, 62, 32) | {
    "n_routed_experts": 128,  # as in dots.llm1; transformers has no default of these three
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1408,
    FIRST_DENSE: 0,
    "n_group": 1,
    "topk_group": 1,
    "max_window_layers": 62,
}
_UNSTATED = ("n_routed_experts", "num_experts_per_tok", "n_shared_experts")
_SOLAR = default_sizes(196608, 4096, 1280, 48, 64, num_key_value_heads=8, head_dim=128) | {
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1280,
    FIRST_DENSE: 0,
    "n_group": 1,
    "topk_group": 1,
}
_MINIMAX = default_sizes(200064, 3072, 1536, 62, 48, num_key_value_heads=8, head_dim=128)


def _dots1(config: Config) -> Layers:
    """Qwen3's attention, with windows from a block on, and DeepSeek-V3's experts."""
    heads = {"bias": attention_bias(config), "qk_norm": Norm.RMS}
    plain = llama_like(config, defaults=_DOTS, heads=heads, mlp={})
    stated = config.get("max_window_layers")
    first = _DOTS["max_window_layers"] if stated is None else int(stated)
    slid = windowed(config, plain, slides=lambda block: block >= first, default=WINDOW)
    return mixed({**config, "mlp_bias": False}, slid, _DOTS)


def _check_dots1(config: Config) -> None:
    for key in _UNSTATED:
        if config.get(key) is None:
            raise ValueError(f"dots1: {key} must be given to run; nearest: {_DOTS[key]}")
    check_groups(config, _DOTS)
    check_fixed_positions(config)


def _solar_open(config: Config) -> Layers:
    """Every block has experts; only queries, keys and values have biases."""
    own = {key: value for key, value in config.items() if key not in (FIRST_DENSE, "intermediate_size")}
    heads = {"bias": attention_bias(config, "qkv")}
    return mixed({**own, "mlp_bias": False}, llama_like(own, defaults=_SOLAR, heads=heads, mlp={}), _SOLAR)


def _check_solar_open(config: Config) -> None:
    check_groups(config, _SOLAR)
    check_fixed_positions(config, head_dim=_SOLAR["head_dim"])


def _minimax_m2(config: Config) -> Layers:
    """A part of every head is rotated; norms of the queries, and of the keys, of all heads at once."""
    heads = {"qk_norm": Norm.RMS, "norms_all_heads": True, "rotary_dim": _rotary_dim(config)}
    activation = text(config, "hidden_act", "silu")
    width = whole(config, "intermediate_size", _MINIMAX["intermediate_size"])
    experts = Experts(
        num=count(config, "num_local_experts", 256),
        num_chosen=whole(config, "num_experts_per_tok", 8),
        mlp=Mlp(width=width, gated=True, activation=activation, fused=True),
        scores=SIGMOID,
    )
    return sparse(llama_like(config, defaults=_MINIMAX, heads=heads, mlp={}), experts)


def _rotary_dim(config: Config) -> int:
    """Numbers of a head that are rotated, as the rotation's parameters or, of released models, a key says."""
    width = whole(config, "head_dim", _MINIMAX["head_dim"])
    if config.get("rotary_dim") is None or rope_of(config).get(PARTIAL) is not None:
        return rotary_dim(config, width, 1.0)
    return whole(config, "rotary_dim")


_EXAMPLE = EXAMPLE_LLM | {"head_dim": 32, "num_experts_per_tok": 2}
_MIXED = _EXAMPLE | {"n_routed_experts": 4, "moe_intermediate_size": 96, "routed_scaling_factor": 1.5}
DOTS1 = LanguageModel(
    name="dots.llm1",
    model_type="dots1",
    check_config=_check_dots1,
    examples={
        "dots.llm1": Example(
            config=_MIXED
            | {"n_shared_experts": 2, FIRST_DENSE: 1, "sliding_window": 64, "max_window_layers": 2}
        )
    },
    make=_dots1,
)
SOLAR_OPEN = LanguageModel(
    name="Solar Open",
    model_type="solar_open",
    check_config=_check_solar_open,
    examples={"solar open": Example(config={k: v for k, v in _MIXED.items() if k != "intermediate_size"})},
    make=_solar_open,
)
MINIMAX_M2 = LanguageModel(
    name="MiniMax-M2",
    model_type="minimax_m2",
    examples={
        "minimax-m2": Example(
            config=_EXAMPLE | {"num_local_experts": 4, "intermediate_size": 96, "rotary_dim": 16}
        )
    },
    make=_minimax_m2,
)
