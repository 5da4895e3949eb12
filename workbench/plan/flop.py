"""Useful FLOP of a step: what the model needs, however it is parallelised."""

from collections.abc import Sequence

from workbench.cost.roofline import Grid, Work, forward_flop, index_flop
from workbench.model.frozen import Needs
from workbench.model.layer import Attention, Layer, Recurrence
from workbench.model.trained import adapter_of, first_trained
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.routing import Routing, routing_of
from workbench.plan.work import even_work_of

WHOLE = Grid()  # one rank computes the whole layer


def model_flop(plan: Plan) -> float:
    """Return the FLOP of one step without recompute: forwards, and the gradients that are computed.

    Source: Chowdhery et al. 2022, PaLM, appendix B (model FLOP utilisation). Query-key pairs beyond a layer's
    sliding window or chunk are not counted. Differs: pairs that a causal mask hides are not counted, nor are
    gradients that a frozen model does not need, nor copies of an encoder's output that nobody reads.
    Operators are taken as a sequence, as in their price: of several that read an input that needs no
    gradient, all but the first count one.

    Complexity: O(microbatches x layers), once per distinct shape.
    """
    routing = routing_of(plan)
    flop_of: dict[tuple[str, Work, tuple[Needs, ...]], list[float]] = {}
    total = 0.0
    for microbatch in plan.microbatches:
        if not _is_useful(routing, microbatch):
            continue
        name = microbatch.module
        layers, needs = plan.model.module(name).layers, routing.flow(microbatch).needs[name]
        shape = name, even_work_of(plan, microbatch), needs
        if shape not in flop_of:
            flop_of[shape] = _flop_by_layer(layers, shape[1], needs)
        for flop in flop_of[shape]:
            total += flop
    return total


def _is_useful(routing: Routing, microbatch: Microbatch) -> bool:
    return routing.plan.model.module(microbatch.module).has_loss or routing.is_read(microbatch)


def _flop_by_layer(layers: Sequence[Layer], work: Work, needs: Sequence[Needs]) -> list[float]:
    """[layers] FLOP over a microbatch; those of equal layers are counted once."""
    known: dict[tuple[int, Needs], float] = {}
    for layer, need in zip(layers, needs, strict=True):
        key = id(layer.operators), need
        if key not in known:
            known[key] = _layer_flop(layer, work, need)
    return [known[id(layer.operators), need] for layer, need in zip(layers, needs, strict=True)]


def _layer_flop(layer: Layer, work: Work, need: Needs) -> float:
    """Count a matmul's forward once more per gradient; attention's and a recurrence's twice.

    Gradients run back to the layer's input if it needs one, else to the first trained weights. A product with
    an adapter has none of its own weights'; the adapter's two products have. The scores that a fused kernel
    computes again are recompute, not useful FLOP. An indexer has a forward alone.
    """
    total, first = 0.0, first_trained(layer)
    for index, operator in enumerate(layer.operators):
        needs_input_grad = need.input_grad or (need.weight_grad and index > first)
        is_attention = isinstance(operator, Attention | Recurrence)
        needs_weight_grad = need.weight_grad and not layer.has_adapters
        gradients = 2 * needs_input_grad if is_attention else needs_input_grad + needs_weight_grad
        total += (1 + gradients) * forward_flop(operator, work, WHOLE) + index_flop(operator, work, WHOLE)
        for product, gradients in zip(adapter_of(operator), (needs_input_grad, need.any), strict=False):
            total += (1 + gradients + need.weight_grad) * forward_flop(product, work, WHOLE)
    return total
