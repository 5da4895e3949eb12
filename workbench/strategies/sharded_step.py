"""Seconds and bytes of a step where every rank holds a part of every layer's parameters (FSDP)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from workbench.cost.collectives import Collective
from workbench.cost.group_link import group_link
from workbench.cost.memory import state_bytes
from workbench.plan.price import step_bytes
from workbench.strategies.layout_choice import LayoutChoice, LayoutStep, ModuleChoice
from workbench.strategies.module_price import LayerPrice, ModulePrices

PREFETCHED = 2  # layers whose parameters, and whose gradients, a rank holds whole at once


@dataclass(frozen=True, slots=True)
class _Round:
    """A layer while it is whole: seconds of its passes, of its gather and of its gradients' reduction."""

    layer: int
    busy_s: float
    gather_s: float
    scatter_s: float


def sharded_step(prices: ModulePrices, choice: LayoutChoice) -> LayoutStep:
    """All modules on all ranks, parameters gathered layer by layer, each a layer ahead of its use.

    A forward gathers, a backward gathers again and scatters gradients; each hides behind the layer
    that computes meanwhile. A layer without a backward is gathered once.

    Source: Zhao et al. 2023, "PyTorch FSDP", sections 3.3 and 4.

    Complexity: O(layers).
    """
    job = prices.job
    num_rounds = len(job.batch) // (choice.llm.dp * job.microbatch_samples)
    layers: list[tuple[ModuleChoice, LayerPrice]] = []
    for part in (*choice.encoders, choice.llm):
        layers += [(part, layer) for layer in prices.layers(part, job.microbatch_samples)]
    moved = [_exchange_s(prices, part, layer) for part, layer in layers]
    one = list(_rounds([layer for _, layer in layers], moved))
    once_s = _lanes_s(one)
    more_s = _lanes_s([*one, *one]) - once_s if num_rounds > 1 else 0.0
    update_s = held = 0.0
    size = state_bytes(job.settings.precision.num_bytes, job.settings.kernels)
    for part, layer in layers:
        shards = part.num_holders
        per_weight = layer.weights * size.weight + layer.trained * (size.gradient + size.optimizer)
        held += per_weight / shards + layer.kept_bytes
        update_s += layer.trained / shards
    whole = max(layer.weights * size.weight + layer.trained * size.gradient for _, layer in layers)
    working = max(layer.working_bytes for _, layer in layers)
    return LayoutStep(
        passes_s=once_s + (num_rounds - 1) * more_s,
        exchange_s=0.0,
        hidden_s=0.0,
        update_s=prices.cost.update_s(update_s * step_bytes(job.settings.precision)),
        boundary_s=0.0,
        boundary_bytes=0.0,
        peak_bytes=round(held + PREFETCHED * whole + working),
        memory_bytes=min(node.memory_bytes for node in job.cluster.nodes),
        llm_layers=(len(prices.layers(choice.llm, job.microbatch_samples)),),
    )


def _rounds(layers: Sequence[LayerPrice], moved: Sequence[tuple[float, float]]) -> Iterator[_Round]:
    """Forwards, then the backwards that there are; the last layer does both at once."""
    for place, layer in enumerate(layers):
        yield _Round(place, layer.forward_s, moved[place][0], 0.0)
    for place in reversed(range(len(layers))):
        if layers[place].backward_s > 0:
            yield _Round(place, layers[place].backward_s, *moved[place])


def _lanes_s(rounds: Sequence[_Round]) -> float:
    """A round computes while the next one is gathered, and behind that the gradients of the one before."""
    joined: list[_Round] = []
    for found in rounds:
        if joined and joined[-1].layer == found.layer:
            joined[-1] = replace(found, busy_s=joined[-1].busy_s + found.busy_s, gather_s=joined[-1].gather_s)
        else:
            joined.append(found)
    total_s, scattering_s = joined[0].gather_s, 0.0
    for found, following in pairwise(joined):
        total_s += max(found.busy_s, scattering_s + following.gather_s)
        scattering_s = found.scatter_s
    return total_s + max(joined[-1].busy_s, scattering_s) + joined[-1].scatter_s


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
        seconds(Collective.REDUCE_SCATTER, layer.trained * size.gradient, num_ranks, link)
        if layer.trained
        else 0.0,
    )
