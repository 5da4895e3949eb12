"""Where tensor-parallel ranks of a stage split its tokens, and where each has all of them again.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
section 4.2.2. So do Megatron's kernels: every layer has its part of the tokens, and stages hand parts on.
Differs otherwise: stages hand all tokens on to each other, so a stage divides them itself and
joins them at its end; embeddings and projectors work on all tokens, as features are placed among
them and tokens shrink there.
"""

from dataclasses import dataclass

from workbench.cost.execution import SavedInput
from workbench.cost.model import CostModel
from workbench.model.experts import is_of_expert
from workbench.model.layer import Layer, LayerKind, Matmul
from workbench.plan.plan import Plan, Settings, Stage


@dataclass(frozen=True, slots=True)
class TokenBorders:
    """Of one stage; empty where its ranks do not divide tokens.

    Args:
        divided: layers whose norms and sums each rank does for its part of the tokens, ascending.
        divides: those of them that are given all tokens, and divide them first.
        joins: those of them behind which every rank has all tokens again.
    """

    divided: tuple[int, ...] = ()
    divides: tuple[int, ...] = ()
    joins: tuple[int, ...] = ()


def token_borders(plan: Plan, stage: Stage) -> TokenBorders:
    """Blocks and the head divide tokens; around what enters or leaves between two of them all are joined.

    Under Megatron's kernels all layers do, and nothing is joined.

    Complexity: O(layers of the stage x edges of its module).
    """
    if stage.tp == 1 or not plan.settings.divides_tokens(stage.module):
        return TokenBorders()
    first, last = stage.layers
    if plan.settings.kernels.cuts_sequence:
        return TokenBorders(divided=tuple(range(first, last)))
    layers = plan.model.module(stage.module).layers
    divided = tuple(index for index in range(first, last) if can_divide(layers[index]))
    entered = {layer for edge in plan.model.edges_into(stage.module) for layer in edge.entered}
    left = {edge.after_layer + 1 for edge in plan.model.edges_out_of(stage.module)}
    whole = {first, last, *entered, *left}  # layers in front of which all tokens are there
    divides = tuple(index for index in divided if index in whole or index - 1 not in divided)
    joins = tuple(
        index
        for index in divided
        if layers[index].kind is LayerKind.BLOCK and (index + 1 in whole or index + 1 not in divided)
    )
    return TokenBorders(divided, divides, joins)


def dividing(cost: CostModel, settings: Settings, module: str) -> CostModel:
    """The machine on which layers of a module that divide tokens are priced; `cost` where none do.

    Products keep all the tokens that they gathered, but for Megatron's: see `SavedInput`.
    """
    if not settings.divides_tokens(module):
        return cost
    return cost.dividing_tokens(None if settings.kernels.cuts_sequence else SavedInput.WHOLE)


def can_divide(layer: Layer) -> bool:
    """Whether what a layer does between its products is done token by token, and to one sequence."""
    if layer.kind not in (LayerKind.BLOCK, LayerKind.HEAD) or layer.reads_context:
        return False
    products = [op for op in layer.operators if isinstance(op, Matmul) and not is_of_expert(op)]
    return not any(product.tokens_scale < 1 for product in products)  # of tokens that merge
