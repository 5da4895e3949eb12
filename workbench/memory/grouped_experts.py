"""The experts of a layer as the runtime computes them: a grouped product for each role, over all of them."""

from dataclasses import replace
from typing import NamedTuple

from workbench.cost.expert_parallel import COMBINE, FOR_ALL, FOR_ALL_GATE
from workbench.model.experts import (
    CHOSEN_SOFTMAX,
    JOIN,
    LATENT_UP,
    SHARED,
    SHARED_GATE,
    SIGMOID,
    WIDE_SOFTMAX,
    expert_index,
    is_of_expert,
    num_experts,
)
from workbench.model.layer import Layer, Matmul, Operator, Pointwise

JOINS = (JOIN, COMBINE, LATENT_UP)


class GroupedLayer(NamedTuple):
    """A layer with each role of its experts as one operator over the rows of all experts.

    Args:
        layer: with the operators of one expert.
        num_matrices: [operators] matrices in the one parameter of each; 1 where it is no expert's.
    """

    layer: Layer
    num_matrices: tuple[int, ...]


def with_grouped_experts(layer: Layer) -> GroupedLayer:
    """Group the experts of a layer on one rank, if it has any, with the join where the runtime computes it.

    It follows the experts, before an expert for all tokens. Where shares multiply the experts' inputs it
    precedes them, as inputs are what it keeps.

    Complexity: O(operators).
    """
    count = num_experts(layer)
    if count == 0:
        return GroupedLayer(layer, (1,) * len(layer.operators))
    one = [op for op in layer.operators if is_of_expert(op) and expert_index(op) == 0]
    experts = [_of_all(operator, count) for operator in one]
    joins = [operator for operator in layer.operators if operator.name in JOINS]
    others = [op for op in layer.operators if not is_of_expert(op) and op not in joins]
    first = layer.operators.index(one[0])
    joined = [*joins, *experts] if _scales_inputs(layer) else [*experts, *joins]
    operators = (*others[:first], *joined, *others[first:])
    num_matrices = tuple(count if operator in experts else 1 for operator in operators)
    return GroupedLayer(replace(layer, operators=operators), num_matrices)


class JoinedTensors(NamedTuple):
    """Tensors of a token's width, in the type of activations, while its experts are joined.

    Args:
        beside_kept: of a forward, besides the rows that it keeps.
        backward: of gradients.
    """

    beside_kept: float
    backward: float


def joined_tensors(layer: Layer, join: Pointwise, element_bytes: int, wide_bytes: int) -> JoinedTensors:
    """Return what a product of rows and their shares makes: itself and the sum, or both gradients.

    Shares of a softmax or sigmoid of all scores are wide, and so are these. Where they multiply experts'
    inputs, the product is kept, and its gradient is there too.
    """
    num_rows = join.num_passes - 1
    if _scales_inputs(layer):
        return JoinedTensors(1, 3 * num_rows)
    is_narrow = any(operator.name == CHOSEN_SOFTMAX for operator in layer.operators)
    share = 1 if is_narrow else wide_bytes / element_bytes
    return JoinedTensors((num_rows + 1) * share, 2 * num_rows * share)


def _of_all(operator: Operator, count: int) -> Operator:
    assert isinstance(operator, Matmul | Pointwise), "an MLP has no other operators"
    return replace(operator, tokens_scale=operator.tokens_scale * count)


def _scales_inputs(layer: Layer) -> bool:
    """Whether shares multiply experts' inputs, as Llama 4's do, instead of their results.

    Recognised by its expert for all tokens, which has no gate, beside a softmax of all
    scores in their own type.
    """
    names = {operator.name for operator in layer.operators}
    has_shared = any(name.startswith((SHARED, FOR_ALL)) for name in names)
    return has_shared and names.isdisjoint({SHARED_GATE, FOR_ALL_GATE, SIGMOID, WIDE_SOFTMAX, CHOSEN_SOFTMAX})
