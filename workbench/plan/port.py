"""The port that a message occupies: a rank's own inside a node, one network card between nodes."""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from workbench.cost.hardware import Cluster, Link
from workbench.plan.rank_placement import rank_locations


class PortKind(IntEnum):
    """A rank's port inside its node, or the side of a node's card that sends or receives."""

    RANK = 0
    SENDING_CARD = 1
    RECEIVING_CARD = 2


class Port(NamedTuple):
    """One port of the cluster.

    Args:
        kind: what it is.
        owner: rank of a rank's port, else the card's node.
        card: index of the card on its node; 0 for a rank's port.
    """

    kind: PortKind
    owner: int
    card: int


def port_of(cluster: Cluster, source: int, destinations: Sequence[int]) -> tuple[Port, Link]:
    """Return the port that a message from one rank to others occupies, and its link.

    Between nodes it is the slowest card of its route: the sender's, or that of the first destination on a
    node with slower ones, where all that is sent to it meets. Of equal ones it is the sender's.

    Complexity: O(destinations).
    """
    location_of = rank_locations(cluster)
    node, card, _ = location_of[source]
    if all(location_of[rank].node == node for rank in destinations):
        return Port(PortKind.RANK, source, 0), cluster.link_of((node,))
    port, link = Port(PortKind.SENDING_CARD, node, card), cluster.nodes[node].card or cluster.inter
    for rank in destinations:
        node, card, _ = location_of[rank]
        receiving = cluster.nodes[node].card or cluster.inter
        if receiving.bytes_per_s < link.bytes_per_s:
            port, link = Port(PortKind.RECEIVING_CARD, node, card), receiving
    return port, link
