"""What joins the ranks of a stage along each axis of its grid."""

from typing import NamedTuple

from workbench.cost.group_link import slowest_ring
from workbench.cost.hardware import Cluster, Link
from workbench.plan.plan import Stage
from workbench.plan.remembered import Remembered, Same


class GridLinks(NamedTuple):
    """Links along each axis; None where it has one rank."""

    tensor: Link | None
    context: Link | None
    experts: Link | None = None


_KNOWN: Remembered[GridLinks] = Remembered(16_384)


def grid_links(cluster: Cluster, stage: Stage) -> GridLinks:
    """What the slowest group of each axis runs over: tensor-parallel ranks in a node keep its link when keys
    leave it.
    """
    return _KNOWN.answer((Same(cluster), stage.ranks, stage.ep), lambda: _grid_links(cluster, stage))


def _grid_links(cluster: Cluster, stage: Stage) -> GridLinks:
    experts = slowest_ring(cluster, stage.expert_ranks) if stage.ep > 1 else None
    if stage.tp * stage.cp == 1:
        return GridLinks(None, None, experts)
    columns = [tuple(row[place] for row in stage.ranks) for place in range(stage.tp)]
    return GridLinks(slowest_ring(cluster, stage.ranks), slowest_ring(cluster, columns), experts)
