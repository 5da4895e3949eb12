"""What joins the ranks of a stage along each axis of its grid, and what a layer takes on it."""

from typing import NamedTuple

from workbench.cost.group_link import slowest_ring
from workbench.cost.hardware import Cluster, Link
from workbench.cost.model import CostModel, LayerTime, Work
from workbench.model.layer import Layer
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.plan import Stage


class GridLinks(NamedTuple):
    """Links along each axis; None where it has one rank."""

    tensor: Link | None
    context: Link | None
    experts: Link | None = None


class GridCost(NamedTuple):
    """A machine whose ranks share the layers of a module in a grid.

    Args:
        cost: the machine, with the module's experts and tokens divided as they are.
        tp, cp: degrees.
        precision: of weights and activations.
        links: that join the ranks.
    """

    cost: CostModel
    tp: int
    cp: int
    precision: str
    links: GridLinks

    def layer_time(self, layer: Layer, work: Work) -> LayerTime:
        """Of one call, as `CostModel.layer_time`."""
        return self.cost.layer_time(
            layer,
            work,
            tp=self.tp,
            cp=self.cp,
            precision=self.precision,
            link=self.links.tensor,
            context_link=self.links.context,
        )


_KNOWN: LruCache[GridLinks] = LruCache(16_384)
_NEIGHBOURS: LruCache[Link] = LruCache(16_384)


def grid_links(cluster: Cluster, stage: Stage) -> GridLinks:
    """What the slowest group of each axis runs over: tensor-parallel ranks in a node keep its link when keys
    leave it.
    """
    return _KNOWN.get_or((Identity(cluster), stage.ranks, stage.ep), lambda: _grid_links(cluster, stage))


def _grid_links(cluster: Cluster, stage: Stage) -> GridLinks:
    experts = slowest_ring(cluster, stage.expert_ranks) if stage.ep > 1 else None
    if stage.tp * stage.cp == 1:
        return GridLinks(None, None, experts)
    return GridLinks(slowest_ring(cluster, stage.ranks), slowest_ring(cluster, _columns(stage)), experts)


def neighbour_link(cluster: Cluster, stage: Stage) -> Link:
    """What a rank sends the next one of its column over, while all columns do the same.

    In a ring one rank of a column sends out of a node: over one card, and no faster than the column's share
    of all of the node's cards.
    """
    return _NEIGHBOURS.get_or((Identity(cluster), stage.ranks), lambda: _neighbour_link(cluster, stage))


def _neighbour_link(cluster: Cluster, stage: Stage) -> Link:
    columns = _columns(stage)
    one, shared = cluster.slowest(columns), slowest_ring(cluster, columns)
    return one if one.bytes_per_s <= shared.bytes_per_s else shared


def _columns(stage: Stage) -> list[tuple[int, ...]]:
    """The ranks that keys pass between, of each tensor-parallel place."""
    return [tuple(row[index] for row in stage.ranks) for index in range(stage.tp)]
