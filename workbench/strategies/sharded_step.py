"""Seconds and bytes of a step where every rank holds a part of every layer's parameters (FSDP)."""

from workbench.cost.collectives import Collective
from workbench.cost.group_link import group_link
from workbench.cost.memory import state_bytes
from workbench.plan.price import step_bytes
from workbench.strategies.layout_choice import LayoutChoice, LayoutStep, ModuleChoice
from workbench.strategies.module_price import LayerPrice, ModulePrices

PREFETCHED = 2  # layers whose parameters a rank holds whole at once


def sharded_step(prices: ModulePrices, choice: LayoutChoice) -> LayoutStep:
    """All modules on all ranks, parameters gathered layer by layer, each a layer ahead of its use.

    A forward gathers, a backward gathers again and scatters gradients; each hides behind the layer
    that computes meanwhile.

    Source: Zhao et al. 2023, "PyTorch FSDP", sections 3.3 and 4.

    Complexity: O(layers).
    """
    job = prices.job
    rounds = len(job.batch) // (choice.llm.dp * job.microbatch_samples)
    layers: list[tuple[ModuleChoice, LayerPrice]] = []
    for part in (*choice.encoders, choice.llm):
        layers += [(part, layer) for layer in prices.layers(part, job.microbatch_samples)]
    forward_s = backward_s = update_s = held = 0.0
    moved = [_exchange_s(prices, part, layer) for part, layer in layers]
    ahead = [gather_s for gather_s, _ in moved]
    for place, (_, layer) in enumerate(layers):
        following_s = ahead[place + 1] if place + 1 < len(layers) else 0.0
        forward_s += max(layer.forward_s, following_s)
        previous_s = ahead[place - 1] if place else 0.0
        scattered_s = moved[place + 1][1] if place + 1 < len(layers) else 0.0
        backward_s += max(layer.backward_s, previous_s + scattered_s)
    size = state_bytes(job.settings.precision.num_bytes, job.settings.kernels)
    for part, layer in layers:
        shards = part.num_holders
        per_weight = layer.weights * size.weight + layer.trained * (size.gradient + size.optimizer)
        held += per_weight / shards + layer.kept_bytes
        update_s += layer.trained / shards
    whole = max(layer.weights * size.weight + layer.trained * size.gradient for _, layer in layers)
    working = max(layer.working_bytes for _, layer in layers)
    return LayoutStep(
        passes_s=rounds * (ahead[0] + forward_s + ahead[-1] + backward_s + moved[0][1]),
        exchange_s=0.0,
        hidden_s=0.0,
        update_s=prices.cost.update_s(update_s * step_bytes(job.settings.precision)),
        boundary_s=0.0,
        boundary_bytes=0.0,
        peak_bytes=round(held + PREFETCHED * whole + working),
        memory_bytes=min(node.memory_bytes for node in job.cluster.nodes),
        llm_layers=(len(prices.layers(choice.llm, job.microbatch_samples)),),
    )


def _exchange_s(prices: ModulePrices, part: ModuleChoice, layer: LayerPrice) -> tuple[float, float]:
    """Seconds to gather a layer's parameters, and to scatter its gradients."""
    job, num_ranks = prices.job, part.num_holders
    size = state_bytes(job.settings.precision.num_bytes, job.settings.kernels)
    link = group_link(job.cluster, num_ranks=num_ranks, stride=1)
    if num_ranks == 1:
        return 0.0, 0.0
    seconds = prices.cost.between_ranks_s
    return (
        seconds(Collective.ALL_GATHER, layer.weights * size.weight, num_ranks, link),
        seconds(Collective.REDUCE_SCATTER, layer.trained * size.gradient, num_ranks, link),
    )
