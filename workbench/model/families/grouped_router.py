"""Mixtures of GLM and DeepSeek: first blocks without experts, a router that may choose groups first."""

from collections.abc import Mapping
from typing import Any

from workbench.model.config_fields import Config, count, flag, text, whole
from workbench.model.experts import SIGMOID, Experts
from workbench.model.families.family import Layers
from workbench.model.families.mixtures import sparse
from workbench.model.transformer import Mlp

FIRST_DENSE = "first_k_dense_replace"


def mixed(config: Config, plain: Layers, sizes: Mapping[str, Any], scores: str = SIGMOID) -> Layers:
    """The layers with routed experts and a shared one behind the first blocks, which keep their MLP.

    Args:
        sizes: defaults of the configuration, by key.
        scores: as of `Experts`.
    """
    num_dense = _num_dense(config, sizes)
    return sparse(plain, _experts(config, sizes, scores), lambda block: block >= num_dense)


def _experts(config: Config, sizes: Mapping[str, Any], scores: str) -> Experts:
    width = whole(config, "moe_intermediate_size", sizes["moe_intermediate_size"])
    shared = width * whole(config, "n_shared_experts", sizes["n_shared_experts"])
    activation = text(config, "hidden_act", "silu")
    return Experts(
        num=count(config, "n_routed_experts", sizes["n_routed_experts"]),
        num_chosen=whole(config, "num_experts_per_tok", sizes["num_experts_per_tok"]),
        mlp=Mlp(width=width, gated=True, activation=activation, fused=True),
        scores=scores,
        shared=Mlp(width=shared, gated=True, activation=activation, bias=flag(config, "mlp_bias")),
    )


def _num_dense(config: Config, sizes: Mapping[str, Any]) -> int:
    """The number of first blocks without experts, which may be 0."""
    given = config.get(FIRST_DENSE)
    num = sizes[FIRST_DENSE] if given is None else given
    return 0 if num == 0 else whole(config, FIRST_DENSE, num)


def check_groups(config: Config, sizes: Mapping[str, Any], least: int = 2) -> None:
    """Raise ValueError for groups of experts with too few of them.

    Args:
        sizes: as of `mixed`.
        least: experts whose scores rank their group.
    """
    num = count(config, "n_routed_experts", sizes["n_routed_experts"])
    groups = whole(config, "n_group", sizes["n_group"])
    per_group, rest = divmod(num, groups)
    if rest or per_group < least:
        raise ValueError(
            f"{config['model_type']}: n_group must divide {num} experts into groups of {least} or more, "
            f"got {groups}; nearest: 1"
        )
    chosen = whole(config, "num_experts_per_tok", sizes["num_experts_per_tok"])
    within = whole(config, "topk_group", sizes["topk_group"])
    if within > groups or chosen > within * per_group:
        raise ValueError(
            f"{config['model_type']}: topk_group must be at most n_group {groups}, and so many groups have "
            f"the {chosen} experts of a token, got {within}; nearest: {groups}"
        )
