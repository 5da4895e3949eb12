"""Prices the transfer of features from an encoder's grid of ranks to the LLM's."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from workbench.cost.collectives import Collective
from workbench.cost.group_link import group_link
from workbench.job.job import Job
from workbench.model.layer import TokenCount
from workbench.model.model_graph import Edge
from workbench.plan.lru_cache import Identity, LruCache
from workbench.planner.layout_choice import ModuleChoice
from workbench.planner.module_price import ModulePrices

_TOKENS: LruCache[float] = LruCache(64)


class Boundary(NamedTuple):
    """The price of a boundary between an encoder and the LLM.

    Stages that read the features receive them one after the other, as the sender's card carries all.

    Args:
        before_s: seconds ahead of the LLM's forwards.
        after_s: seconds behind its backwards.
    """

    before_s: float
    after_s: float


def num_readers(edge: Edge, stage_layers: Sequence[int]) -> int:
    """The number of stages that read the edge, given the layers of each stage, first to last.

    Complexity: O(stages x layers entered).
    """
    ends = list(accumulate(stage_layers, initial=0))
    return sum(bool(edge.entered_in(layers)) for layers in pairwise(ends))


def crossing_tokens(job: Job, edge: Edge) -> float:
    """Mean tokens of a sample that cross an edge: what its source emits there.

    Complexity: O(segments) at first, then O(1).
    """
    key = Identity(job.model), Identity(job.batch), edge
    return _TOKENS.get_or(key, lambda: _crossing_tokens(job, edge))


def _crossing_tokens(job: Job, edge: Edge) -> float:
    source = job.model.module(edge.source)
    is_inside = source.layers[edge.after_layer].emits is TokenCount.IN
    segments = [segment for sample in job.batch for segment in sample.of(source.modality)]
    total = sum(segment.tokens_in if is_inside else segment.tokens_out for segment in segments)
    return total / len(job.batch)


def crossing_bytes(job: Job, edge: Edge, num_samples: float) -> float:
    """Bytes of the features of `num_samples` samples, sent once across the edge."""
    width = job.model.module(edge.source).layers[edge.after_layer].out_width
    return crossing_tokens(job, edge) * num_samples * width * job.settings.precision.num_bytes


def regrouped(
    prices: ModulePrices, encoder: ModuleChoice, llm: ModuleChoice, llm_layers: Sequence[int]
) -> Boundary:
    """The boundary of colocated modules over a whole step.

    An encoder with more replicas gathers features ahead of the LLM; an LLM with more replicas gathers
    gradients behind it; with equal numbers nothing moves.

    Args:
        llm_layers: number of layers of each LLM stage.

    Source: Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training",
    section 3.2.
    """
    job = prices.job
    all_bytes, readers = _features(prices, encoder, len(job.batch), llm_layers)
    fewest, most = sorted((encoder.dp, llm.dp))
    if fewest == most:
        return Boundary(0.0, 0.0)
    finer = encoder if encoder.dp == most else llm
    members = most // fewest
    link = group_link(job.cluster, num_ranks=members, stride=finer.tp * finer.cp)
    seconds = readers * prices.cost.between_ranks_s(Collective.ALL_GATHER, all_bytes / fewest, members, link)
    return Boundary(seconds, 0.0) if finer is encoder else Boundary(0.0, seconds)


def received_bytes(
    prices: ModulePrices, encoder: ModuleChoice, llm: ModuleChoice, llm_layers: Sequence[int]
) -> float:
    """Bytes of features that one replica of the LLM receives from a colocated encoder in a step."""
    all_bytes, readers = _features(prices, encoder, len(prices.job.batch), llm_layers)
    return readers * all_bytes / llm.dp


def sent(
    prices: ModulePrices,
    encoder: ModuleChoice,
    llm: ModuleChoice,
    num_samples: int,
    llm_layers: Sequence[int],
) -> Boundary:
    """The boundary of modules on separate ranks, for `num_samples` samples.

    Leaders send over their cards; receivers broadcast in their tp x cp group.

    Args:
        llm_layers: number of layers of each LLM stage.

    Source: the same, section 3.1.
    """
    cluster = prices.job.cluster
    all_bytes, readers = _features(prices, encoder, num_samples, llm_layers)
    sent_s = prices.send_s(all_bytes / min(encoder.num_replicas, llm.num_replicas), cluster.inter)

    def spread_s(choice: ModuleChoice) -> float:
        members = choice.tp * choice.cp
        link = group_link(cluster, num_ranks=members, stride=1)
        return prices.cost.between_ranks_s(
            Collective.BROADCAST, all_bytes / choice.num_replicas, members, link
        )

    return Boundary(readers * (sent_s + spread_s(llm)), readers * (sent_s + spread_s(encoder)))


def _features(
    prices: ModulePrices, encoder: ModuleChoice, num_samples: int, llm_layers: Sequence[int]
) -> tuple[float, int]:
    """Bytes of one transfer, and the number of LLM stages that read them."""
    edge = next(edge for edge in prices.job.model.edges if edge.source == encoder.module)
    return crossing_bytes(prices.job, edge, num_samples), num_readers(edge, llm_layers)
