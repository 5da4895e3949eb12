"""DeepSeek-V3.2 and GLM-5: latent attention to keys that an indexer chooses, experts as in DeepSeek-V3."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from workbench.model.config_fields import Config, count, whole, whole_or_zero
from workbench.model.experts import SIGMOID
from workbench.model.families.decoder import default_sizes
from workbench.model.families.deepseek import (
    EXAMPLE,
    MLP_KINDS,
    V3_SIZES,
    check_latent,
    deepseek_like,
    with_first_dense,
)
from workbench.model.families.family import Example, LanguageModel, Layers
from workbench.model.families.grouped_router import check_groups
from workbench.model.indexer import Indexer
from workbench.model.layer import Attention, Layer, LayerKind

TOP_K, HEADS, HEAD_DIM = "index_topk", "index_n_heads", "index_head_dim"
_LATENT, _LAYER_TYPES = "q_lora_rank", "layer_types"
_SPARSE = ("indexed_attention", "deepseek_sparse_attention")  # the second in older files
_V32 = V3_SIZES | {TOP_K: 2048, HEADS: 64, HEAD_DIM: 128}


_GLM = default_sizes(154880, 6144, 12288, 78, 64) | {
    _LATENT: 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_group": 1,
    "topk_group": 1,
    TOP_K: 2048,
    HEADS: 32,
    HEAD_DIM: 128,
}
_TYPES, _PATTERN, _EVERY, _AFTER = (
    "indexer_types",
    "index_topk_pattern",
    "index_topk_freq",
    "index_skip_topk_offset",
)
FULL, SHARED = "full", "shared"  # an indexer of its own, or the choice of the last one before it


def _v32(config: Config) -> Layers:
    num = count(config, "num_hidden_layers", _V32["num_hidden_layers"])
    return _sparse(config, _V32, [FULL] * num)


def _glm(config: Config) -> Layers:
    return _sparse(config, _GLM, _indexer_types(config))


def _sparse(config: Config, sizes: Mapping[str, Any], types: Sequence[str]) -> Layers:
    """The layers of DeepSeek-V3 with attention to chosen keys; `types`: of each block, FULL or SHARED."""
    dense = with_first_dense(config, sizes) if config.get(MLP_KINDS) is not None else config
    plain = deepseek_like({**dense, "mlp_bias": False}, sizes, SIGMOID)  # of which transformers builds none
    top_k, indexer = whole(config, TOP_K, sizes[TOP_K]), _indexer(config, sizes)
    indexers = iter(
        [
            replace(indexer, is_shared=following == SHARED) if own == FULL else None
            for own, following in pairwise((*types, FULL))
        ]
    )
    return tuple(
        _with_chosen_keys(layer, top_k, next(indexers)) if layer.kind is LayerKind.BLOCK else layer
        for layer in plain
    )


def _indexer_types(config: Config) -> tuple[str, ...]:
    """Of each block, as transformers reads them: a list, letters, or one indexer for so many blocks.

    Raises:
        ValueError: another kind or number of them, or a first one that reads an earlier choice.
    """
    num = count(config, "num_hidden_layers", _GLM["num_hidden_layers"])
    given = config.get(_TYPES)
    if given is None and (given := config.get(_PATTERN)) is not None:
        letters = {"F": FULL, "S": SHARED}
        given = [letters.get(each, each) for each in given] if isinstance(given, str) else given
    if given is None:
        every, after = max(whole_or_zero(config, _EVERY, 1), 1), whole_or_zero(config, _AFTER, 2)
        given = [FULL if max(i - after + 1, 0) % every == 0 else SHARED for i in range(num)]
    is_list = isinstance(given, list | tuple) and all(each in (FULL, SHARED) for each in given)
    if not is_list or len(given) != num or given[0] != FULL:
        raise ValueError(
            f"{config['model_type']}: {_TYPES} must list {FULL} or {SHARED} for each of {num} blocks, {FULL} "
            f"first, got {given!r:.60}"
        )
    return tuple(given)


def _indexer(config: Config, sizes: Mapping[str, Any]) -> Indexer:
    def size(key: str) -> int:
        return whole(config, key, sizes[key])

    return Indexer(
        width=size("hidden_size"), query_width=size(_LATENT), num_heads=size(HEADS), head_dim=size(HEAD_DIM)
    )


def _with_chosen_keys(block: Layer, top_k: int, indexer: Indexer | None) -> Layer:
    operators = tuple(
        replace(each, top_k=top_k, indexer=indexer) if isinstance(each, Attention) else each
        for each in block.operators
    )
    return replace(block, operators=operators)


def _check_v32(config: Config) -> None:
    _check(config, _V32)


def _check_glm(config: Config) -> None:
    _check(config, _GLM)
    _indexer_types(config)


def _check(config: Config, sizes: Mapping[str, Any]) -> None:
    kind = config["model_type"]
    if _LATENT in config and config[_LATENT] is None:
        raise ValueError(
            f"{kind}: {_LATENT} must be given, as the indexer reads the latent of queries; nearest: "
            f"{sizes[_LATENT]}"
        )
    _check_layer_types(config, count(config, "num_hidden_layers", sizes["num_hidden_layers"]))
    check_groups(config, sizes)
    check_latent(config, sizes)
    rotated = whole(config, "qk_rope_head_dim", sizes["qk_rope_head_dim"])
    width = whole(config, HEAD_DIM, sizes[HEAD_DIM])
    if width < rotated:
        raise ValueError(
            f"{kind}: {HEAD_DIM} must be at least qk_rope_head_dim {rotated}, which turn in it, got {width}; "
            f"nearest: {rotated}"
        )


def _check_layer_types(config: Config, num: int) -> None:
    given = config.get(_LAYER_TYPES)
    if given is not None and (
        not isinstance(given, list | tuple) or len(given) != num or any(each not in _SPARSE for each in given)
    ):
        raise ValueError(
            f"{config['model_type']}: {_LAYER_TYPES} must list {_SPARSE[0]} for each of {num} blocks, got "
            f"{given!r:.60}"
        )


_EXAMPLE = EXAMPLE | {TOP_K: 4, HEADS: 4, HEAD_DIM: 24}
DEEPSEEK_V32 = LanguageModel(
    name="DeepSeek-V3.2",
    model_type="deepseek_v32",
    check_config=_check_v32,
    examples={"deepseek-v3.2": Example(config=_EXAMPLE)},
    make=_v32,
)
GLM_MOE_DSA = LanguageModel(
    name="GLM-5",
    model_type="glm_moe_dsa",
    check_config=_check_glm,
    examples={
        "glm-5": Example(config=_EXAMPLE | {_TYPES: [FULL] * 4}),
        "glm-5, shared indexers": Example(config=_EXAMPLE | {_TYPES: [FULL, SHARED, FULL, SHARED]}),
    },
    make=_glm,
)
