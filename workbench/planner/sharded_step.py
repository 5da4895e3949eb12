"""Estimates a step with sharded parameters (FSDP, HSDP), in seconds and bytes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from workbench.cost.group_link import busy_share, group_link
from workbench.cost.hardware import Link
from workbench.cost.overlapped_collectives import loss_on
from workbench.float_sum import float_sum
from workbench.memory.layer import StateBytes
from workbench.planner.layer_totals import Elements, Totals
from workbench.planner.layout_choice import LayoutChoice, LayoutStep, ModuleChoice
from workbench.planner.matrix_updates import shard_elements
from workbench.planner.module_price import BoundaryExchange, ModulePrices
from workbench.schedule.sharded import ReshardAfter

PREFETCHED = 2  # layers whose parameters, and whose gradients, a rank holds whole at once


@dataclass(frozen=True, slots=True)
class _Round:
    """One gathering of a layer: seconds of its passes, its all-gather and its gradients' reduce-scatter.

    `sum_s` is the all-reduce of gradient shards over instances, after the last reduce-scatter of a step;
    `is_early` says that the all-gather follows the one before it at once, `is_once` that the parameters stay
    for a step: no pass waits for the reduce-scatter.
    """

    layer: int
    busy_s: float
    gather_s: float
    scatter_s: float
    sum_s: float
    is_early: bool = False
    is_once: bool = False


def sharded_step(prices: ModulePrices, choice: LayoutChoice, num_samples: int) -> LayoutStep:
    """The step with all modules on all ranks, each layer's parameters gathered one layer ahead of use.

    A forward gathers; a backward gathers again and scatters gradients, unless `ReshardAfter` leaves it out;
    each overlaps with the layer that computes meanwhile. Parameters that stay for a step are gathered one
    layer after another from its beginning, and their gradients are scattered so, too. A layer without a
    backward is gathered once. Several parameter instances all-reduce their gradient shards layer by layer in
    the last microbatch's backward.

    Args:
        num_samples: samples of a microbatch.

    Source: Zhao et al. 2023, "PyTorch FSDP", sections 3.2.2, 3.3 and 4.

    Complexity: O(layers).
    """
    job = prices.job
    num_rounds = len(job.batch) // (choice.llm.num_replicas * num_samples)
    layers: list[tuple[ModuleChoice, Totals]] = []
    parts = {part.module: part for part in (*choice.encoders, choice.llm)}
    for part in (parts[module.name] for module in job.model.in_order):
        layers += [(part, layer) for layer in prices.layers(part, num_samples)]
    moved = [prices.sharded_exchange(part, layer.held) for part, layer in layers]
    slowed_s = loss_on(job.cluster)
    busy = [busy_share(_near(prices, part)) for part, _ in layers]
    after = [job.settings.of(part.module).reshard_after for part, _ in layers]
    priced = [
        _Layer(layer, own, share, until, _gathered(part, layer.held))
        for (part, layer), own, share, until in zip(layers, moved, busy, after, strict=True)
    ]
    last = list(_rounds(priced, slowed_s, is_first=num_rounds == 1, is_last=True))
    passes_s = once_s = _lanes_s(last)
    if num_rounds > 1:
        first = list(_rounds(priced, slowed_s, is_first=True, is_last=False))
        passes_s = _lanes_s([*first, *last])
        more_s = passes_s - once_s
        if num_rounds > 2 and ReshardAfter.STEP in after:  # else all microbatches have the same rounds
            middle = list(_rounds(priced, slowed_s, is_first=False, is_last=False))
            more_s = _lanes_s([*first, *middle, *last]) - passes_s
        passes_s += (num_rounds - 2) * more_s
    held_bytes = _held_bytes(prices, layers) + _whole_bytes(priced, prices.size)
    matrices = [(part, layer.held.matrices) for part, layer in layers]
    in_matrices = float_sum(shard_elements(*each) for each in matrices)
    updated_s = prices.updated_s(_updated_elements(layers), in_matrices)
    updated_s += prices.matrix_updates.seconds(matrices)
    return LayoutStep(
        passes_s=passes_s,
        exchange_s=max(once_s, _summed_s(last)) - once_s,
        update_s=updated_s,
        boundary_s=0.0,
        peak_bytes=round(held_bytes + max(layer.working_bytes for _, layer in layers)),
        memory_bytes=min(node.memory_bytes for node in job.cluster.nodes),
        llm_layers=(len(prices.layers(choice.llm, num_samples)),),
    )


def _updated_elements(layers: Sequence[tuple[ModuleChoice, Totals]]) -> float:
    """Elements that a rank updates by AdamW."""
    num, tied = 0.0, set[tuple[str, str]]()
    for part, layer in layers:
        for _, trained, shards in _parts(part, layer.held):
            num += trained / shards
        num -= shard_elements(part, layer.held.matrices)
        for each in layer.held.tied:  # units keep tensors of their own, and one of them is updated
            if (part.module, each.name) in tied:
                num -= each.trained / (part.num_holders // part.instances)
            tied.add((part.module, each.name))
    return num


def _held_bytes(prices: ModulePrices, layers: Sequence[tuple[ModuleChoice, Totals]]) -> float:
    """Bytes of a rank's shards of all layers, and of activations that they keep."""
    size, held_bytes = prices.size, 0.0
    for part, layer in layers:
        state_bytes = float_sum(
            (weights * size.weight + trained * (size.gradient + size.optimizer)) / shards
            for weights, trained, shards in _parts(part, layer.held)
        )
        held_bytes += state_bytes - prices.saved_bytes(part, layer.held.matrices) + layer.kept_bytes
    return held_bytes


def _parts(part: ModuleChoice, layer: Elements) -> Iterator[tuple[float, float, int]]:
    """Yield weights of a layer, those of them that train, and among how many ranks they are sharded."""
    dense, dense_trained = layer.weights - layer.expert_weights, layer.trained - layer.of_experts
    yield dense, dense_trained, part.num_holders // part.instances
    if layer.expert_weights:
        yield layer.expert_weights, layer.of_experts, part.num_expert_holders // part.instances


def _gathered(part: ModuleChoice, layer: Elements) -> float:
    """Elements that a round of a layer gathers: all but experts with one holder."""
    return float_sum(weights for weights, _, shards in _parts(part, layer) if shards > 1)


class _Layer(NamedTuple):
    """A layer with its exchange, the share of it that slows down passes, and how long its weights stay.

    `gathered` is the number of elements that a round gathers.
    """

    totals: Totals
    moved: BoundaryExchange
    busy_share: float
    reshard_after: ReshardAfter
    gathered: float


def _rounds(
    layers: Sequence[_Layer], lost_s: Callable[[float, float], float], *, is_first: bool, is_last: bool
) -> Iterator[_Round]:
    """Yield the rounds of a microbatch: of all forwards, then of all backwards that run.

    Each pass is slowed down by the collectives that run beside it.

    Args:
        layers: of all modules.
        lost_s: of (collectives, pass).
        is_first: whether it is the first microbatch of a step.
        is_last: whether it is the last.
    """
    for index, (layer, moved, share, after, _) in enumerate(layers):
        is_once = after is ReshardAfter.STEP
        gather_s = moved.gather_s if is_first or not is_once else 0.0
        forward_s = layer.forward_s + lost_s(share * gather_s, layer.forward_s)
        yield _Round(index, forward_s, gather_s, 0.0, 0.0, is_early=is_first and is_once, is_once=is_once)
    for index, (layer, moved, share, after, _) in reversed(list(enumerate(layers))):
        if (backward_s := layer.backward_s) > 0:
            gather_s = moved.gather_s if after is ReshardAfter.PASS else 0.0
            scatter_s = moved.scatter_s if is_last or after is not ReshardAfter.STEP else 0.0
            busy_s = backward_s + lost_s(share * (gather_s + scatter_s), backward_s)
            is_once = after is ReshardAfter.STEP
            yield _Round(index, busy_s, gather_s, scatter_s, moved.sum_s, is_once=is_once)


def _whole_bytes(layers: Sequence[_Layer], size: StateBytes) -> float:
    """Bytes of whole parameters and gradients: of all layers where they stay, else of those in use."""
    kept = (
        gathered * size.weight * (after is not ReshardAfter.PASS)
        + layer.held.trained * size.gradient * (after is ReshardAfter.STEP)
        for layer, _, _, after, gathered in layers
    )
    in_use = (
        gathered * size.weight * (after is ReshardAfter.PASS)
        + layer.held.trained * size.gradient * (after is not ReshardAfter.STEP)
        for layer, _, _, after, gathered in layers
    )
    return float_sum(kept) + PREFETCHED * max(in_use)


def _joined(rounds: Sequence[_Round]) -> list[_Round]:
    """The rounds, with consecutive ones of the same layer merged."""
    joined: list[_Round] = []
    for current in rounds:
        if joined and joined[-1].layer == current.layer:
            first = joined[-1]
            busy_s = first.busy_s + current.busy_s
            joined[-1] = replace(current, busy_s=busy_s, gather_s=first.gather_s, is_early=first.is_early)
        else:
            joined.append(current)
    return joined


def _ends_s(joined: Sequence[_Round]) -> list[float]:
    """When the passes of each round, and the scatter of the round before, have ended.

    They overlap, and then the next round's gather, which does not wait for those passes where it is early.
    The next passes wait for that gather, and for the scatter unless it is of parameters that stay for a step.
    """
    lane_s = start_s = joined[0].gather_s
    previous = _Round(-1, 0.0, 0.0, 0.0, 0.0)
    ends_s = []
    for current, following in zip(joined, (*joined[1:], previous), strict=True):
        computed_s = start_s + current.busy_s
        scattered_s = (lane_s if following.is_early else max(lane_s, start_s)) + previous.scatter_s
        lane_s = scattered_s + following.gather_s
        waits = following.gather_s or (previous.scatter_s and not previous.is_once)
        start_s = max(computed_s, lane_s) if waits else computed_s
        ends_s.append(max(computed_s, scattered_s))
        previous = current
    return ends_s


def _summed_s(rounds: Sequence[_Round]) -> float:
    """When the last all-reduce over instances ends; each follows the next round's passes and its scatter."""
    joined = _joined(rounds)
    previous = _Round(-1, 0.0, 0.0, 0.0, 0.0)
    summed_s = ended_s = 0.0
    for current, ended_s in zip(joined, _ends_s(joined), strict=True):
        if previous.sum_s:
            summed_s = max(summed_s, ended_s) + previous.sum_s
        previous = current
    return max(summed_s, ended_s + previous.scatter_s) + previous.sum_s


def _lanes_s(rounds: Sequence[_Round]) -> float:
    """Seconds until the passes of all rounds and the last one's scatter have ended."""
    joined = _joined(rounds)
    return _ends_s(joined)[-1] + joined[-1].scatter_s


def _near(prices: ModulePrices, part: ModuleChoice) -> Link:
    """The slowest link among the ranks of an instance."""
    inner = part.num_holders // part.instances
    return group_link(prices.job.cluster, num_ranks=inner, stride=1, num_groups=part.instances)
