"""Useful FLOP of a step: what the model needs, however it is parallelised."""

from functools import cache

from workbench.cost.roofline import Grid, Work, forward_flop
from workbench.model.frozen import Needs
from workbench.model.layer import Attention, Layer
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.routing import Routing, routing_of
from workbench.plan.work import even_work_of

WHOLE = Grid()  # the layer uncut


def model_flop(plan: Plan) -> float:
    """FLOP of one step without recompute: forwards, and the gradients that really run.

    Source: Chowdhery et al. 2022, PaLM, appendix B (model FLOP utilisation).
    Pairs of a query and a key beyond a layer's sliding window or chunk are not needed.
    Differs: gradients that a frozen model does not need are not counted, and copies of an
    encoder that nobody reads are not useful. Operators stand one behind the other, as their price has it:
    of several that read an input that asks for no gradient, all but the first count one.

    Complexity: O(microbatches x layers), once per distinct shape.
    """
    routing = routing_of(plan)
    counted = cache(_layer_flop)
    total = 0.0
    for microbatch in plan.microbatches:
        if not _is_useful(routing, microbatch):
            continue
        name = microbatch.module
        layers, needs = plan.model.module(name).layers, routing.flow(microbatch).needs[name]
        work = even_work_of(plan, microbatch)
        for layer, need in zip(layers, needs, strict=True):
            total += counted(layer, work, need)
    return total


def _is_useful(routing: Routing, microbatch: Microbatch) -> bool:
    return routing.plan.model.module(microbatch.module).has_loss or routing.is_read(microbatch)


def _layer_flop(layer: Layer, work: Work, need: Needs) -> float:
    """Matmuls cost one forward more per gradient; attention two, whichever weights are trained.

    Gradients run as far as the layer's input where it asks for one, else as far as the first weights that
    are trained. The scores that a fused kernel computes again are recompute, not useful.
    """
    total = 0.0
    for index, operator in enumerate(layer.operators):
        through = need.input_grad or (need.weight_grad and index > layer.first_with_weights)
        gradients = 2 * through if isinstance(operator, Attention) else through + need.weight_grad
        total += (1 + gradients) * forward_flop(operator, work, WHOLE)
    return total
