"""The same machine with links of another bandwidth, its measured collectives among them."""

from collections.abc import Mapping
from dataclasses import replace

from workbench.cost.collectives import by_ranks
from workbench.cost.model import CostModel
from workbench.cost.profile import CollectiveTable, Profile


def with_faster_links(cost: CostModel, factors: Mapping[str, float]) -> CostModel:
    """The machines of a cost model with the bandwidth of their links multiplied.

    Args:
        factors: by scope, "intra" or "inter".
    """
    beside = {device: with_faster_links(model, factors) for device, model in cost.beside.items()}
    return CostModel(_faster(cost.profile, factors), cost.execution, beside)


def _faster(profile: Profile, factors: Mapping[str, float]) -> Profile:
    links = tuple(
        replace(link, bytes_per_s=link.bytes_per_s * factors.get(link.scope, 1.0)) for link in profile.links
    )
    collectives = tuple(_faster_table(each, factors.get(each.scope, 1.0)) for each in profile.collectives)
    return replace(profile, links=links, collectives=collectives)


def _faster_table(measured: CollectiveTable, factor: float) -> CollectiveTable:
    """Measured times with bandwidth scaled; of every number of ranks, the smallest message is all latency."""
    points = []
    for num_ranks, sizes in by_ranks(measured.table).items():
        latency_s = min((num_bytes, num_bytes / rate) for num_bytes, rate in sizes)[1]
        for num_bytes, rate in sizes:
            moving_s = max(0.0, num_bytes / rate - latency_s)
            points.append((num_ranks, num_bytes, num_bytes / (latency_s + moving_s / factor)))
    return replace(measured, table=replace(measured.table, points=tuple(points)))
