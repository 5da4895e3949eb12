"""Seconds that a layer takes at least, on however many ranks and in however many calls."""

from typing import NamedTuple

from workbench.cost.execution import AttentionKernel
from workbench.cost.measured import MeasuredLayer
from workbench.cost.model import CostModel
from workbench.cost.roofline import ATTENTION_BACKWARD_FLOP, Grid, Work, attention_flop, forward_flop
from workbench.model.layer import Attention, Layer, Matmul
from workbench.schedule.action import Pass

WHOLE = Grid()  # the layer uncut


class LeastTime(NamedTuple):
    """Seconds times ranks of a layer's passes.

    Args:
        forward_s: F.
        input_grad_s, weight_grad_s: gradients to its input and of its weights.
    """

    forward_s: float
    input_grad_s: float
    weight_grad_s: float


def least_time(
    cost: CostModel, layer: Layer, work: Work, precision: str, *, counts_attention: bool
) -> LeastTime:
    """What passes of a layer over some work take together on all of their ranks, at least.

    Products and fused attention at the best rates that the profile has for any shape, memory-bound
    kernels, collectives, launches and overheads for nothing; layers measured whole by their fit without
    what a call takes. What cross-attention takes is left out. The bound adds up over calls: that of all rows
    is no more than the sum of those of its parts. Ranks among which tokens are shared unevenly may be
    priced by one that has fewer: then it holds only as far as that one's share.

    Args:
        counts_attention: whether attention is the cost model's; where it is simulated tile by tile, it is
            left out.

    Complexity: O(operators + measured grids).
    """
    if layer.reads_context:
        return LeastTime(0.0, 0.0, 0.0)
    measured = cost.measured_on(layer, precision)
    found = [_measured(each, work, grid.tp * grid.cp) for grid, each in measured]
    if (
        all(grid != WHOLE for grid, _ in measured) or not counts_attention
    ):  # else other grids are scaled from one rank
        found.append(_composed(cost, layer, work, precision, counts_attention=counts_attention))
    profile, kinds = cost.profile, (Pass.F, Pass.B, Pass.I, Pass.W)
    factor = min(min(profile.pipeline_factor(kind), profile.alone_factor(kind)) for kind in kinds)
    return LeastTime(*(factor * min(seconds) for seconds in zip(*found, strict=True)))


def _composed(
    cost: CostModel, layer: Layer, work: Work, precision: str, *, counts_attention: bool
) -> LeastTime:
    flop = sum(forward_flop(o, work, WHOLE) for o in layer.operators if isinstance(o, Matmul))
    products_s = flop / cost.most_product_flop_per_s(precision)
    attention_s = backward_s = 0.0
    if counts_attention and cost.execution.attention is AttentionKernel.FUSED:
        flop_per_s, backward = cost.most_attention_flop_per_s(precision)
        operators = (operator for operator in layer.operators if isinstance(operator, Attention))
        attention_s = sum(attention_flop(each, work, WHOLE) for each in operators) / flop_per_s
        backward_s = attention_s * ATTENTION_BACKWARD_FLOP / backward
    return LeastTime(products_s + attention_s, products_s + backward_s, products_s)


def _measured(measured: MeasuredLayer, work: Work, num_ranks: int) -> LeastTime:
    time = measured.least_s(work)
    return LeastTime(
        num_ranks * min(time.forward_s, time.forward_only_s),
        num_ranks * min(time.input_grad_s, time.split_input_s),
        num_ranks * min(time.weight_grad_s, time.split_weight_s),
    )
