"""DeepSeek-V3.2 and GLM-5: latent attention to keys that an indexer chooses, experts as in DeepSeek-V3."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workbench.model.config_fields import Config, count, whole
from workbench.model.experts import SIGMOID
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


def _v32(config: Config) -> Layers:
    return _sparse(config, _V32)


def _sparse(config: Config, sizes: Mapping[str, Any]) -> Layers:
    dense = with_first_dense(config, sizes) if config.get(MLP_KINDS) is not None else config
    plain = deepseek_like({**dense, "mlp_bias": False}, sizes, SIGMOID)  # of which transformers builds none
    top_k = whole(config, TOP_K, sizes[TOP_K])
    indexer = _indexer(config, sizes)
    return tuple(_with_chosen_keys(layer, top_k, indexer) for layer in plain)


def _indexer(config: Config, sizes: Mapping[str, Any]) -> Indexer:
    def size(key: str) -> int:
        return whole(config, key, sizes[key])

    return Indexer(
        width=size("hidden_size"), query_width=size(_LATENT), num_heads=size(HEADS), head_dim=size(HEAD_DIM)
    )


def _with_chosen_keys(layer: Layer, top_k: int, indexer: Indexer | None) -> Layer:
    """The layer with attention to so many keys, if it is a block."""
    if layer.kind is not LayerKind.BLOCK:
        return layer
    operators = tuple(
        replace(each, top_k=top_k, indexer=indexer) if isinstance(each, Attention) else each
        for each in layer.operators
    )
    return replace(layer, operators=operators)


def _check_v32(config: Config) -> None:
    _check(config, _V32)


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
