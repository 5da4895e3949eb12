"""Modules of a block that a backward may recompute, by the names that training systems use."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import StrEnum

from workbench.model.layer import Attention, Layer, Matmul, Operator, Recurrence, Shard

ACTIVATIONS = (".gelu", ".silu", ".relu", ".relu2")
_OF_MIXTURE = ("expert", "router", "shared", "join", "combine", "for_all", "latent")
MIXTURE = tuple(f"mlp.{part}" for part in _OF_MIXTURE)


class BlockModule(StrEnum):
    """A part of a block.

    CORE_ATTN: scores and weighted sum, or a recurrence. NORM: norms in front of attention and MLP. ACT: every
    activation. MLP: a plain MLP whole. MOE: experts whole. MOE_ACT: the experts' activations. MLA_UP_PROJ:
    what widens latent queries, keys and values.
    """

    CORE_ATTN = "core_attn"
    NORM = "norm"
    ACT = "act"
    MLP = "mlp"
    MOE = "moe"
    MOE_ACT = "moe_act"
    MLA_UP_PROJ = "mla_up_proj"


GIVEN_BACK = (BlockModule.NORM, BlockModule.ACT, BlockModule.MOE_ACT, BlockModule.MLA_UP_PROJ)
"""Modules whose results are not kept either: their readers read recomputed results."""


def is_in_module(operator: Operator, module: BlockModule) -> bool:
    """Whether an operator of a block belongs to a module."""
    name = operator.name
    is_of_mixture = name.startswith(MIXTURE)
    is_activation = name.endswith(ACTIVATIONS)
    return {
        BlockModule.CORE_ATTN: isinstance(operator, Attention | Recurrence),
        BlockModule.NORM: name.endswith(("attention_norm", "mlp_norm")),
        BlockModule.ACT: is_activation,
        BlockModule.MLP: name.startswith("mlp.") and not is_of_mixture,
        BlockModule.MOE: is_of_mixture,
        BlockModule.MOE_ACT: is_of_mixture and is_activation,
        BlockModule.MLA_UP_PROJ: name.endswith("_up_proj") or name.startswith("up_proj."),
    }[module]


def part_of(layer: Layer, modules: Collection[BlockModule]) -> Layer | None:
    """The layer with only the operators of these modules; None where it has none of them."""
    if not modules:
        return None
    operators = tuple(
        operator for operator in layer.operators if any(is_in_module(operator, module) for module in modules)
    )
    return replace(layer, operators=operators, tied=()) if operators else None


def kept_beside(
    operators: Sequence[Operator], saved: Sequence[float], modules: Collection[BlockModule]
) -> tuple[float, ...]:
    """[operators] bytes that each operator keeps for its backward, where some modules are recomputed.

    An operator keeps its input. Inside a recomputed module only the input of its first operator is kept;
    after one of `GIVEN_BACK` its result is not kept either.

    Args:
        operators: of a layer, in execution order.
        saved: bytes that each keeps without recomputation.
        modules: the recomputed modules.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section
    5; Megatron-Core, `recompute_modules`.
    """
    kept = []
    previous: frozenset[BlockModule] = frozenset()
    for operator, size in zip(operators, saved, strict=True):
        current = frozenset(module for module in modules if is_in_module(operator, module))
        is_inside = bool(current & previous)
        is_after = any(module in GIVEN_BACK for module in previous - current)
        kept.append(0.0 if is_inside or is_after else size)
        previous = current
    return tuple(kept)


def reads_alike(previous: Operator | None, operator: Operator) -> bool:
    """Whether two neighbours can read one tensor: equally wide column-cut products (q, k, v; gate, up)."""
    if not isinstance(previous, Matmul) or not isinstance(operator, Matmul):
        return False
    first, second = ((matmul.in_features, matmul.shard) for matmul in (previous, operator))
    return first == second and operator.shard is Shard.COLUMN
