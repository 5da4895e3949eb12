"""LFM2: gated short convolutions in most blocks, attention with norms of queries and keys in the others.

LFM2 with experts has them in place of the MLP, but for the first blocks.
"""

from collections.abc import Mapping
from typing import Any

from workbench.model.composites.composite import whole_or
from workbench.model.config_fields import Config, count, flag, layer_indices, number, whole
from workbench.model.experts import SIGMOID, Experts
from workbench.model.families.decoder import default_sizes, llama_like
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.families.mixtures import sparse
from workbench.model.families.positions import check_fixed_positions
from workbench.model.short_conv import with_short_conv
from workbench.model.transformer import Mlp, Norm

CONV, FULL = "conv", "full_attention"
_FFN = 12288
_DENSE = "num_dense_layers"
_SPARSE = default_sizes(65536, 2048, 7168, 32, 32, num_key_value_heads=8, tie_word_embeddings=True)
_SIZES = default_sizes(65536, 2560, _FFN, 32, 32, num_key_value_heads=8, tie_word_embeddings=True)


def _lfm2(config: Config) -> Layers:
    return _hybrid({**config, "intermediate_size": _ffn(config)}, _SIZES)


def _hybrid(config: Config, sizes: Mapping[str, Any]) -> Layers:
    """Blocks with an MLP; `sizes`: defaults of the configuration."""
    ties = flag(config, "tie_embedding", default=flag(config, "tie_word_embeddings", default=True))
    layers = llama_like(
        {
            **{key: value for key, value in config.items() if key not in ("head_dim", "hidden_act")},
            "tie_word_embeddings": ties,
        },
        defaults=sizes,
        heads={"qk_norm": Norm.RMS},
        mlp={},
    )
    embed, *blocks, head = layers
    kernel, bias = whole(config, "conv_L_cache", 3), flag(config, "conv_bias")
    return (
        embed,
        *(
            with_short_conv(block, kernel, bias=bias) if kind == CONV else block
            for block, kind in zip(blocks, _kinds(config, len(blocks)), strict=True)
        ),
        head,
    )


def _ffn(config: Config) -> int:
    """Inner width of its MLPs: by default two thirds of what the configuration says, rounded up."""
    width = whole(config, "block_ff_dim", whole(config, "intermediate_size", _FFN))
    if not flag(config, "block_auto_adjust_ff_dim", default=True):
        return width
    multiple, factor = (
        whole(config, "block_multiple_of", 256),
        number(config, "block_ffn_dim_multiplier", 1.0),
    )
    return -(-int(factor * int(2 * width / 3)) // multiple) * multiple


def _kinds(config: Config, num_blocks: int) -> tuple[str, ...]:
    """[blocks] the kind of each one: as listed, else attention in the blocks that are, else everywhere.

    Raises:
        ValueError: an unknown kind, or not one for every block.
    """
    listed = config.get("layer_types")
    if listed is None:
        full = layer_indices(config, "full_attn_idxs", tuple(range(num_blocks)))
        return tuple(FULL if index in full else CONV for index in range(num_blocks))
    is_list = isinstance(listed, list | tuple) and len(listed) == num_blocks
    if not is_list or not all(kind in (CONV, FULL) for kind in listed):
        raise ValueError(
            f"{config['model_type']}: layer_types must be {CONV} or {FULL} for each of the {num_blocks} "
            f"blocks, got {listed!r:.80}"
        )
    return tuple(listed)


def _lfm2_moe(config: Config) -> Layers:
    """Each expert has a sigmoid of its own."""
    experts = Experts(
        num=count(config, "num_experts", 32),
        num_chosen=whole(config, "num_experts_per_tok", 4),
        mlp=Mlp(
            width=whole(config, "moe_intermediate_size", 1792), gated=True, activation="silu", fused=True
        ),
        scores=SIGMOID,
    )
    num_dense = whole_or(config, _DENSE, 2)
    if num_dense < 0:
        raise ValueError(f"{config['model_type']}: {_DENSE} must be >= 0, got {num_dense}; nearest: 0")
    return sparse(_hybrid(config, _SPARSE), experts, lambda block: block >= num_dense)


def _check_moe(config: Config) -> None:
    if config.get("layer_types") is None:
        raise ValueError("lfm2_moe: layer_types must be given to run, as transformers has no default")
    check_fixed_positions(config)


LFM2 = LanguageModel(
    name="LFM2",
    model_type="lfm2",
    examples={
        "lfm2": Example(
            config=EXAMPLE_LLM | {"block_auto_adjust_ff_dim": False, "layer_types": [CONV, FULL, CONV, CONV]}
        )
    },
    make=_lfm2,
)
LFM2_MOE = LanguageModel(
    name="LFM2 with experts",
    model_type="lfm2_moe",
    check_config=_check_moe,
    examples={
        "lfm2 with experts": Example(
            config=EXAMPLE_LLM
            | {
                "layer_types": [CONV, FULL, CONV, FULL],
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 96,
                "routed_scaling_factor": 1.5,
                _DENSE: 2,
            }
        )
    },
    make=_lfm2_moe,
)
