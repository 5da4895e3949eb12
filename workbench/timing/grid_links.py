"""Links between the ranks of a stage along each axis of its grid, and the time of a layer on them."""

from typing import NamedTuple

from workbench.cost.group_link import slowest_ring
from workbench.cost.hardware import Cluster, Link
from workbench.cost.model import CostModel, LayerTime, Work
from workbench.model.layer import Layer
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.stage import Stage


class GridLinks(NamedTuple):
    """Links along each axis; None where it has one rank."""

    tensor: Link | None
    context: Link | None
    experts: Link | None = None


class GridCost(NamedTuple):
    """A machine whose ranks run the layers of a module in a grid.

    Args:
        cost: the machine, with the module's expert and sequence parallelism.
        tp, cp: degrees.
        precision: of weights and activations.
        links: between the ranks.
    """

    cost: CostModel
    tp: int
    cp: int
    precision: str
    links: GridLinks

    def layer_time(self, layer: Layer, work: Work) -> LayerTime:
        """Return the time of one call, as `CostModel.layer_time`."""
        return self.cost.layer_time(
            layer,
            work,
            tp=self.tp,
            cp=self.cp,
            precision=self.precision,
            link=self.links.tensor,
            context_link=self.links.context,
        )


_GRID_LINKS: LruCache[GridLinks] = LruCache(16_384)
_NEIGHBOURS: LruCache[Link] = LruCache(16_384)


def grid_links(cluster: Cluster, stage: Stage) -> GridLinks:
    """Return the link of the slowest group of each axis.

    Tensor-parallel ranks within a node keep its link even if keys leave the node.
    """
    return _GRID_LINKS.get_or(
        (Identity(cluster), stage.ranks, stage.joint_replicas, stage.ep), lambda: _grid_links(cluster, stage)
    )


def _grid_links(cluster: Cluster, stage: Stage) -> GridLinks:
    experts = slowest_ring(cluster, stage.expert_ranks) if stage.ep > 1 else None
    if stage.tp * stage.cp == 1:
        return GridLinks(None, None, experts)
    return GridLinks(slowest_ring(cluster, stage.ranks), slowest_ring(cluster, stage.context_ranks), experts)


def neighbour_link(cluster: Cluster, stage: Stage) -> Link:
    """Return the link over which each rank sends to the next of its column, while all columns do.

    In a ring one rank of a column sends out of a node: over one card, and no faster than the column's share
    of all the node's cards.
    """
    return _NEIGHBOURS.get_or(
        (Identity(cluster), stage.ranks, stage.joint_replicas), lambda: _neighbour_link(cluster, stage)
    )


def _neighbour_link(cluster: Cluster, stage: Stage) -> Link:
    columns = stage.context_ranks
    single, shared = cluster.slowest(columns), slowest_ring(cluster, columns)
    return single if single.bytes_per_s <= shared.bytes_per_s else shared
