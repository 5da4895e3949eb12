"""Overlap of tensor-parallel collectives with matrix products: piece by piece, or whole.

Pieces: Z. Zhang et al., "DistTrain", appendix A.1 (StepCCL): product and collective are cut into pairs of
pieces; the copies of one pair run while the product of another does, on engines that slow no product.
Whole: see `execution.SavedInput`; such a collective runs on the device's processors and slows the product.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from workbench.cost.collectives import Collective
from workbench.cost.execution import ActivationCut, Execution, SavedInput
from workbench.cost.overlapped_collectives import left_s
from workbench.cost.roofline import Gemm, Grid, Work, gemm_of, placed_messages
from workbench.float_sum import float_sum
from workbench.model.experts import SHARED, is_of_expert
from workbench.model.layer import Attention, Layer, Matmul, Recurrence, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A collective, and the products that it can overlap with: none, or all that read or write its tensor.

    Args:
        kind: kind of the collective.
        num_bytes: bytes of its whole tensor.
        products: products on one rank, uncut.
        remapped_elements: elements of the tensor whose rows the pieces reorder.
        beside: input-gradient products that it overlaps with as a whole.
        beside_weights: forward products whose weight gradients it overlaps with as a whole.
        is_of_sums: whether ranks add up the products' results, or it is their backward.
    """

    kind: Collective
    num_bytes: float
    products: tuple[Gemm, ...] = ()
    remapped_elements: float = 0.0
    beside: tuple[Gemm, ...] = ()
    beside_weights: tuple[Gemm, ...] = ()
    is_of_sums: bool = False


class Pairs(NamedTuple):
    """Pairs of a layer's forward, and (index of the operator that it precedes, pair) of its backward."""

    forward: tuple[Pair, ...]
    backward: tuple[tuple[int, Pair], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Prices of the parts of a pair, in seconds.

    Args:
        product_s: a product.
        weights_s: the weight gradient of a product.
        collective_s: a collective, by the bytes of its whole tensor.
        copied_s: a copy inside the device's memory, by its elements.
        lost_s: slowdown of products by a collective in pieces beside them.
    """

    product_s: Callable[[Gemm], float]
    weights_s: Callable[[Gemm], float]
    collective_s: Callable[[Collective, float], float]
    copied_s: Callable[[float], float]
    lost_s: Callable[[float, float], float] = lambda collective_s, products_s: 0.0


def exposed_s(pair: Pair, num_pieces: int, machine: Machine) -> float:
    """Seconds of a pair beyond its uncut products: < 0 only where pieces are faster than whole products.

    Two machines in a row with equal pieces: the first piece of one, the last of the other, and the
    slower of the two for every piece between (Johnson 1954, for equal jobs). A product of a piece has
    1/n of the rows and the rate of that shape, a collective of a piece 1/n of the bytes and the whole
    latency. Products beside collectives are slowed down as the machine says. One pass over the tensor that
    is out of order follows.

    Differs: the remap is never hidden behind weight gradients, which the source does where it is large.

    Complexity: O(products).
    """
    if not pair.products or num_pieces == 1:
        hidden_s = float_sum(map(machine.product_s, pair.beside))
        hidden_s += float_sum(map(machine.weights_s, pair.beside_weights))
        return left_s(machine.collective_s(pair.kind, pair.num_bytes), hidden_s)
    whole_s = float_sum(map(machine.product_s, pair.products))
    product_s = float_sum(machine.product_s(Gemm(m / num_pieces, n, k)) for m, n, k in pair.products)
    piece_s = machine.collective_s(pair.kind, pair.num_bytes / num_pieces)
    together_s = product_s + piece_s + (num_pieces - 1) * max(product_s, piece_s)
    lost_s = (num_pieces - 1) * machine.lost_s(piece_s, product_s)
    return together_s + lost_s + machine.copied_s(pair.remapped_elements) - whole_s


def pieces_of(pair: Pair, run: Execution) -> int:
    """The number of pieces of a pair."""
    return max(run.overlap_pieces, run.sum_pieces) if pair.is_of_sums else run.overlap_pieces


def added_kernels(pairs: Iterable[Pair], run: Execution) -> int:
    """Kernels that cutting adds: pieces of products, and remaps."""
    return sum(
        len(pair.products) * (num_pieces - 1) + (pair.remapped_elements > 0 and num_pieces > 1)
        for pair in pairs
        for num_pieces in (pieces_of(pair, run),)
    )


def pairs_of(
    layer: Layer,
    work: Work,
    grid: Grid,
    element_bytes: int,
    cut: ActivationCut,
    saved: SavedInput = SavedInput.WHOLE,
) -> Pairs:
    """The collectives of `placed_messages`, each with its products.

    Where every rank works on all tokens, an all-reduce belongs to the product it sums: the row-cut one
    forward, the column-cut ones' input gradients backward; its pieces are rows in order. Where ranks
    divide tokens, its first half is a reduce-scatter beside those products, whose rows are needed in
    another order, and its second an all-gather in front of the next product: the column-cut ones
    forward, the row-cut one's input gradient backward, whose results come in another order. The next
    product of a layer's last collective is the first one of the next layer, assumed alike.
    Collectives of experts and of tables have no product. Where products saved a share of their input,
    the backward gathers it again. Pairs of sums are the row-cut products, forward and, where tokens are
    divided, backward.
    """
    operators = layer.operators
    messages = placed_messages(layer, work, grid, element_bytes)
    closing = {index: _gemms(layer, work, grid, (index,)) for index, _ in messages.forward}
    opening = {index: _gemms(layer, work, grid, _sharing(layer, index)) for index, _ in messages.backward}
    if cut is ActivationCut.WHOLE:
        return Pairs(
            tuple(
                replace(_summed(num_bytes, closing[index]), is_of_sums=True)
                for index, num_bytes in messages.forward
            ),
            tuple(
                (index, _summed(num_bytes, [gemm.input_grad for gemm in opening[index]]))
                for index, num_bytes in messages.backward
            ),
        )
    forward: list[Pair] = []
    for index, num_bytes in messages.forward:
        scatter, gather = _halves(num_bytes, closing[index], _next(opening, index, len(operators)))
        forward += [replace(scatter, is_of_sums=True), gather]
    backward: list[tuple[int, Pair]] = []
    for index, num_bytes in messages.backward:
        input_grads = [gemm.input_grad for gemm in opening[index]]
        scatter, gather = _halves(
            num_bytes, input_grads, [gemm.input_grad for gemm in _next(closing, index, -len(operators))]
        )
        if saved is SavedInput.SHARE and input_grads:
            gather_again = Pair(kind=Collective.ALL_GATHER, num_bytes=num_bytes, beside=tuple(input_grads))
            backward.append((index, gather_again))
            scatter = replace(scatter, beside_weights=tuple(opening[index]))
        backward += [(index, scatter), (index, replace(gather, is_of_sums=True))]
    return Pairs(tuple(forward), tuple(backward))


def _gemms(layer: Layer, work: Work, grid: Grid, indices: Iterable[int]) -> list[Gemm]:
    """Products at these indices, without those of experts."""
    products = []
    for index in indices:
        operator = layer.operators[index]
        of_experts = is_of_expert(operator) or operator.name.startswith(SHARED)
        if isinstance(operator, Matmul) and not of_experts:
            products.append(gemm_of(operator, work, grid))
    return products


def _sharing(layer: Layer, first: int) -> list[int]:
    """Indices of column-cut products from one on, up to the end of their region: they read one tensor."""
    indices = []
    for index in range(first, len(layer.operators)):
        operator = layer.operators[index]
        is_attention = isinstance(operator, Attention | Recurrence)
        if is_attention or (isinstance(operator, Matmul) and operator.shard is Shard.ROW):
            break
        if isinstance(operator, Matmul) and operator.shard is Shard.COLUMN:
            indices.append(index)
    return indices


def _next(groups: dict[int, list[Gemm]], index: int, num_operators: int) -> list[Gemm]:
    """The group after an operator, or before it where `num_operators` is negative; cyclic."""
    if not groups:
        return []
    period = abs(num_operators)
    sign = 1 if num_operators > 0 else -1
    return groups[min(groups, key=lambda position: (sign * (position - index) - 1) % period)]


def _summed(num_bytes: float, products: list[Gemm]) -> Pair:
    return Pair(kind=Collective.ALL_REDUCE, num_bytes=num_bytes, products=tuple(products))


def _halves(num_bytes: float, ending: list[Gemm], beginning: list[Gemm]) -> tuple[Pair, Pair]:
    """A reduce-scatter after products, whose operands are remapped, and an all-gather before others."""
    return (
        Pair(
            kind=Collective.REDUCE_SCATTER,
            num_bytes=num_bytes,
            products=tuple(ending),
            remapped_elements=float_sum(gemm.m * gemm.k for gemm in ending),
        ),
        Pair(
            kind=Collective.ALL_GATHER,
            num_bytes=num_bytes,
            products=tuple(beginning),
            remapped_elements=float_sum(gemm.m * gemm.n for gemm in beginning),
        ),
    )
