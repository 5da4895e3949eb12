"""Sequence parallelism: where tensor-parallel ranks of a stage split its tokens, and where all gather them.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section
4.2.2. Megatron's kernels do the same: every layer has its part of the tokens, and stages pass parts on.
Differs otherwise: stages pass all tokens to each other, so a stage splits them itself and gathers them at its
end; embeddings and projectors work on all tokens, as features are placed among them and tokens shrink there.
"""

from dataclasses import dataclass

from workbench.cost.execution import SavedInput
from workbench.cost.model import CostModel
from workbench.model.experts import is_of_expert
from workbench.model.layer import Layer, LayerKind, Matmul
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.plan import Plan, Settings
from workbench.plan.stage import Stage


@dataclass(frozen=True, slots=True)
class TokenBorders:
    """Where one stage splits and gathers tokens; empty where its ranks do not split them.

    Args:
        divided: layers whose norms and sums each rank does for its part of the tokens, ascending.
        divides: those of them that get all tokens, and split them first.
        joins: those of them after which every rank has all tokens again.
    """

    divided: tuple[int, ...] = ()
    divides: tuple[int, ...] = ()
    joins: tuple[int, ...] = ()


_UNDIVIDED = TokenBorders()
_BORDERS: LruCache[TokenBorders] = LruCache(16_384)


def token_borders(plan: Plan, stage: Stage) -> TokenBorders:
    """Return where a stage splits tokens (in blocks and the head) and where it gathers them.

    Tokens are gathered around what enters or leaves between two layers.

    Under Megatron's kernels all layers split tokens, and nothing is gathered.

    Complexity: O(layers of the stage x edges of its module), once for a range of layers.
    """
    if stage.tp == 1 or not plan.settings.divides_tokens(stage.module):
        return _UNDIVIDED
    if plan.settings.kernels.cuts_sequence:
        return TokenBorders(divided=tuple(range(*stage.layers)))
    return _BORDERS.get_or((Identity(plan.model), stage.module, stage.layers), lambda: _borders(plan, stage))


def _borders(plan: Plan, stage: Stage) -> TokenBorders:
    (first, last), layers = stage.layers, plan.model.module(stage.module).layers
    divided = tuple(index for index in range(first, last) if can_divide(layers[index]))
    entered = {layer for edge in plan.model.edges_into(stage.module) for layer in edge.entered}
    leaving = {edge.after_layer + 1 for edge in plan.model.edges_out_of(stage.module)}
    needs_all = {first, last, *entered, *leaving}  # layers before which every rank has all tokens
    divides = tuple(index for index in divided if index in needs_all or index - 1 not in divided)
    joins = tuple(
        index
        for index in divided
        if layers[index].kind is LayerKind.BLOCK and (index + 1 in needs_all or index + 1 not in divided)
    )
    return TokenBorders(divided, divides, joins)


def dividing(cost: CostModel, settings: Settings, module: str) -> CostModel:
    """Return the cost model for a module's layers that split tokens; `cost` itself where none do.

    Products keep all the tokens that they gathered, except Megatron's: see `SavedInput`.
    """
    if not settings.divides_tokens(module):
        return cost
    return cost.dividing_tokens(None if settings.kernels.cuts_sequence else SavedInput.WHOLE)


def can_divide(layer: Layer) -> bool:
    """Whether everything that a layer does between its products works token by token, on one sequence."""
    if layer.kind not in (LayerKind.BLOCK, LayerKind.HEAD) or layer.reads_context:
        return False
    products = [op for op in layer.operators if isinstance(op, Matmul) and not is_of_expert(op)]
    return not any(product.tokens_scale < 1 for product in products)  # tokens merge there
