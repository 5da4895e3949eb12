"""Modules of a block whose results a backward may compute again, by the names that training systems use."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import StrEnum

from workbench.model.layer import Attention, Layer, Operator

ACTIVATIONS = (".gelu", ".silu", ".relu")
MIXTURE = tuple(f"mlp.{part}" for part in ("expert", "router", "shared", "join", "combine", "for_all"))


class BlockModule(StrEnum):
    """A part of a block.

    CORE_ATTN: scores and weighted sum. NORM: norms in front of attention and MLP. ACT: every activation.
    MLP: a plain MLP whole. MOE: experts whole. MOE_ACT: the experts' activations. MLA_UP_PROJ: what widens
    latent queries, keys and values.
    """

    CORE_ATTN = "core_attn"
    NORM = "norm"
    ACT = "act"
    MLP = "mlp"
    MOE = "moe"
    MOE_ACT = "moe_act"
    MLA_UP_PROJ = "mla_up_proj"


GIVEN_BACK = (BlockModule.NORM, BlockModule.ACT, BlockModule.MOE_ACT, BlockModule.MLA_UP_PROJ)
"""Their results are not kept either: whoever reads them next reads them computed again."""


def is_in_module(operator: Operator, module: BlockModule) -> bool:
    """Whether an operator of a block belongs to that module."""
    name = operator.name
    is_of_mixture = name.startswith(MIXTURE)
    is_activation = name.endswith(ACTIVATIONS)
    return {
        BlockModule.CORE_ATTN: isinstance(operator, Attention),
        BlockModule.NORM: name.endswith(("attention_norm", "mlp_norm")),
        BlockModule.ACT: is_activation,
        BlockModule.MLP: name.startswith("mlp.") and not is_of_mixture,
        BlockModule.MOE: is_of_mixture,
        BlockModule.MOE_ACT: is_of_mixture and is_activation,
        BlockModule.MLA_UP_PROJ: name.endswith("_up_proj") or name.startswith("up_proj."),
    }[module]


def part_of(layer: Layer, modules: Collection[BlockModule]) -> Layer | None:
    """The layer with the operators of these modules alone; None where it has none of them."""
    held = tuple(each for each in layer.operators if any(is_in_module(each, module) for module in modules))
    return replace(layer, operators=held, tied=()) if held else None


def kept_beside(
    operators: Sequence[Operator], saved: Sequence[float], modules: Collection[BlockModule]
) -> tuple[float, ...]:
    """[operators] bytes that each keeps for its backward where these modules are computed again.

    An operator keeps what it reads. Inside a module that is computed again nothing is kept but what its
    first operator reads; behind one of `GIVEN_BACK` its result is not kept either.

    Args:
        operators: of a layer, in execution order.
        saved: bytes that each keeps where nothing is computed again.
        modules: that are computed again.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section
    5; Megatron-Core, `recompute_modules`.
    """
    found = []
    before: frozenset[BlockModule] = frozenset()
    for operator, size in zip(operators, saved, strict=True):
        own = frozenset(module for module in modules if is_in_module(operator, module))
        is_inside = bool(own & before)
        is_behind = any(module in GIVEN_BACK for module in before - own)
        found.append(0.0 if is_inside or is_behind else size)
        before = own
    return tuple(found)
